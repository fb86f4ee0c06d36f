"""The number of a cell, from the tables of the runs that it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from raypfl.records.summary import LAST_ROUNDS
from raypfl.result import Result

if TYPE_CHECKING:
    import pandas as pd


class Ours(NamedTuple):
    """Over seeds, in the unit of the paper's table."""

    mean: float
    sd: float | None
    """Divisor seeds - 1; None for one seed."""
    seeds: int


def over_seeds(values: Sequence[float]) -> Ours | None:
    """Mean and sd; None without values."""
    if not values:
        return None
    return Ours(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def measure(run: Path, view: str, statistic: str) -> float | None:
    """One number of a finished run.

    Args:
        run: its folder.
        view: model/point.
        statistic: as `raypfl.paper.definition.Statistic` says.

    Returns:
        None if the run has no such number, such as the global model of a method without one.
    """
    result = Result(run)
    rounds = result.rounds()
    if statistic == "gigabytes":
        once = rounds[(rounds.point == "post") & (rounds.model == "personalised") & (rounds.split == "train")]
        # What one sends the other receives: between peers both columns count the same bytes.
        peers = not (result.traffic()[["src", "dst"]] < 0).any().any()
        sent = once.upload_bytes.sum() + (0 if peers else once.download_bytes.sum())
        return float(sent) / 1e9
    if statistic.startswith("diagnostics/"):
        found = result.diagnostics()
        found = found[found.name == statistic.partition("/")[2]]
        # Not a number where there is nothing to take a mean of, such as pairs that are pushed.
        last = math.nan if found.empty else float(found.sort_values("round").value.iloc[-1])
        return None if math.isnan(last) else last
    model, point = view.split("/")
    tests = rounds[(rounds.model == model) & (rounds.point == point) & (rounds.split == "test")]
    tests = tests[tests.clients > 0].sort_values("round")
    return None if tests.empty else _accuracy(result, tests, statistic)


def _accuracy(result: Result, tests: pd.DataFrame, statistic: str) -> float:
    """In percent, of the evaluated rounds of one model and point."""
    figures: Any = tests.accuracy_weighted if statistic.endswith(" weighted") else tests.accuracy_mean
    if statistic.startswith("last ten"):
        return 100 * float(figures.iloc[-LAST_ROUNDS:].mean())
    if statistic.startswith("last"):
        return 100 * float(figures.iloc[-1])
    best = tests.loc[figures.idxmax()]
    if statistic == "best sd":
        return 100 * float(best.accuracy_sd)
    if statistic == "best range":
        clients = result.clients()
        same = [clients[key] == best[key] for key in ("round", "point", "model", "split")]
        accuracies = clients[same[0] & same[1] & same[2] & same[3]].accuracy
        return 100 * float(accuracies.max() - accuracies.min())
    return 100 * float(figures.max())
