"""Scaling studies: what a round costs as clients, hosts, cohorts, GPU shares and models grow."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raypfl.configuration import Source
from raypfl.console import Console
from raypfl.errors import StorageError
from raypfl.records.environment import environment
from raypfl.records.files import storage_errors, write_json, write_text
from raypfl.records.grid import markdown
from raypfl.records.manifest import check_same
from raypfl.scaling.checks import check
from raypfl.scaling.config import Point, Scaling, read
from raypfl.scaling.measure import Protocol
from raypfl.scaling.plots import plot
from raypfl.scaling.process import PointFailed, run_point
from raypfl.scaling.report import headings, tables
from raypfl.scaling.results import Folder

__all__ = ["run"]


def run(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    console: Console | None = None,
) -> Path:
    """Measure all points of a file of studies, one after another, and write tables and figures.

    Args:
        config: a YAML file with a section `scale`, or the same as a mapping.
        overrides: `dotted.key=value` for all points; `scale.key=value` for the section.
        resume: go on in the folder that is there. Points that were measured are not measured again; those
            that failed are.
        console: what shows the progress; nothing does by default.

    Returns:
        The folder of the results, `storage_path/name`.

    Raises:
        ConfigError: a key is wrong, or what points need does not fit; nothing was started.
        CheckpointError: the folder to go on in has other points.
        StorageError: the folder is there already, or cannot be written.
    """
    console = console or Console()
    scaling = read(config, overrides)
    folder = Folder((scaling.storage_path.expanduser() / scaling.name).absolute())
    _check_folder(folder, scaling, resume=resume)
    todo = [point for point in scaling.chosen if not _is_done(folder, point)]
    if todo:
        console.note(f"{scaling.name}: checking {len(todo)} points")
        check(todo)
    with storage_errors(folder.path, "create"):
        folder.points.mkdir(parents=True, exist_ok=True)
    if not folder.study.is_file():
        write_json(folder.study, scaling.to_dict())
        write_json(folder.environment, environment())
    with _ended_like_interrupted():
        try:
            for number, point in enumerate(todo, 1):
                title = f"[{number}/{len(todo)}] {point.study}, {point.settings}"
                folder.keep(point, _measured(point, scaling, title, console))
                folder.write_tables(scaling.points)
        except KeyboardInterrupt:
            console.note(f"Interrupted. Points that were measured are in {folder.path}; go on with --resume.")
            raise
    _finish(folder, scaling, console)
    return folder.path


def _check_folder(folder: Folder, scaling: Scaling, *, resume: bool) -> None:
    if not folder.path.exists():
        return
    if not resume:
        raise StorageError(
            f"{folder.path} exists already, and results are never overwritten. Go on with --resume, or "
            "choose another `name=`."
        )
    if not folder.study.is_file():
        raise StorageError(f"{folder.path} has no study.json: it is no scaling study. Choose another name.")
    before = folder.read_study()
    now = scaling.to_dict()
    place = (
        "points.*.config.name",
        "points.*.config.storage_path",
        "scale.limit_seconds",
        "scale.free_memory",
    )
    check_same(str(folder.study), before, now, may_differ=place)


def _is_done(folder: Folder, point: Point) -> bool:
    found = folder.kept(point)
    return found is not None and not found["error"]


def _measured(point: Point, scaling: Scaling, title: str, console: Console) -> dict[str, Any]:
    """The point's row: figures, or why there are none."""
    scale = scaling.scale
    protocol = Protocol(scale.warm_up, point.config.rounds, scale.seconds)
    console.note(title)
    surroundings = environment()
    kept = {name: surroundings[name] for name in ("started", "commit", "host", "cpus")}
    try:
        found = run_point(
            point,
            protocol,
            limit_seconds=scale.limit_seconds,
            free_memory=scale.free_memory,
            progress=lambda text: console.note(f"{title}: {text}"),
        )
    except PointFailed as error:
        console.note(f"{title}: failed: {error}")
        return {"error": str(error), "environment": kept, "facts": {}, "rounds": []}
    return {"error": None, "environment": kept, **found}


def _finish(folder: Folder, scaling: Scaling, console: Console) -> None:
    table, fits = folder.write_tables(scaling.points)
    grids = tables(table, fits)
    figures = plot(table, folder.plots)
    text = [f"# {scaling.name}"]
    for title, grid in zip(headings(grids), grids, strict=True):
        text += [f"## {title}", markdown(grid)]
    text += [f"![{figure.stem}](plots/{figure.name})" for figure in figures]
    write_text(folder.summary, "\n\n".join(text) + "\n")
    for grid in grids:
        console.table(grid)
    missing = len(scaling.points) - len(table)
    waiting = f" {missing} points are still to be measured (--resume)." if missing else ""
    console.note(f"Results are in {folder.path}: summary.md, *.parquet, plots.{waiting}")


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """SIGTERM (a batch system's end of time) as Ctrl-C: the point that is under way is ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
