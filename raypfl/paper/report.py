"""A table side by side: paper, ours, difference, seeds, and what to know of each number."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

from raypfl.paper.definition import Definition, Profile
from raypfl.paper.measure import Ours
from raypfl.paper.published import Printed
from raypfl.records.grid import Grid, markdown

HEADER = ("row", "column", "paper", "ours", "difference", "seeds", "remarks")


class Line(NamedTuple):
    """One cell, as far as it is known."""

    row: str
    column: str
    printed: Printed | None
    ours: Ours | None
    remarks: tuple[str, ...] = ()


def grid(table: Definition, profile: Profile, lines: Sequence[Line]) -> Grid:
    """The table to print; remarks are letters that the note explains."""
    letters: dict[str, str] = {}
    for line in lines:
        for remark in line.remarks:
            letters.setdefault(remark, _letter(len(letters)))
    rows = tuple(
        (
            line.row,
            line.column,
            _number(line.printed),
            _number(line.ours),
            _difference(line),
            "-" if line.ours is None else str(line.ours.seeds),
            " ".join(letters[remark] for remark in line.remarks),
        )
        for line in lines
    )
    return Grid(HEADER, rows, words=2, note="\n".join(_notes(table, profile, letters)))


def as_markdown(name: str, table: Definition, profile: Profile, lines: Sequence[Line]) -> str:
    """The same as a page."""
    body = grid(table, profile, lines)
    notes = "\n\n".join(body.note.splitlines())
    return f"# {name}, profile {profile}\n\n{table.title}\n\n{markdown(body._replace(note=''))}\n\n{notes}\n"


def as_csv(lines: Sequence[Line]) -> str:
    """The same for programs, with every number apart."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("row", "column", "paper", "paper_sd", "source", "ours", "ours_sd", "seeds", "remarks"))
    for line in lines:
        printed = ("", "", "") if line.printed is None else line.printed
        ours = ("", "", "") if line.ours is None else line.ours
        writer.writerow((line.row, line.column, *printed, *ours, "; ".join(line.remarks)))
    return text.getvalue()


def _notes(table: Definition, profile: Profile, letters: dict[str, str]) -> list[str]:
    notes = [f"{letter}: {remark}." for remark, letter in letters.items()]
    if table.reconstructed:
        notes.insert(0, f"Of the whole table: {table.reconstructed}.")
    if profile == "small" and table.small is not None:
        notes.append(f"The small profile differs: {table.small.differs}.")
    if table.expect:
        notes.append(f"The paper says: {table.expect}.")
    return notes


def _letter(position: int) -> str:
    above, here = divmod(position, 26)
    return ("" if above == 0 else _letter(above - 1)) + "abcdefghijklmnopqrstuvwxyz"[here]


def _number(found: Printed | Ours | None) -> str:
    if found is None:
        return "-"
    mean = _short(found[0], found[0])
    return mean if found.sd is None else f"{mean} ± {_short(found.sd, found[0])}"


def _difference(line: Line) -> str:
    if line.printed is None or line.ours is None:
        return "-"
    gap = line.ours.mean - line.printed.value
    return f"{gap:+.2f}" if abs(line.printed.value) < 1e4 else f"{100 * gap / line.printed.value:+.1f} %"


def _short(value: float, beside: float) -> str:
    """A count as one, percent to hundredths, a share or a distance to thousandths."""
    if abs(beside) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(beside) >= 1 or beside == 0 else f"{value:.3f}"
