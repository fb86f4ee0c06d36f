"""`raypfl paper NAME`: what is to be run, the runs, and the table beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from raypfl.console import Console
from raypfl.errors import ConfigError, RaypflError
from raypfl.experiment import complete, expected_seconds, finished
from raypfl.paper.cells import Cell, cells, check_unchanged
from raypfl.paper.cost import cost_lines
from raypfl.paper.definition import Definition, Profile, read
from raypfl.paper.measure import Ours, measure, over_seeds
from raypfl.paper.picture import draw
from raypfl.paper.published import published
from raypfl.paper.report import Line, as_csv, as_markdown, grid
from raypfl.paper.toys import toy_lines
from raypfl.records.files import write_text
from raypfl.settings import RunConfig


class Page(NamedTuple):
    """What was written."""

    markdown: Path
    csv: Path
    lines: list[Line]


def reproduce(
    name: str,
    profile: Profile = "full",
    *,
    only: Sequence[str] = (),
    folder: Path | None = None,
    out: Path = Path("runs/paper"),
    dry: bool = False,
    console: Console | None = None,
) -> Page | None:
    """Run what a table or figure needs and is not there yet, and write it beside the paper's.

    Args:
        name: as `known()` has it.
        profile: full, the paper's setting; small, what two cores can bear.
        only: patterns of `row/column`; none: every cell.
        folder: where data files are; None: where each source has them by default.
        out: below it the runs, which tables share, and the pages.
        dry: only say what is to be run and how long that takes.
        console: what shows the progress.

    Returns:
        The page; None if dry, or if nothing of the table is known.

    Raises:
        ConfigError: there is no such table, or no such cell.
    """
    table, console = read(name), console or Console()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Give the one in which MNIST/, cifar10.npz and so on are.")
    console.note(f"{name}, profile {profile}: {table.title}")
    if table.absent:
        console.note(f"Nothing to run: {table.absent}.")
        return None
    if table.kind == "cost":
        return None if dry else _write(name, table, profile, cost_lines(table), out, console)
    if table.kind == "divergence":
        if dry:
            console.note("Minutes at most.")
            return None
        lines, traces = toy_lines(table, profile, only, folder, out, console)
        if traces:
            printed = {line.row: line.printed.value for line in lines if line.printed is not None}
            draw(picture := out / f"{name}-{profile}.png", table.title.partition(":")[0], traces, printed)
            console.note(f"Written: {picture}")
        return _write(name, table, profile, lines, out, console)
    chosen = cells(table, profile, only=only, folder=folder)
    runs = {out / "runs" / key: run for cell in chosen for key, run in cell.runs.items()}
    # Those on the same data follow one another: they are read once.
    runs = dict(sorted(runs.items(), key=lambda item: item[1].data.model_dump_json()))
    for path, run in runs.items():
        if finished(path):
            check_unchanged(path, run)
    _announce(runs, chosen, console)
    if dry:
        return None
    failed: dict[Path, RaypflError] = {}
    try:
        for path, error in complete(runs, console=console):
            if error is not None:
                failed[path] = error
                console.note(f"{path.name}: {type(error).__name__}: {error}")
    finally:
        # Also when interrupted: what is finished stands in the table, and is not run again.
        every = [_line(cell, out, failed) for cell in cells(table, profile, folder=folder)]
        every += _differences(table, every)
        asked = {(cell.row, cell.column) for cell in chosen}
        lines = [line for line in every if not only or (line.row, line.column) in asked]
        page = _write(name, table, profile, lines, out, console, page=every)
    return page


def _announce(runs: Mapping[Path, RunConfig], chosen: Sequence[Cell], console: Console) -> None:
    """How much there is to do, by one client's first epoch of each run."""
    todo = {path: run for path, run in runs.items() if not finished(path)}
    console.note(f"{len(chosen)} cells from {len(runs)} runs, {len(runs) - len(todo)} of them finished.")
    if not todo:
        return
    # Seeds, and options of a method, cost the same.
    alike = {path: _kind(run) for path, run in todo.items()}
    examples = {kind: todo[path] for path, kind in alike.items()}
    seconds = dict(zip(examples, expected_seconds(examples.values()), strict=True))
    known = [found for kind in alike.values() if (found := seconds[kind]) is not None]
    without = f"; {len(todo) - len(known)} of the runs will fail" if len(known) < len(todo) else ""
    console.note(
        f"Training takes at most about {timedelta(seconds=round(sum(known)))} on one core of this machine as "
        f"busy as it is now (one client at a time; small networks are faster together){without}."
    )


def _kind(run: RunConfig) -> str:
    apart = {"name", "seed", "method"}
    return f"{run.method.name} {run.model_dump_json(exclude=apart)}"


def _line(cell: Cell, out: Path, failed: Mapping[Path, RaypflError]) -> Line:
    paths = [out / "runs" / key for key in cell.runs]
    found = [measure(path, cell.view, cell.statistic) for path in paths if finished(path)]
    values = [value for value in found if value is not None]
    remarks = list(cell.remarks)
    errors = {f"{type(error).__name__}: {error}" for path in paths if (error := failed.get(path))}
    remarks += sorted(error.partition("\n")[0].rstrip(".") for error in errors)
    if len(found) < len(paths) and not errors:
        remarks.append("not every seed is finished" if found else "not run yet")
    elif found and not values:
        named = cell.statistic.removeprefix("diagnostics/")
        what = cell.view.replace("/", ", ") if named == cell.statistic else f"{named} in the last round"
        remarks.append(f"has no {what}")
    return Line(cell.row, cell.column, cell.printed, over_seeds(values), tuple(remarks))


def _differences(table: Definition, lines: Sequence[Line]) -> list[Line]:
    by_name = {(line.row, line.column): line.ours for line in lines}
    found = []
    for wanted in table.differences:
        gaps = []
        for column in wanted.columns or table.columns:
            one, other = (by_name.get((row, column)) for row in wanted.rows)
            if one is not None and other is not None:
                gaps.append(Ours(one.mean - other.mean, None, min(one.seeds, other.seeds)))
        printed = published().get((table.paper, table.table, wanted.name, wanted.column))
        remarks = ("a difference of two rows above",)
        found.append(Line(wanted.name, wanted.column, printed, max(gaps, default=None), remarks))
    return found


def _write(
    name: str,
    table: Definition,
    profile: Profile,
    lines: list[Line],
    out: Path,
    console: Console,
    page: list[Line] | None = None,
) -> Page:
    """Show lines; the files have all of `page`, if that is more."""
    stem = out / f"{name}-{profile}"
    written = Page(stem.with_suffix(".md"), stem.with_suffix(".csv"), lines)
    write_text(written.markdown, as_markdown(name, table, profile, page or lines))
    write_text(written.csv, as_csv(page or lines))
    console.table(grid(table, profile, lines))
    console.note(f"Written: {written.markdown}, {written.csv}")
    return written
