"""Summaries to read: one run's `summary.md`, and several runs ranked. Percent appears only here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

from rich.filesize import decimal

from raypfl.records.files import write_text
from raypfl.records.grid import Grid, markdown
from raypfl.records.storage import Place
from raypfl.records.summary import LAST_ROUNDS, Figures, Score, Summary

ON_TEST = "best round, chosen on test, as the papers report"
ON_VALIDATION = "best round, chosen on validation"

RANKED_HEADER = (
    *("method", "model, point", "seeds", "accuracy", "sd", "sd seeds", "worst decile", "last ten"),
    *("up", "down", "seconds"),
)


def write_summary(path: Place, summary: Summary) -> None:
    """Write a run's `summary.md`.

    Raises:
        StorageError: the file cannot be written.
    """
    parts = [
        f"# {summary.method}, seed {summary.seed}",
        f"Run `{summary.run}`, {summary.rounds} rounds in {summary.round_seconds:.1f} s "
        f"(server {summary.server_seconds:.1f} s, evaluation {summary.evaluation_seconds:.1f} s), "
        f"{decimal(summary.upload_bytes)} up, {decimal(summary.download_bytes)} down.",
        markdown(figures_table(summary)),
    ]
    write_text(path, "\n\n".join(parts) + "\n")


def figures_table(summary: Summary) -> Grid:
    """All figures of one run."""
    rows: list[tuple[str, ...]] = []
    for view, figures in summary.figures.items():
        name = _words(view) + (" (reported)" if view == summary.reported else "")
        if figures.validated is not None:
            rows.append((name, ON_VALIDATION, *_score_cells(figures.validated)))
        rows.append((name, ON_TEST, *_score_cells(figures.best)))
        rows.append((name, "last evaluated round", *_score_cells(figures.last)))
        count = min(LAST_ROUNDS, figures.evaluations)
        mean = _percent(figures.last_ten_mean)
        rows.append((name, f"mean of the last {count} evaluated", "", mean, "", "", ""))
    return Grid(
        ("model, point", "figure", "round", "mean", "weighted", "sd", "worst decile"),
        tuple(rows),
        words=2,
        note="Test accuracy in %: uniform mean over clients, mean weighted by samples, sd over clients, "
        "mean of the worst 10 % of clients.",
    )


def ranked_table(summaries: Sequence[Summary]) -> Grid:
    """Rank methods by the accuracy that their papers report; seeds of one method share a row.

    The accuracy is that of the round chosen on validation if every run has a validation split, else of the
    best round on test; the note says which. Methods that were not evaluated come last.
    """
    figures = [found for run in summaries if (found := _reported(run)) is not None]
    on_validation = bool(figures) and all(each.validated is not None for each in figures)
    methods = sorted(
        _by_method(summaries).items(),
        key=lambda item: -fmean([score.mean for score in _scores(item[1], on_validation)] or [-1.0]),
    )
    return Grid(
        RANKED_HEADER,
        tuple(_ranked_row(name, runs, on_validation) for name, runs in methods),
        words=2,
        note=f"Test accuracy in %, uniform mean over clients: {ON_VALIDATION if on_validation else ON_TEST}. "
        "sd: over clients (mean over seeds); sd seeds: over seeds (divisor seeds - 1). "
        "Bytes and seconds: of the whole run (mean over seeds).",
    )


def _ranked_row(name: str, runs: Sequence[Summary], on_validation: bool) -> tuple[str, ...]:
    scores = _scores(runs, on_validation)
    accuracies = [score.mean for score in scores]
    last_ten = [figures.last_ten_mean for run in runs if (figures := _reported(run)) is not None]
    return (
        name,
        _words(runs[0].reported),
        str(len(runs)),
        _mean_percent(accuracies),
        _mean_percent([score.sd for score in scores]),
        _percent(stdev(accuracies)) if len(accuracies) > 1 else "-",
        _mean_percent([score.worst_decile for score in scores]),
        _mean_percent(last_ten),
        decimal(round(fmean(run.upload_bytes for run in runs))),
        decimal(round(fmean(run.download_bytes for run in runs))),
        f"{fmean(run.round_seconds for run in runs):.1f}",
    )


def _by_method(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Runs by method; where a method ran twice with one seed, these are variants: by their folders' names."""
    times = Counter((run.method, run.seed) for run in summaries)
    variants = {method for (method, _), count in times.items() if count > 1}
    groups: dict[str, list[Summary]] = {}
    for run in summaries:
        groups.setdefault(run.run if run.method in variants else run.method, []).append(run)
    return groups


def _reported(run: Summary) -> Figures | None:
    return run.figures.get(run.reported)


def _scores(runs: Sequence[Summary], on_validation: bool) -> list[Score]:
    figures = [found for run in runs if (found := _reported(run)) is not None]
    chosen = [each.validated if on_validation else each.best for each in figures]
    return [score for score in chosen if score is not None]


def _score_cells(score: Score) -> tuple[str, ...]:
    values = (score.mean, score.weighted, score.sd, score.worst_decile)
    return (str(score.round), *map(_percent, values))


def _words(view: str) -> str:
    return view.replace("/", ", ")


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _mean_percent(values: Sequence[float]) -> str:
    return _percent(fmean(values)) if values else "-"
