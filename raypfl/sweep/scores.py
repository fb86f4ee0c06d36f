"""Scores of runs, by which schedulers stop them and the best point is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq

from raypfl.records.files import storage_errors
from raypfl.records.folder import RunFolder
from raypfl.records.statistics import ClientStatistics
from raypfl.sweep.config import Select


def score_of(statistics: ClientStatistics, select: Select) -> float:
    """Accuracy in [0, 1] over clients, as the sweep averages it."""
    return statistics.accuracy_weighted if select.average == "weighted" else statistics.accuracy_mean


def history(folder: RunFolder, view: tuple[str, str], split: str, select: Select) -> list[tuple[int, float]]:
    """(round, score) of one (model, point) and split, by round, from a run's table, if there is one."""
    path = folder.metrics / "rounds.parquet"
    if not path.is_file():
        return []
    with storage_errors(path, "read"):
        rows: list[Mapping[str, Any]] = pq.read_table(path).to_pylist()
    column = f"accuracy_{select.average}"
    return sorted(
        (row["round"], row[column])
        for row in rows
        if (row["model"], row["point"], row["split"]) == (*view, split) and row["clients"]
    )
