"""The folder that one run leaves: where each thing lies, and that it is never overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder. A folder of several runs (methods, seeds) holds one such folder each."""

    path: Path

    @classmethod
    def create(cls, storage_path: str | Path, name: str) -> RunFolder:
        """Make the new folder `storage_path/name`, and parents that are missing.

        Raises:
            StorageError: the folder is there already, or the storage cannot be written.
        """
        path = (Path(storage_path).expanduser() / name).absolute()
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
    def open(cls, path: str | Path) -> RunFolder:
        """The folder of a run, or of several, that was started before.

        Raises:
            StorageError: there is no run at `path`.
        """
        folder = cls(Path(path).expanduser().absolute())
        if not folder.config.is_file() and folder.is_run:
            raise StorageError(
                f"{folder.path} is not a run: it has no {folder.config.name}. "
                "Give the folder that the run printed, storage_path/name."
            )
        return folder

    @property
    def config(self) -> Path:
        """The complete resolved configuration."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, machine and command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """Folder of the Parquet tables."""
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """The run's figures, to read."""
        return self.path / "summary.md"

    @property
    def log(self) -> Path:
        """The run's log."""
        return self.path / "run.log"

    @property
    def partition(self) -> Path:
        """The clients' sample indices."""
        return self.path / "partition.npz"

    @property
    def partition_table(self) -> Path:
        """The clients' class counts, to read."""
        return self.path / "partition.csv"

    @property
    def is_run(self) -> bool:
        """Whether this is one run, and not a folder of several."""
        return self.runs() == (self,)

    def runs(self) -> tuple[RunFolder, ...]:
        """The runs inside, by name; a folder that holds no other run is its only run."""
        inside = tuple(RunFolder(config.parent) for config in sorted(self.path.glob("*/config.yaml")))
        return inside or (self,)
