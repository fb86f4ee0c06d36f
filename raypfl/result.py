"""What a run left, from Python: its figures and its tables as pandas frames."""

from __future__ import annotations

import html
from dataclasses import asdict
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors
from raypfl.records.folder import RunFolder
from raypfl.records.grid import Grid, html_table, plain
from raypfl.records.metrics import PAIRS_SCHEMA
from raypfl.records.ranking import ranked_table
from raypfl.records.storage import Place, parquet
from raypfl.records.summary import summarise

if TYPE_CHECKING:
    import pandas as pd

    from raypfl.report.comparison import Comparison
    from raypfl.report.picture import Pictures


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

    def pairs(self) -> pd.DataFrame:
        """Matrices between clients (`evaluation.diagnostics`): a row per round, name, receiver and source."""
        return self._frame("pairs")

    def clock(self) -> pd.DataFrame:
        """Virtual time (`clock`): a row per client and iteration, and, as client -1, per round of all."""
        return self._frame("clock")

    def dropped(self) -> pd.DataFrame:
        """Clients that were left out of a round (`faults.policy`): a row each, with the reason."""
        return self._frame("dropped")

    def partition(self) -> pd.DataFrame:
        """Who has which samples: a row per client and split, with a column for each class."""
        import pandas as pd

        parts = []
        for run in self._folder.runs():
            with storage_errors(run.partition_table, "read"):
                table = pd.read_csv(StringIO(run.partition_table.read_text()))
            table.insert(0, "run", run.path.name)
            parts.append(table)
        frame: pd.DataFrame = pd.concat(parts, ignore_index=True)
        return frame

    def compare(self, *others: Result | str | Place, **options: Any) -> Comparison:
        """These runs and others ranked, with paired differences: `raypfl.compare` with its options."""
        from raypfl.report.comparison import compare

        return compare(self, *others, **options)

    def report(self, out: str | Place | None = None) -> Place:
        """Write the page of these runs with all pictures; its path. In `report`, inside the folder, if None.

        Raises:
            StorageError: `out` cannot be written.
        """
        from raypfl.report.page import write

        return write([self.path], out).path

    def plot_accuracy(self) -> Pictures:
        """Test accuracy over rounds, as papers report it and for every model and point that there is."""
        return self._plot("curves", "accuracy")

    def plot_loss(self) -> Pictures:
        """Loss over rounds, on test data and in local training."""
        return self._plot("curves", "loss")

    def plot_worst_decile(self) -> Pictures:
        """The mean accuracy of the worst 10 % of clients over rounds."""
        return self._plot("curves", "worst_decile")

    def plot_clients(self) -> Pictures:
        """How accuracy is spread over clients in the best round."""
        return self._plot("clients", "distribution")

    def plot_partition(self) -> Pictures:
        """Training samples of each client and class."""
        return self._plot("partition", "bubbles")

    def plot_collaboration(self) -> Pictures:
        """Matrices between clients over rounds; for methods without a server, who heard whom."""
        return self._plot("collaboration", "matrices", "heard")

    def plot_distances(self) -> Pictures:
        """Distances over rounds of models that pull and that push each other."""
        return self._plot("collaboration", "distances")

    def plot_traffic(self) -> Pictures:
        """Accuracy against bytes, and the load of the busiest node."""
        return self._plot("resources", "traffic")

    def plot_time(self) -> Pictures:
        """Seconds of a round by what is done in it, and accuracy in virtual time if there is a clock."""
        return self._plot("resources", "seconds", "virtual_time")

    def _plot(self, module: str, *functions: str) -> Pictures:
        from raypfl.report.loading import read_groups
        from raypfl.report.picture import Pictures

        groups, drawing = read_groups([self.path]), import_module(f"raypfl.report.{module}")
        found = Pictures(picture for function in functions for picture in getattr(drawing, function)(groups))
        if not found:
            raise StorageError(
                f"{self.path} has nothing to draw of this kind. Matrices and distances between clients need "
                "evaluation.diagnostics=true and a method that has them, traffic needs messages, and curves "
                "need an evaluated round."
            )
        return found

    def _frame(self, name: str) -> pd.DataFrame:
        tables = []
        for run in self._folder.runs():
            path = run.metrics / f"{name}.parquet"
            if name == "pairs" and not path.exists():
                # A run of a version that did not have this table.
                table = PAIRS_SCHEMA.empty_table()
            else:
                with storage_errors(path, "read"):
                    table = pq.read_table(**parquet(path))
            runs = pa.array([run.path.name] * len(table)).dictionary_encode()
            tables.append(table.add_column(0, "run", runs))
        frame: pd.DataFrame = pa.concat_tables(tables).unify_dictionaries().to_pandas()
        return frame

    def __repr__(self) -> str:
        """Path and ranking."""
        return f"Result({str(self.path)!r})\n{plain(self._ranking())}"

    def _repr_html_(self) -> str:
        """Path and ranking, for notebooks."""
        return f"<p><code>{html.escape(str(self.path))}</code></p>{html_table(self._ranking())}"

    def _ranking(self) -> Grid:
        return ranked_table([summarise(run) for run in self._folder.runs()])
