"""The folder that one run leaves: where each thing lies, and that it is never overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors
from raypfl.records.storage import Place, place


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder. A folder of several runs (methods, seeds) holds one such folder each."""

    path: Place

    @classmethod
    def create(cls, storage_path: str | Place, name: str) -> RunFolder:
        """Make the new folder `storage_path/name`, and parents that are missing.

        Raises:
            StorageError: the folder is there already, or the storage cannot be written.
        """
        path = place(storage_path) / name
        with storage_errors(path, "create"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                raise StorageError(
                    f"{path} exists already, and a run is never overwritten. "
                    f"Continue it with `raypfl resume {path}`, or choose another `name=`."
                ) from None
        return cls(path)

    @classmethod
    def open(cls, path: str | Place) -> RunFolder:
        """The folder of a run, or of several, that was started before.

        Raises:
            StorageError: there is no run at `path`.
        """
        folder = cls(place(path))
        with storage_errors(folder.path, "read"):
            there = folder.config.is_file() or not folder.is_run
        if not there:
            raise StorageError(
                f"{folder.path} is not a run: it has no {folder.config.name}. "
                "Give the folder that the run printed, storage_path/name."
            )
        return folder

    @property
    def config(self) -> Place:
        """The complete resolved configuration."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Place:
        """Versions, machine and command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Place:
        """Folder of the Parquet tables."""
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Place:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Place:
        """The run's figures, to read."""
        return self.path / "summary.md"

    @property
    def log(self) -> Place:
        """The run's log."""
        return self.path / "run.log"

    @property
    def partition(self) -> Place:
        """The clients' sample indices."""
        return self.path / "partition.npz"

    @property
    def partition_table(self) -> Place:
        """The clients' class counts, to read."""
        return self.path / "partition.csv"

    @property
    def is_run(self) -> bool:
        """Whether this is one run, and not a folder of several."""
        return self.runs() == (self,)

    def runs(self) -> tuple[RunFolder, ...]:
        """The runs inside, by name; a folder that holds no other run is its only run."""
        found: Iterable[Place] = self.path.glob("*/config.yaml")
        inside = tuple(RunFolder(config.parent) for config in sorted(found, key=str))
        return inside or (self,)
