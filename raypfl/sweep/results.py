"""What a sweep found: a row for each trial, means and deviations over seeds, the best point."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from pydantic import JsonValue

from raypfl.configuration import dump_yaml, to_dict
from raypfl.records.files import replacing, write_text
from raypfl.records.summary import LAST_ROUNDS
from raypfl.sweep.config import Select
from raypfl.sweep.folder import Outcome, SweepFolder
from raypfl.sweep.scores import history
from raypfl.sweep.space import Point, overrides_of
from raypfl.sweep.trials import Trial
from raypfl.sweep.worker import view_of

MEASURES = ("score", "test", "best_test", "last_test", "last_ten_test")
"""Columns of accuracies in [0, 1]; see `row_of`."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """A number over seeds."""

    mean: float
    sd: float | None  # divisor seeds - 1; None of one seed

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and deviation of at least one value."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class PointResult:
    """What the seeds of a point come to; empty where a seed has not run to the end."""

    number: int
    values: Point
    statuses: tuple[str, ...]
    measures: Mapping[str, Spread]

    @property
    def complete(self) -> bool:
        """Whether every seed ran to its last round."""
        return bool(self.measures)


def row_of(trial: Trial, outcome: Outcome | None, folder: SweepFolder, select: Select, on: str) -> Row:
    """One trial as a row.

    Args:
        trial: the trial.
        outcome: what came of it; None if it has not ended.
        folder: the sweep's.
        select: how scores are made.
        on: the split that scores are of: validation or test.

    Returns:
        trial, point, seed, status, error, seconds, method, view, rounds; `score` and `score_round`, the best
        round on `on`; `test`, the test accuracy in that round; `best_test`, the best round chosen on test, as
        papers report it; `last_test`, `last_ten_test`; and the configuration as `config.*`.
    """
    view = view_of(trial.config, select)
    score = history(folder.run(trial.label), view, on, select)
    test = history(folder.run(trial.label), view, "test", select)
    row: Row = {
        "trial": trial.label,
        "point": trial.point,
        "seed": trial.seed,
        "status": "pending" if outcome is None else outcome.status,
        "error": None if outcome is None else outcome.error,
        "seconds": None if outcome is None else outcome.seconds,
        "method": trial.config.method.name,
        "view": "/".join(view),
        "score_split": on,
        "rounds": test[-1][0] if test else 0,
        **dict.fromkeys(("score", "score_round", "test", "best_test", "best_test_round"), None),
        **dict.fromkeys(("last_test", "last_ten_test"), None),
    }
    if score and test:
        # max() keeps the first of equals: the earliest of the best rounds.
        chosen, best = max(score, key=lambda pair: pair[1]), max(test, key=lambda pair: pair[1])
        last = [accuracy for _, accuracy in test[-LAST_ROUNDS:]]
        row |= {
            "score": chosen[1],
            "score_round": chosen[0],
            "test": dict(test).get(chosen[0]),
            "best_test": best[1],
            "best_test_round": best[0],
            "last_test": last[-1],
            "last_ten_test": fmean(last),
        }
    return row | {f"config.{key}": value for key, value in _flat(to_dict(trial.config)).items()}


def write_trials(folder: SweepFolder, rows: Sequence[Row]) -> None:
    """Write the table of trials; columns of several kinds of values hold them as JSON text.

    Raises:
        StorageError: it cannot be written.
    """
    frame = pd.DataFrame(list(rows))
    for name in frame.columns:
        if name.startswith("config."):
            frame[name] = _column(list(frame[name]))
    with replacing(folder.trials) as path:
        frame.to_parquet(path, index=False)


def points_of(trials: Sequence[Trial], rows: Mapping[str, Row]) -> list[PointResult]:
    """The points of a sweep, in order, with what their seeds come to."""
    by_point: dict[int, list[Trial]] = {}
    for trial in trials:
        by_point.setdefault(trial.point, []).append(trial)
    results = []
    for number, own in sorted(by_point.items()):
        found = [rows[trial.label] for trial in own]
        complete = all(row["status"] == "finished" and row["score"] is not None for row in found)
        measures = {
            name: Spread.of([row[name] for row in found])
            for name in MEASURES
            if complete and all(row[name] is not None for row in found)
        }
        statuses = tuple(row["status"] for row in found)
        results.append(PointResult(number, own[0].values, statuses, measures))
    return results


def best_of(points: Sequence[PointResult], per: Sequence[str]) -> dict[str, PointResult]:
    """The best complete point, or that of each combination of the keys `per`, by a label of it."""
    best: dict[str, PointResult] = {}
    for point in points:
        if not point.complete:
            continue
        group = ", ".join(overrides_of({key: point.values.get(key) for key in per}))
        # The first of equals stays.
        if group not in best or point.measures["score"].mean > best[group].measures["score"].mean:
            best[group] = point
    return best


def write_best(folder: SweepFolder, name: str, best: PointResult, trials: Sequence[Trial], why: str) -> None:
    """Write a point as a configuration that `raypfl run` runs with every seed.

    Args:
        folder: the sweep's.
        name: of the file.
        best: the point.
        trials: of the sweep.
        why: a comment on its top.
    """
    own = [trial for trial in trials if trial.point == best.number]
    config = to_dict(own[0].config) | {"seed": [trial.seed for trial in own], "name": None}
    config["storage_path"] = str(folder.path.parent)
    comment = "".join(f"# {line}\n" for line in why.splitlines())
    write_text(folder.path / name, comment + dump_yaml(config))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, JsonValue]:
    flat: dict[str, JsonValue] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _column(values: list[Any]) -> Any:
    """Values of one kind as they are, others as text."""
    there = [value for value in values if value is not None and value == value]
    kinds = {"number" if type(value) in (int, float) else type(value).__name__ for value in there}
    if kinds <= {"number"}:
        whole = all(type(value) is int for value in there) and len(there) == len(values)
        return pd.Series(values, dtype="int64" if whole and there else "float64")
    if len(kinds) == 1 and kinds <= {"str", "bool"} and len(there) == len(values):
        return pd.Series(values)
    return pd.Series(
        [
            None
            if value is None or value != value
            else value
            if isinstance(value, str)
            else json.dumps(value)
            for value in values
        ]
    )
