"""The folder of a sweep: one run folder for each trial, and what came of it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import ValidationError

from raypfl.config import StrictModel
from raypfl.configuration import dump_yaml, read_yaml, to_dict
from raypfl.errors import StorageError
from raypfl.records.files import storage_errors, write_json, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.manifest import check_same
from raypfl.sweep.config import SweepConfig
from raypfl.sweep.reading import SWEEP

Status: TypeAlias = Literal["finished", "stopped", "failed", "interrupted"]

MAY_DIFFER = (
    "name",
    "storage_path",
    "concurrency",
    "trial.*",
    *(f"{section}.{key}" for section in ("base", "set") for key in ("engine.address", "engine.num_actors")),
    *(
        f"{section}.{key}"
        for section in ("base", "set")
        for key in ("resources.*", "checkpoint.*", "data.root")
    ),
)
"""Keys that say where and how fast a sweep goes, and change no number."""


class Outcome(StrictModel):
    """What came of a trial, in its folder; without this file it has not ended."""

    status: Status
    seconds: float  # wall clock, over all attempts
    error: str | None = None


class SweepFolder:
    """Paths and files of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def settings(self) -> Path:
        """The sweep as it was started."""
        return self.path / SWEEP

    @property
    def trials(self) -> Path:
        """The table of trials."""
        return self.path / "trials.parquet"

    @property
    def summary(self) -> Path:
        """Tables to read."""
        return self.path / "summary.md"

    @property
    def plots(self) -> Path:
        """Folder of the figures."""
        return self.path / "plots"

    @property
    def stop(self) -> Path:
        """There while trials are asked to end after the round they are in."""
        return self.path / ".stop"

    def run(self, label: str) -> RunFolder:
        """A trial's run folder."""
        return RunFolder(self.path / label)

    def outcome(self, label: str) -> Outcome | None:
        """What came of a trial; None if it has not ended."""
        path = self._outcome(label)
        if not path.is_file():
            return None
        with storage_errors(path, "read"):
            text = path.read_text(encoding="utf-8")
        try:
            return Outcome.model_validate_json(text)
        except ValidationError as error:
            raise StorageError(
                f"{path} is damaged: {error.errors()[0]['msg']}. Remove it, and the trial is continued."
            ) from None

    def record(self, label: str, outcome: Outcome) -> None:
        """Write what came of a trial."""
        self.run(label).path.mkdir(exist_ok=True)
        write_json(self._outcome(label), outcome.model_dump(exclude_defaults=True))

    def begin(self, config: SweepConfig) -> None:
        """Make the folder.

        Raises:
            StorageError: it is there already, or cannot be made.
        """
        if self.settings.is_file():
            raise StorageError(
                f"{self.path} has a sweep already. Continue it with `raypfl sweep --resume {self.path}`, or "
                "choose another `name=`."
            )
        RunFolder.create(self.path.parent, self.path.name)
        write_text(self.settings, dump_yaml(to_dict(config)))

    def check_unchanged(self, config: SweepConfig) -> None:
        """Refuse to go on with other settings than the sweep was started with.

        Raises:
            CheckpointError: lists each key that differs.
        """
        before = SweepConfig.model_validate(read_yaml(self.settings))
        check_same(str(self.settings), to_dict(before), to_dict(config), may_differ=MAY_DIFFER)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder, so that no second process works on the same trials."""
        with storage_errors(self.path), (self.path / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    f"{self.path} is in use by another process. Wait for it, or end it."
                ) from None
            self.stop.unlink(missing_ok=True)
            try:
                yield
            finally:
                self.stop.unlink(missing_ok=True)

    def _outcome(self, label: str) -> Path:
        return self.path / label / "trial.json"
