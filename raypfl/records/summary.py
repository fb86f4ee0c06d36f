"""A run's figures: best, last and last ten, and what they were chosen on.

Everything is computed from the run's `rounds.parquet`, also while the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow.parquet as pq

from raypfl.errors import StorageError
from raypfl.records.folder import RunFolder
from raypfl.records.metrics import TRAINING
from raypfl.records.storage import Place, parquet

LAST_ROUNDS = 10


@dataclass(frozen=True)
class Score:
    """Test accuracy in one round, over clients, in [0, 1]."""

    round: int
    mean: float
    weighted: float
    sd: float
    worst_decile: float


@dataclass(frozen=True)
class Figures:
    """Test accuracy of one (model, point) over the rounds that were evaluated."""

    best: Score  # best round, chosen on test, as the papers report
    validated: Score | None  # the test score in the best round on validation; None without such a split
    last: Score
    last_ten_mean: float  # uniform mean of the last ten evaluated rounds, or of all if there are fewer
    evaluations: int


@dataclass(frozen=True)
class Summary:
    """One run (a method, a seed) in numbers."""

    run: str  # name of the run's folder
    method: str
    seed: int
    rounds: int  # completed rounds
    reported: (
        str  # the "model/point" that the method's papers report; a key of `figures` once it was evaluated
    )
    figures: dict[str, Figures]  # by "model/point"
    upload_bytes: int
    download_bytes: int
    round_seconds: float
    server_seconds: float
    evaluation_seconds: float


def summarise(folder: RunFolder) -> Summary:
    """Summarise one run from its tables.

    Raises:
        StorageError: the run has no readable `rounds.parquet`.
    """
    path = folder.metrics / "rounds.parquet"
    table = _read(path)
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    rows: list[dict[str, Any]] = table.to_pylist()
    once_a_round = [row for row in rows if (row["point"], row["model"], row["split"]) == TRAINING]

    def view(row: Mapping[str, Any]) -> str:
        return f"{row['model']}/{row['point']}"

    evaluated = sorted((row for row in rows if row["split"] != "train" and row["clients"]), key=view)
    figures = {name: _figures(list(group)) for name, group in groupby(evaluated, key=view)}
    return Summary(
        run=folder.path.name,
        method=metadata["method"],
        seed=int(metadata["seed"]),
        rounds=max((row["round"] for row in once_a_round), default=0),
        reported=metadata["reported"],
        figures={name: value for name, value in figures.items() if value is not None},
        upload_bytes=sum(row["upload_bytes"] for row in once_a_round),
        download_bytes=sum(row["download_bytes"] for row in once_a_round),
        round_seconds=sum(row["round_seconds"] for row in once_a_round),
        server_seconds=sum(row["server_seconds"] for row in once_a_round),
        evaluation_seconds=sum(row["evaluation_seconds"] for row in once_a_round),
    )


def _read(path: Place) -> Any:
    try:
        return pq.read_table(**parquet(path))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"cannot read {path}: {error}. If the run has just started, wait for its first round."
        ) from error


def _figures(rows: Sequence[Mapping[str, Any]]) -> Figures | None:
    """Figures from the test and validation rows of one (model, point); None without test rows."""
    scores = {row["round"]: _score(row) for row in rows if row["split"] == "test"}
    if not scores:
        return None
    validation = {
        row["round"]: row["accuracy_mean"]
        for row in rows
        if row["split"] == "validation" and row["round"] in scores
    }
    rounds = sorted(scores)
    # max() keeps the first of equals: the earliest of the best rounds.
    chosen = max(sorted(validation), key=validation.__getitem__, default=None)
    last = [scores[round].mean for round in rounds[-LAST_ROUNDS:]]
    return Figures(
        best=scores[max(rounds, key=lambda round: scores[round].mean)],
        validated=None if chosen is None else scores[chosen],
        last=scores[rounds[-1]],
        last_ten_mean=sum(last) / len(last),
        evaluations=len(rounds),
    )


def _score(row: Mapping[str, Any]) -> Score:
    return Score(
        row["round"],
        mean=row["accuracy_mean"],
        weighted=row["accuracy_weighted"],
        sd=row["accuracy_sd"],
        worst_decile=row["accuracy_worst_decile"],
    )
