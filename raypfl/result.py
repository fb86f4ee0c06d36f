"""What a run left, from Python: its figures and its tables as pandas frames."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.records.files import storage_errors
from raypfl.records.folder import RunFolder
from raypfl.records.grid import plain
from raypfl.records.ranking import ranked_table
from raypfl.records.storage import Place, parquet
from raypfl.records.summary import summarise

if TYPE_CHECKING:
    import pandas as pd


class Result:
    """A run's folder, or a folder of several runs (methods, seeds); also of runs that still go on.

    Tables have the columns of the Parquet files after a first column `run`, the name of each run's folder.
    """

    def __init__(self, path: str | Place) -> None:
        """Open `path`, a folder or an address such as `s3://bucket/runs/name`.

        Raises:
            StorageError: there is no run at `path`.
        """
        self._folder = RunFolder.open(path)

    @property
    def path(self) -> Place:
        """The folder."""
        return self._folder.path

    @property
    def runs(self) -> tuple[Result, ...]:
        """The runs in the folder, by name; a single run is its only one."""
        return tuple(Result(run.path) for run in self._folder.runs())

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of a run (fields of `records.summary.Summary`); of several, by the name of each."""
        summaries = {run.path.name: asdict(summarise(run)) for run in self._folder.runs()}
        return summaries[self.path.name] if self._folder.is_run else summaries

    def rounds(self) -> pd.DataFrame:
        """Statistics over clients, traffic and seconds: a row per round, point, model and split."""
        return self._frame("rounds")

    def clients(self) -> pd.DataFrame:
        """Accuracy in [0, 1], loss and samples: a row per round, client, point, model and split."""
        return self._frame("clients")

    def traffic(self) -> pd.DataFrame:
        """Messages: a row each, with values and bytes; source or destination -1 is the server."""
        return self._frame("traffic")

    def diagnostics(self) -> pd.DataFrame:
        """Numbers about the server's step (`evaluation.diagnostics`): a row per round and name."""
        return self._frame("diagnostics")

    def clock(self) -> pd.DataFrame:
        """Virtual time (`clock`): a row per client and iteration, and, as client -1, per round of all."""
        return self._frame("clock")

    def dropped(self) -> pd.DataFrame:
        """Clients that were left out of a round (`faults.policy`): a row each, with the reason."""
        return self._frame("dropped")

    def _frame(self, name: str) -> pd.DataFrame:
        tables = []
        for run in self._folder.runs():
            with storage_errors(path := run.metrics / f"{name}.parquet", "read"):
                table = pq.read_table(**parquet(path))
            runs = pa.array([run.path.name] * len(table)).dictionary_encode()
            tables.append(table.add_column(0, "run", runs))
        frame: pd.DataFrame = pa.concat_tables(tables).unify_dictionaries().to_pandas()
        return frame

    def __repr__(self) -> str:
        """Path and ranking."""
        table = plain(ranked_table([summarise(run) for run in self._folder.runs()]))
        return f"Result({str(self.path)!r})\n{table}"
