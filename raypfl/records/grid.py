"""Text tables: a header, rows of cells, a note; as aligned text, Markdown or HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple


class Grid(NamedTuple):
    """A table that is ready to print."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1  # so many first columns hold words (aligned left), the others numbers (right)
    note: str = ""  # what the numbers are


def plain(grid: Grid) -> str:
    """Aligned text for a file, a pipe or a log."""
    widths = [max(map(len, column)) for column in zip(grid.header, *grid.rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.ljust(width) if position < grid.words else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    ruler = tuple("-" * width for width in widths)
    return "\n".join([*map(line, (grid.header, ruler, *grid.rows)), *([grid.note] if grid.note else [])])


def fitting(grid: Grid, width: int, *, between: int) -> list[Grid]:
    """The table in parts that are narrow enough, one below another, each with the first column.

    Args:
        grid: the table.
        width: letters that a line has room for.
        between: letters that each column takes beside its content.

    Returns:
        One part if all fits; headers may be broken between words, cells may not. The last one has the note.
    """
    needed = [width_of(column) + between for column in zip(grid.header, *grid.rows, strict=True)]
    parts = [[0]]
    for place in range(1, len(grid.header)):
        if len(parts[-1]) > 1 and sum(needed[other] for other in parts[-1]) + needed[place] > width:
            parts.append([0])
        parts[-1].append(place)
    return [
        Grid(
            tuple(grid.header[place] for place in part),
            tuple(tuple(row[place] for place in part) for row in grid.rows),
            sum(place < grid.words for place in part),
            grid.note if part is parts[-1] else "",
        )
        for part in parts
    ]


def width_of(column: Sequence[str]) -> int:
    """Letters that a column needs, a header and cells: cells stay whole, words of the header, too."""
    header, *cells = column
    return max(map(len, [*header.split(), *cells]), default=0)


def markdown(grid: Grid) -> str:
    """A Markdown table, and the note as a paragraph under it."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    ruler = tuple("---" if position < grid.words else "--:" for position in range(len(grid.header)))
    table = "\n".join(map(line, (grid.header, ruler, *grid.rows)))
    return f"{table}\n\n{grid.note}" if grid.note else table


def html_table(grid: Grid) -> str:
    """A plain HTML table for notebooks, numbers to the right, and the note under it."""

    def cells(tag: str, row: Sequence[str]) -> str:
        sides = ("left" if place < grid.words else "right" for place in range(len(row)))
        return "".join(
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in grid.rows)
    note = f"<p>{html.escape(grid.note)}</p>" if grid.note else ""
    return f"<table><thead><tr>{cells('th', grid.header)}</tr></thead><tbody>{body}</tbody></table>{note}"
