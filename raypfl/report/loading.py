"""Runs as reports see them: read from their folders, and seeds of one setting together.

Only what lies in the folders is read, nothing is computed again; so runs of other versions, and runs that
still go on, can be shown as far as they have got.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import yaml

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors
from raypfl.records.folder import RunFolder
from raypfl.records.manifest import MAY_DIFFER, leaves
from raypfl.records.storage import Place, parquet
from raypfl.records.summary import Figures, Score, Summary, summarise

if TYPE_CHECKING:
    import numpy as np

SAME_SETTING = (*MAY_DIFFER, "seed", "evaluation.diagnostics")
"""Keys and patterns in which runs of one setting may differ."""
AT = ("best", "last")
"""Which round's figures are shown: the best, on validation where all runs have it, or the last evaluated."""
LONGEST_LABEL = 40


@dataclass(frozen=True)
class Run:
    """One run (a method, a seed)."""

    folder: RunFolder
    config: Mapping[str, Any]
    """Resolved, as `config.yaml` has it."""
    environment: Mapping[str, Any]
    summary: Summary

    @classmethod
    def read(cls, folder: RunFolder) -> Run:
        """Read a run's folder.

        Raises:
            StorageError: it has no readable configuration or no tables yet.
        """
        with storage_errors(folder.config, "read"):
            text = folder.config.read_text(encoding="utf-8")
        environment = {}
        if folder.environment.is_file():
            environment = json.loads(folder.environment.read_text(encoding="utf-8"))
        return cls(folder, yaml.safe_load(text), environment, summarise(folder))

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.path.name

    @property
    def options(self) -> dict[str, str]:
        """What sets this run apart from others but its seed: configuration by dotted key, as text."""
        return {
            key: value.strip('"')
            for key, value in leaves(self.config)
            if value != "null" and not any(fnmatchcase(key, pattern) for pattern in SAME_SETTING)
        }

    @property
    def figures(self) -> Figures | None:
        """Of the model and point that papers report; None before the first evaluation."""
        return self.summary.figures.get(self.summary.reported)

    @property
    def wanted_rounds(self) -> int:
        """The rounds that the configuration asks for."""
        return int(self.config.get("rounds", self.summary.rounds))

    @property
    def partition(self) -> str | None:
        """Fingerprint of who has which samples; None if it was not recorded."""
        return self.environment.get("partition")

    def score(self, at: str, *, on_validation: bool) -> Score | None:
        """The figures of the round that is shown."""
        if self.figures is None or at == "last":
            return None if self.figures is None else self.figures.last
        return self.figures.validated if on_validation else self.figures.best

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One of the run's tables; empty where the version that made the run did not have it."""
        path = self.folder.metrics / f"{name}.parquet"
        if not path.exists():
            nothing: pd.DataFrame = pd.DataFrame({name: [] for name in columns or ()})
            return nothing
        with storage_errors(path, "read"):
            frame: pd.DataFrame = pq.read_table(**parquet(path), columns=columns).to_pandas()
        return frame

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """`rounds.parquet`."""
        return self.table("rounds")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """`clients.parquet`, the columns of scores on test data."""
        wanted = ["round", "client", "point", "model", "split", "accuracy"]
        every = self.table("clients", wanted)
        frame: pd.DataFrame = every[(every["split"] == "test") & every["accuracy"].notna()]
        return frame

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """`pairs.parquet`: entries of matrices between clients."""
        return self.table("pairs", ["round", "name", "receiver", "source", "value"])

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """Bytes of every message, with round, source, destination and kind."""
        return self.table("traffic", ["round", "src", "dst", "kind", "bytes"])

    @cached_property
    def samples(self) -> pd.DataFrame:
        """`partition.csv`: samples of each client and split, in all and per class."""
        with storage_errors(self.folder.partition_table, "read"):
            text = self.folder.partition_table.read_text()
        frame: pd.DataFrame = pd.read_csv(StringIO(text))
        return frame

    def client_scores(self, round: int, view: str) -> pd.Series[float]:
        """Test accuracy of each client in a round, by client; `view` is "model/point"."""
        model, point = view.split("/")
        rows = self.clients
        rows = rows[(rows["round"] == round) & (rows["model"] == model) & (rows["point"] == point)]
        scores: pd.Series[float] = rows.set_index("client")["accuracy"].sort_index()
        return scores


