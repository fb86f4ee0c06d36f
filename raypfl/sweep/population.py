"""Population based training: a run that goes on from another's models, with changed keys.

A member of the population is a run like any other, in segments of so many rounds. Where Tune tells it to go
on from another member, it takes over that one's checkpoint and records up to there, so its folder holds the
history of the models it has; `lineage.json` says whose that was, and which keys held from which round on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue
from ray import tune

from raypfl.configuration import to_dict
from raypfl.errors import CheckpointError
from raypfl.records import checkpoints
from raypfl.records.files import storage_errors, write_json
from raypfl.settings import RunConfig
from raypfl.sweep.config import Dimension

LINEAGE = "lineage.json"
ADOPTED = ".adopted"
"""In a member's folder: what it is about to take over."""
PAST = ".past"
"""In a member's folder: by number, what it had before it took something over. Others may still be told to go
on from there."""
NOTE = "note.json"

READY = "ready"
METRICS, CHECKPOINTS = "metrics", "checkpoints"
"""As run folders have them."""
ATTEMPTS = 3

KEEP_ALL = 1_000_000
"""Checkpoints during a sweep: a member may be asked for an early one while it is rounds ahead."""

Report = Callable[[int, Any], None]


class Note(NamedTuple):
    """What Tune's checkpoints hold here: whose state to go on from. The state itself is in run folders."""

    label: str
    number: int  # how often that member had taken something over by then
    round: int


class Member:
    """One run of a population.

    Args:
        path: the sweep's folder.
        label: of the run.
        keys: the values of its keys now.
    """

    def __init__(self, path: Path, label: str, keys: Mapping[str, JsonValue]) -> None:
        self._path, self._label, self._keys = path, label, dict(keys)
        self._folder = path / label

    def take_place(self, config: RunConfig) -> None:
        """Go back to where Tune wants this run to go on: its own state, or another member's."""
        _swap(self._folder)
        note = _noted()
        if note is None and not lineage(self._folder):
            _write_lineage(self._folder, [], self._step(0, self._label))
        elif note is not None and note.label != self._label:
            _adopt(self._path / note.label, note, self._folder, config, self._step(note.round, note.label))

    def run(
        self, config: RunConfig, interval: int, work: Callable[[RunConfig], None], report: Report
    ) -> None:
        """Run to the end, segment by segment.

        Args:
            config: the run's; its keys do not change in here.
            interval: rounds of a segment.
            work: runs a configuration to its last round.
            report: told the round after each segment but the last; may end the function.
        """
        latest = checkpoints.latest(self._folder / CHECKPOINTS)
        done = 0 if latest is None else checkpoints.round_of(latest)
        keep = config.checkpoint.model_copy(update={"keep": KEEP_ALL})
        for end in segments(done, config.rounds, interval):
            work(config.model_copy(update={"rounds": end, "checkpoint": keep}))
            # After the last round nothing goes on from anywhere.
            if end < config.rounds:
                with _checkpoint(Note(self._label, _taken_over(self._folder), end)) as checkpoint:
                    report(end, checkpoint)

    def _step(self, round: int, origin: str) -> dict[str, Any]:
        return {"round": round, "from": origin, "keys": self._keys}


def segments(done: int, rounds: int, interval: int) -> list[int]:
    """The rounds at which members exchange, after `done`; the last one is the run's."""
    return [*range((done // interval + 1) * interval, rounds, interval), rounds] if done < rounds else []


def lineage(folder: Path) -> list[dict[str, Any]]:
    """What held from which round on: `round`, `from` (a member's label), `keys`; or nothing."""
    path = folder / LINEAGE
    if not path.is_file():
        return []
    with storage_errors(path, "read"):
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["lineage"]
    return found


def _write_lineage(folder: Path, before: list[dict[str, Any]], step: dict[str, Any]) -> None:
    write_json(folder / LINEAGE, {"lineage": [*before, step]})


def domain_of(dimension: Dimension) -> Any:
    """What Tune draws a key from."""
    low, high = dimension.bounds
    if dimension.integer is not None:
        return tune.randint(int(low), int(high) + 1)
    return tune.loguniform(low, high) if dimension.log_uniform is not None else tune.uniform(low, high)


def within(space: Mapping[str, Dimension]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that puts the keys of a task back between their ends."""

    def clip(config: dict[str, Any]) -> dict[str, Any]:
        task, keys = config["task"], {}
        for name, value in task["keys"].items():
            low, high = space[name].bounds
            keys[name] = type(value)(min(max(value, low), high))
        return {"task": {**task, "keys": keys}}

    return clip


def _noted() -> Note | None:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return Note(**json.loads(Path(folder, NOTE).read_text(encoding="utf-8")))


@contextmanager
def _checkpoint(note: Note) -> Iterator[Any]:
    """Until it was reported: Tune has a copy then."""
    with tempfile.TemporaryDirectory(prefix="raypfl-note-") as folder:
        Path(folder, NOTE).write_text(json.dumps(note._asdict()), encoding="utf-8")
        yield tune.Checkpoint.from_directory(folder)


def clear(folder: Path, keep: int) -> None:
    """Drop what only a sweep that goes on needs of a member: its past, and all but `keep` checkpoints."""
    with storage_errors(folder):
        shutil.rmtree(folder / PAST, ignore_errors=True)
    checkpoints.prune(folder / CHECKPOINTS, keep)


def _taken_over(path: Path) -> int:
    return len(list((path / PAST).glob("*")))


def _adopt(donor: Path, note: Note, own: Path, config: RunConfig, step: dict[str, Any]) -> None:
    """Take over another member's state and its records, in steps that survive a crash."""
    staged = own / ADOPTED
    for attempt in range(ATTEMPTS):
        past = donor / PAST / str(note.number)
        source = past if past.is_dir() else donor
        try:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.copytree(source / METRICS, staged / METRICS, ignore=shutil.ignore_patterns(".*"))
            checkpoints.copy(source / CHECKPOINTS, note.round, staged / CHECKPOINTS, to_dict(config))
            history = [before for before in lineage(source) if before["round"] < note.round]
            _write_lineage(staged, history, step)
            # The donor may have taken something over itself in the middle of this.
            if source == past or _taken_over(donor) == note.number:
                break
        except (OSError, shutil.Error, CheckpointError):
            if attempt == ATTEMPTS - 1:
                raise
    with storage_errors(staged):
        (staged / READY).touch()
    _swap(own)


def _swap(path: Path) -> None:
    """Put what was taken over in its place; what was staged in part is dropped."""
    staged = path / ADOPTED
    if not staged.is_dir():
        return
    with storage_errors(path):
        if (staged / READY).exists():
            number = (staged / READY).read_text(encoding="utf-8") or str(_taken_over(path))
            # Written down first: a swap that is done again moves to the same place.
            (staged / READY).write_text(number, encoding="utf-8")
            past = path / PAST / number
            past.mkdir(parents=True, exist_ok=True)
            for name in (METRICS, CHECKPOINTS, LINEAGE):
                if (staged / name).exists():
                    if (path / name).exists() and not (past / name).exists():
                        (path / name).rename(past / name)
                    (staged / name).rename(path / name)
        shutil.rmtree(staged)
