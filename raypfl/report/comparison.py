"""Settings side by side: ranked, with paired differences, and with what makes them hard to compare."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np
from rich.filesize import decimal

from raypfl.errors import ComparisonError, ConfigError
from raypfl.explain import suggest
from raypfl.records.grid import Grid, html_table, plain
from raypfl.records.storage import Place, Remote
from raypfl.report.intervals import LEVEL, Interval, paired_interval
from raypfl.report.loading import (
    AT,
    Group,
    client_matrix,
    differing_options,
    has_validation,
    mean_accuracy,
    read_groups,
)

if TYPE_CHECKING:
    import pandas as pd

    from raypfl.result import Result

MOST_NAMES = 4
"""Named in a message; the others are counted."""
NOTHING = Interval(np.nan, np.nan, np.nan, np.nan)


@dataclass(frozen=True)
class Row:
    """One setting. Accuracies in [0, 1] on test data, means over seeds; NaN where there is nothing."""

    label: str
    model: str
    point: str
    seeds: int
    accuracy: float  # uniform mean over clients
    sd_clients: float  # over clients, of a seed
    sd_seeds: float  # of `accuracy` over seeds, divisor seeds - 1
    worst_decile: float  # mean of the worst 10 % of clients
    last_ten: float  # mean of the last ten evaluated rounds
    difference: float  # to the reference, paired by client and seed
    low: float  # of its confidence interval
    high: float
    better: float  # share of the pairs in which it is above the reference
    pairs: int  # clients times seeds that both have
    bytes: float  # of all messages of a run
    seconds: float  # wall clock of a run


class Comparison:
    """A ranked table, and notes on what to keep in mind when reading it."""

    def __init__(
        self, rows: Sequence[Row], reference: str, at: str, on_validation: bool, notes: Sequence[str]
    ) -> None:
        self.rows = tuple(rows)
        """Best first."""
        self.reference = reference
        """The label of the setting that differences are taken to."""
        self.notes = tuple(notes)
        """What differs beside the methods, and what is missing."""
        self._at, self._on_validation = at, on_validation

    @property
    def frame(self) -> pd.DataFrame:
        """The table with all digits: a row a setting, columns as in `Row`."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame([asdict(row) for row in self.rows])
        return frame

    @property
    def grid(self) -> Grid:
        """The table to print, accuracies in %."""
        return Grid(
            (
                *(
                    "method",
                    "model, point",
                    "seeds",
                    "accuracy",
                    "sd",
                    "sd seeds",
                    "worst decile",
                    "last ten",
                ),
                *("difference", f"{LEVEL:.0%} interval", "better on", "bytes", "seconds"),
            ),
            tuple(self._cells(row) for row in self.rows),
            words=2,
            note=self.explanation,
        )

    @property
    def explanation(self) -> str:
        """What the numbers are."""
        at = "last evaluated round"
        if self._at == "best":
            at = "best round on validation" if self._on_validation else "best round on test, as papers report"
        seeds = max(row.seeds for row in self.rows)
        over = (
            "clients and seeds" if seeds > 1 else "the clients of this one seed, and says nothing of others"
        )
        return (
            f"Test accuracy in %, uniform mean over clients: {at}. sd: over clients; sd seeds: over seeds. "
            f"Differences to {self.reference} in points, paired by client and seed; intervals over {over}, "
            "not corrected for the number of comparisons. better on: share of these pairs. "
            "Bytes of all messages and seconds of a whole run."
        )

    def __repr__(self) -> str:
        return "\n".join([plain(self.grid), *(f"Note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return html_table(self.grid) + (f"<ul>{notes}</ul>" if notes else "")

    def _cells(self, row: Row) -> tuple[str, ...]:
        is_reference = row.label == self.reference
        interval = "-" if np.isnan(row.low) else f"{100 * row.low:+.2f} to {100 * row.high:+.2f}"
        difference = "-" if np.isnan(row.difference) else f"{100 * row.difference:+.2f}"
        return (
            row.label,
            f"{row.model}, {row.point}",
            str(row.seeds),
            *map(percent, (row.accuracy, row.sd_clients, row.sd_seeds, row.worst_decile, row.last_ten)),
            *(("reference", "", "") if is_reference else (difference, interval, _share(row.better))),
            decimal(round(row.bytes)),
            f"{row.seconds:.1f}",
        )


def compare(
    *runs: Result | str | Place, reference: str | None = None, at: str = "best", anyway: bool = False
) -> Comparison:
    """Compare runs; those that differ in their seed only are one row.

    Args:
        runs: results, or folders of runs or of several runs.
        reference: the method or row that differences are taken to; the best of the others' if None.
        at: "best" round (on validation where every run has it), or "last" evaluated.
        anyway: also where data or partitions differ, without differences then.

    Raises:
        ComparisonError: data or partitions differ.
        ConfigError: there is no such reference, or no such `at`.
        StorageError: a folder is none of a run.
    """
    paths = [run if isinstance(run, str | Path | Remote) else run.path for run in runs]
    return compare_groups(read_groups(paths), reference=reference, at=at, anyway=anyway)


def compare_groups(
    groups: Sequence[Group], *, reference: str | None = None, at: str = "best", anyway: bool = False
) -> Comparison:
    """As `compare`, of runs that were read."""
    if at not in AT:
        raise ConfigError(f"at = {at!r}: use one of {', '.join(AT)}.")
    on_validation = has_validation(groups)
    differing = other_data(groups)
    if differing and not anyway:
        raise ComparisonError(
            f"{differing} Their differences would not be paired. Compare runs of the same data and "
            "partition (the same partition and seed), or ask for a table without differences: --anyway."
        )
    groups = sorted(groups, key=lambda group: -mean_accuracy(group, at, on_validation=on_validation))
    base = _reference(groups, reference)
    rows = [_row(group, None if differing or group is base else base, at, on_validation) for group in groups]
    notes = ([differing + " No differences are given."] if differing else []) + remarks(groups)
    return Comparison(rows, base.label, at, on_validation, notes)


def other_data(groups: Iterable[Group]) -> str:
    """What is wrong with comparing these runs at all; empty if nothing is."""
    runs = sorted((run for group in groups for run in group.runs), key=lambda run: run.name)
    data: dict[str, list[str]] = defaultdict(list)
    partitions: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        # What was not recorded cannot be compared.
        if "data" in run.environment:
            data[run.environment["data"]].append(run.name)
        if run.partition is not None:
            partitions[run.summary.seed][run.partition].append(run.name)
    if len(data) > 1:
        return f"These runs are of different data sets: {_listed(data)}."
    for seed, found in sorted(partitions.items()):
        if len(found) > 1:
            return f"With seed {seed}, the clients of these runs have different samples: {_listed(found)}."
    return ""


def remarks(groups: Sequence[Group]) -> list[str]:
    """What differs beside methods and seeds, and what is not there yet."""
    found = []
    views = {group.label: group.view.replace("/", ", ") for group in groups}
    if len(set(views.values())) > 1:
        found.append(f"evaluated as each paper does: {_by_value(views)}.")
    if len({group.seeds for group in groups}) > 1:
        seeds = {group.label: ", ".join(map(str, group.seeds)) for group in groups}
        found.append(
            f"seeds differ: {_by_value(seeds)}. Means are over each one's own, differences over common ones."
        )
    rounds = {group.label: _rounds(group) for group in groups}
    if len(set(rounds.values())) > 1 or any("of" in words for words in rounds.values()):
        found.append(f"rounds: {_by_value(rounds)}.")
    options = differing_options([group.runs[0].options for group in groups])
    for key in sorted({key for own in options for key in own}):
        if not key.startswith("method."):
            values = {group.label: own.get(key, "none") for group, own in zip(groups, options, strict=True)}
            found.append(f"{key} differs: {_by_value(values)}.")
    for group in groups:
        if not any(run.figures for run in group.runs):
            found.append(f"{group.label} has not been evaluated as {group.view.replace('/', ', ')}.")
    return found


def percent(value: float) -> str:
    """In %, two decimals; a dash for NaN."""
    return "-" if np.isnan(value) else f"{100 * value:.2f}"


def _row(group: Group, base: Group | None, at: str, on_validation: bool) -> Row:
    scores = group.scores(at, on_validation=on_validation)
    accuracies = [score.mean for score in scores]
    last_ten = [run.figures.last_ten_mean for run in group.runs if run.figures is not None]
    interval, better, pairs = _paired(group, base, at, on_validation) if base else (NOTHING, np.nan, 0)
    model, point = group.view.split("/")
    return Row(
        label=group.label,
        model=model,
        point=point,
        seeds=len(group.runs),
        accuracy=_mean(accuracies),
        sd_clients=_mean([score.sd for score in scores]),
        sd_seeds=stdev(accuracies) if len(accuracies) > 1 else np.nan,
        worst_decile=_mean([score.worst_decile for score in scores]),
        last_ten=_mean(last_ten),
        difference=interval.mean,
        low=interval.low,
        high=interval.high,
        better=better,
        pairs=pairs,
        bytes=_mean([float(run.traffic["bytes"].sum()) for run in group.runs]),
        seconds=_mean([run.summary.round_seconds for run in group.runs]),
    )


def _paired(group: Group, base: Group, at: str, on_validation: bool) -> tuple[Interval, float, int]:
    """The difference to `base` over the clients and seeds that both have."""
    others = {run.summary.seed: run for run in base.runs}
    pairs = [(run, others[run.summary.seed]) for run in group.runs if run.summary.seed in others]
    differences: list[np.ndarray] = []
    for pair in pairs:
        series = []
        for run in pair:
            score = run.score(at, on_validation=on_validation)
            if score is not None:
                series.append(run.client_scores(score.round, run.summary.reported))
        if len(series) == 2:
            own, other = client_matrix(series)
            if len(own):
                differences.append(own - other)
    if not differences:
        return NOTHING, np.nan, 0
    same = len({run.partition for pair in pairs for run in pair}) == 1
    crossed = same and len({len(own) for own in differences}) == 1
    every = np.concatenate(differences)
    return paired_interval(differences, crossed=crossed), float((every > 0).mean()), len(every)


def _reference(groups: Sequence[Group], wanted: str | None) -> Group:
    if wanted is None:
        return groups[0]
    found = [group for group in groups if wanted in (group.label, group.method)]
    if not found:
        raise ConfigError(
            f"reference = {wanted!r}: there is none among these runs. "
            f"{suggest(wanted, [group.label for group in groups])}"
        )
    exact = [group for group in found if group.label == wanted]
    return (exact or found)[0]


def _rounds(group: Group) -> str:
    done = {run.summary.rounds for run in group.runs}
    wanted = {run.wanted_rounds for run in group.runs}
    if done == wanted and len(done) == 1:
        return str(*done)
    return f"{_span(done)} of {_span(wanted)}"


def _span(values: set[int]) -> str:
    return str(*values) if len(values) == 1 else f"{min(values)} to {max(values)}"


def _listed(found: dict[str, list[str]]) -> str:
    return "; ".join(f"{value[:8]} ({_few(names)})" for value, names in found.items())


def _few(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:MOST_NAMES])} and {more} more"


def _by_value(values: dict[str, str]) -> str:
    """`5 (a, b); 10 (c)`."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for label, value in values.items():
        grouped[value].append(label)
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in grouped.items())


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else np.nan


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.0%}"
