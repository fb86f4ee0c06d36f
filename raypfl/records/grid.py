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