@dataclass(frozen=True)
class Group:
    """One setting with one or more seeds."""

    label: str
    runs: tuple[Run, ...] = field(repr=False)
    """By seed."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(run.summary.seed for run in self.runs)

    @property
    def method(self) -> str:
        """Its name."""
        return self.runs[0].summary.method

    @property
    def view(self) -> str:
        """The "model/point" that papers report of the method."""
        return self.runs[0].summary.reported

    def scores(self, at: str, *, on_validation: bool) -> list[Score]:
        """The scores of its runs that have been evaluated."""
        found = (run.score(at, on_validation=on_validation) for run in self.runs)
        return [score for score in found if score is not None]


def read_groups(paths: Iterable[str | Place]) -> list[Group]:
    """Read runs and bring together what differs in its seed only, best first.

    Args:
        paths: folders of runs, or of several runs each; addresses of other storage, too.

    Raises:
        StorageError: a folder is none of a run, or has no tables yet.
    """
    folders: dict[Place, RunFolder] = {}
    for path in paths:
        for folder in RunFolder.open(path).runs():
            where = folder.path.resolve() if isinstance(folder.path, Path) else folder.path
            folders.setdefault(where, folder)
    if not folders:
        raise StorageError("no run was given. Give the folders that runs printed, such as runs/NAME.")
    alike: dict[str, list[Run]] = defaultdict(list)
    for folder in folders.values():
        run = Run.read(folder)
        alike[json.dumps(run.options, sort_keys=True)].append(run)
    settings: list[list[Run]] = []
    for runs in alike.values():
        repeated = len({run.summary.seed for run in runs}) < len(runs)
        settings += [[run] for run in runs] if repeated else [runs]
    labels = _labels([runs[0] for runs in settings])
    groups = [
        Group(label, tuple(sorted(runs, key=lambda run: run.summary.seed)))
        for label, runs in zip(labels, settings, strict=True)
    ]
    on_validation = has_validation(groups)
    return sorted(groups, key=lambda group: -mean_accuracy(group, "best", on_validation=on_validation))


def has_validation(groups: Iterable[Group]) -> bool:
    """Whether the best round of every evaluated run can be chosen on validation data."""
    figures = [run.figures for group in groups for run in group.runs if run.figures is not None]
    return bool(figures) and all(each.validated is not None for each in figures)


def mean_accuracy(group: Group, at: str, *, on_validation: bool) -> float:
    """Over seeds; -1 before the first evaluation."""
    return fmean([score.mean for score in group.scores(at, on_validation=on_validation)] or [-1.0])


def differing_options(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of several configurations, the keys in which they differ.

    A part that some do not have at all, such as `topology`, is one key, with its name as the value.
    """
    parts = {key.partition(".")[0] for one in options for key in one}
    having = {part: [any(_within(key, part) for key in one) for one in options] for part in parts}
    short = [
        {
            key if all(having[key.partition(".")[0]]) else key.partition(".")[0]: value
            for key, value in one.items()
        }
        | {
            part: one.get(f"{part}.name", "set")
            for part, there in having.items()
            if any(there) and not all(there) and any(_within(key, part) for key in one)
        }
        for one in options
    ]
    keys = sorted({key for one in short for key in one})
    telling = [key for key in keys if len({one.get(key) for one in short}) > 1]
    return [{key: one[key] for key in telling if key in one} for one in short]


def _labels(runs: Sequence[Run]) -> list[str]:
    """The method's name, with the options in which runs of one method differ; at worst the folder's name."""
    by_method: dict[str, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        by_method[run.summary.method].append(place)
    labels = [""] * len(runs)
    for method, places in by_method.items():
        for place, own in zip(
            places, differing_options([runs[place].options for place in places]), strict=True
        ):
            told = [f"{key.removeprefix('method.')}={value}" for key, value in own.items()]
            label = " ".join([method, *told])
            labels[place] = label if len(label) <= LONGEST_LABEL else _folder_label(runs[place])
        if len({labels[place] for place in places}) < len(places):
            for place in places:
                labels[place] = _path_label(runs[place], [runs[other] for other in places])
    return labels


def _folder_label(run: Run) -> str:
    return re.sub(r"-seed\d+$", "", run.name)


def _path_label(run: Run, others: Sequence[Run]) -> str:
    """The folder's name, with that of the folder around it if others have the same."""
    same = [other for other in others if other.name == run.name]
    return run.name if len(same) == 1 else f"{run.folder.path.parent.name}/{run.name}"


def _within(key: str, part: str) -> bool:
    return key == part or key.startswith(f"{part}.")


def client_matrix(series: Sequence[pd.Series[float]]) -> np.ndarray:
    """Scores `[S, N]` of the clients that all of the series have."""
    frame = pd.concat(series, axis=1, join="inner").sort_index()
    values: np.ndarray = frame.to_numpy(dtype=float).T
    return values
