"""What a study leaves: a file a point as soon as it is done, and tables over all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raypfl.engine.phases import PHASES
from raypfl.errors import StorageError
from raypfl.records.files import replacing, storage_errors, write_json
from raypfl.scaling.config import Point
from raypfl.scaling.fit import LEAST_FOR_HALF, SIZES, fit, larger_half, varying

COSTS = ("server_seconds", "server_cpu_seconds", *(f"{name}_cpu_seconds" for name in PHASES))
"""Columns that exponents are fitted to."""

MEDIANS = ("round_seconds", "work_seconds", "server_seconds", "server_cpu_seconds", "client_steps")

FIGURES = ("rounds_per_second", "client_steps_per_second", "server_flops_formula")
"""Columns that some studies do not have."""


class Folder:
    """`storage_path/name` of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study, self.environment = path / "study.json", path / "environment.json"
        self.points, self.plots, self.summary = path / "points", path / "plots", path / "summary.md"

    def keep(self, point: Point, result: Mapping[str, Any]) -> None:
        """Write a finished point, whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        write_json(self.points / f"{point.name}.json", result)

    def kept(self, point: Point) -> dict[str, Any] | None:
        """A finished point; None if it is not there.

        Raises:
            StorageError: it is damaged.
        """
        path = self.points / f"{point.name}.json"
        return _read(path, "Remove it, and the point is measured again.") if path.is_file() else None

    def read_study(self) -> dict[str, Any]:
        """What the study measures, as it was when it began.

        Raises:
            StorageError: it is damaged.
        """
        return _read(self.study, "Start the study anew under another `name=`.")

    def write_tables(self, points: Sequence[Point]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Write `points.parquet`, `rounds.parquet` and `fits.parquet`; the first and the last of them.

        Raises:
            StorageError: they cannot be written.
        """
        finished = [(point, found) for point in points if (found := self.kept(point)) is not None]
        table = points_table(finished)
        rounds = pd.DataFrame([row for point, found in finished for row in _rounds(point, found)])
        fits = fits_table(table)
        for name, frame in (("points", table), ("rounds", rounds), ("fits", fits)):
            with replacing(self.path / f"{name}.parquet") as path:
                frame.to_parquet(path, index=False)
        return table, fits


def _read(path: Path, advice: str) -> dict[str, Any]:
    try:
        with storage_errors(path, "read"):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} is damaged ({error}). {advice}") from None
    return found


def points_table(finished: Sequence[tuple[Point, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row a point: settings, sizes, medians over its rounds, or what went wrong."""
    rows = []
    for point, found in finished:
        row = {
            "study": point.study,
            "point": point.number,
            "settings": point.settings,
            "measure": point.measure,
            "status": "failed" if found["error"] else "done",
            "error": found["error"],
            **found["environment"],
            **found["facts"],
        }
        if found["rounds"]:
            row |= _over_rounds(pd.DataFrame(found["rounds"]), point)
        rows.append(row)
    table: pd.DataFrame = pd.DataFrame(rows)
    # Studies of failures alone have no figures; the columns are there.
    for name in (*SIZES, *COSTS, *MEDIANS, "hosts", *FIGURES):
        if name not in table:
            table[name] = np.nan
    table["efficiency"] = _efficiency(table)
    return table


def fits_table(table: pd.DataFrame) -> pd.DataFrame:
    """Exponents of each study's server costs, and of the larger half of its points.

    Points that have the same sizes and differ in something else (hosts, a method) are fitted apart.
    """
    rows = [
        {
            "study": study,
            "of": group,
            "cost": cost.removesuffix("_seconds"),
            "part": part,
            **{f"exponent_{name}": found.exponents.get(size) for size, name in SIZES.items()},
            **{f"error_{name}": found.errors.get(size) for size, name in SIZES.items()},
            "factor": found.factor,
            "r_squared": found.r_squared,
            "points": found.points,
        }
        for study, own in table[table.status == "done"].groupby("study", sort=False)
        for group, apart in groups(own)
        for sizes in [varying(apart)]
        if sizes
        for part, chosen in _parts(apart, sizes)
        for cost in COSTS
        if (found := fit(chosen, cost, sizes)) is not None
    ]
    columns = ["study", "of", "cost", "part", *(f"exponent_{name}" for name in SIZES.values())]
    fits: pd.DataFrame = pd.DataFrame(rows, columns=None if rows else columns)
    return fits


def groups(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows that differ in their sizes alone, under the words of their settings that they have in common."""
    words = rows.settings.str.split(" ")
    sizes = rows[list(SIZES)].apply(tuple, axis=1)
    # A word is about something else if there are points of the same sizes with and without it.
    apart = {
        word
        for same in sizes.unique()
        for word in set().union(*words[sizes == same]) - set.intersection(*map(set, words[sizes == same]))
    }
    label = words.map(lambda own: " ".join(word for word in own if word in apart))
    for name in label.unique():
        yield name, rows[label == name]


def _parts(rows: pd.DataFrame, sizes: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    yield "all", rows
    if len(sizes) == 1 and len(rows) >= LEAST_FOR_HALF:
        yield "larger half", larger_half(rows, sizes[0])


def _over_rounds(rounds: pd.DataFrame, point: Point) -> dict[str, float]:
    """Medians over counted rounds, and quartiles of what is looked at most."""
    rounds = rounds.rename(columns={"seconds": "round_seconds"})
    median = rounds.drop(columns="round").median().to_dict()
    spread = {
        f"{name}_{which}": float(rounds[name].quantile(share))
        for name in ("round_seconds", "server_seconds")
        for which, share in (("low", 0.25), ("high", 0.75))
    }
    found = {"rounds": len(rounds), **median, **spread}
    if point.measure == "rounds":
        found["rounds_per_second"] = 1.0 / median["round_seconds"]
        found["client_steps_per_second"] = median["client_steps"] / median["round_seconds"]
    return found


def _efficiency(table: pd.DataFrame) -> pd.Series:
    """Rounds a second and host, over those of the point with the fewest hosts that is otherwise alike."""
    keys = ["study", *SIZES, "method", "gpus_per_host", "device"]
    alike = [key for key in keys if key in table]
    speed = table.rounds_per_second / table.hosts
    several = table.groupby(alike, dropna=False).hosts.transform("nunique") > 1
    fewest = table.groupby(alike, dropna=False).hosts.transform("min")
    base = speed.where(table.hosts == fewest)
    first = base.groupby([table[key] for key in alike], dropna=False).transform("first")
    efficiency: pd.Series = (speed / first).where(several)
    return efficiency


def _rounds(point: Point, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    named = {"study": point.study, "point": point.number, "settings": point.settings}
    for row in found["rounds"]:
        yield {**named, **row}
