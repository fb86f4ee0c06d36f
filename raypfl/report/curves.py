"""Figures over rounds: accuracy, loss, the worst clients; one line a setting, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from raypfl.records.metrics import TRAINING
from raypfl.report.loading import Group, Run
from raypfl.report.picture import (
    Pen,
    Picture,
    height_for,
    label_ends,
    new_figure,
    pens,
    plain_numbers,
    spread,
)

BAND = "Lines: mean over seeds; bands: from the lowest to the highest seed."
REPORTED = "as each paper reports it"
CUT = "The axis leaves out the beginning, where curves are far from where they end."
SETTLED = 0.2
"""Share of the rounds that belongs to the beginning."""
WIDE_RANGE = 8.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


class Line(NamedTuple):
    """One setting over rounds, or over what else is on the x axis."""

    label: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def line(label: str, series: Sequence[pd.Series[float]]) -> Line | None:
    """Mean and range of the seeds in the rounds that all of them have; None if there are none."""
    series = [own.dropna() for own in series]
    if not series:
        return None
    frame = pd.concat(series, axis=1, join="inner").sort_index()
    if frame.empty:
        return None
    values = frame.to_numpy(dtype=float)
    return Line(label, frame.index.to_numpy(), values.mean(1), values.min(1), values.max(1))


def of_view(run: Run, view: str, column: str, split: str = "test") -> pd.Series[float]:
    """A column of `rounds.parquet` by round, of one "model/point" and split."""
    model, point = view.split("/")
    rows = run.rounds
    chosen = (rows["model"] == model) & (rows["point"] == point) & (rows["split"] == split)
    series: pd.Series[float] = rows[chosen & (rows["clients"] > 0)].set_index("round")[column]
    return series


def accuracy(groups: Sequence[Group]) -> list[Picture]:
    """Test accuracy: of each setting as its papers report it, then of each model and point that there is."""
    reported = {group.label: group.view for group in groups}
    found = [
        _accuracy(
            "accuracy",
            f"Test accuracy, {REPORTED}" if len(set(reported.values())) > 1 else _titled(groups[0].view),
            [_over_seeds(group, group.view, "accuracy_mean") for group in groups],
            pens([group.label for group in groups]),
        )
    ]
    views = sorted({view for group in groups for run in group.runs for view in run.summary.figures})
    if len(groups) == 1:
        if len(views) > 1:
            lines = [
                line(view.replace("/", ", "), [of_view(run, view, "accuracy_mean") for run in groups[0].runs])
                for view in views
            ]
            names = pens([view.replace("/", ", ") for view in views])
            found.append(_accuracy("accuracy-views", "Test accuracy by model and point", lines, names))
    else:
        for view in views:
            if set(reported.values()) == {view}:
                continue
            lines = [_over_seeds(group, view, "accuracy_mean") for group in groups]
            name = f"accuracy-{view.replace('/', '-')}"
            found.append(_accuracy(name, _titled(view), lines, pens([group.label for group in groups])))
    return [picture for picture in found if picture is not None]


def worst_decile(groups: Sequence[Group]) -> list[Picture]:
    """The mean of the worst 10 % of clients in every evaluated round."""
    picture = draw(
        "worst-decile",
        f"Worst decile of clients, {REPORTED}",
        "mean accuracy of the worst 10 % (%)",
        [_over_seeds(group, group.view, "accuracy_worst_decile") for group in groups],
        pens([group.label for group in groups]),
        scale=100,
        words=lambda value: f"{100 * value:.1f} %",
    )
    return [picture] if picture else []


def loss(groups: Sequence[Group]) -> list[Picture]:
    """Cross-entropy: on test data as reported, and of local training."""
    names = pens([group.label for group in groups])
    point, model, split = TRAINING
    found = [
        draw(
            "loss-test",
            f"Test loss, {REPORTED}",
            "mean cross-entropy (nats)",
            [_over_seeds(group, group.view, "loss_mean") for group in groups],
            names,
        ),
        draw(
            "loss-train",
            "Training loss, mean over a round's local training",
            "mean loss (nats)",
            [_over_seeds(group, f"{model}/{point}", "loss_mean", split) for group in groups],
            names,
        ),
    ]
    return [picture for picture in found if picture is not None]


def draw(
    name: str,
    title: str,
    y_label: str,
    lines: Sequence[Line | None],
    names: Mapping[str, Pen],
    *,
    x_label: str = "round",
    x_log: bool = False,
    scale: float = 1.0,
    words: Callable[[float], str] = "{:.3g}".format,
    caption: str = "",
) -> Picture | None:
    """Lines with bands, each labelled at its end; None where there is nothing to draw.

    Args:
        name: of the file.
        title: of the picture.
        y_label: with the unit.
        lines: one a setting; None is left out.
        names: how each label is drawn.
        x_label: with the unit.
        x_log: whether the x axis is logarithmic.
        scale: what values are multiplied with, 100 for percent.
        words: a value as the alternative text has it.
        caption: in place of the sentence about bands.
    """
    there = [own for own in lines if own is not None]
    if not there:
        return None
    figure, axes = new_figure(height_for(len(there)))
    for own in there:
        pen = names[own.label]
        axes.plot(own.x, scale * own.mean, color=pen.color, linestyle=pen.linestyle)
        axes.plot(own.x[-1], scale * own.mean[-1], ".", color=pen.color, markersize=5)
        if not np.array_equal(own.low, own.high):
            axes.fill_between(
                own.x, scale * own.low, scale * own.high, color=pen.color, alpha=0.15, linewidth=0
            )
    if scale == 1.0 and is_wide([own.low for own in there] + [own.high for own in there]):
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    if x_log:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    cut = _zoom(axes, there, scale)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if x_label == "round":
        spread(axes, max(len(own.x) for own in there))
    figure.draw_without_rendering()
    label_ends(axes, [(own.label, own.x[-1], scale * own.mean[-1], names[own.label]) for own in there])
    banded = any(not np.array_equal(own.low, own.high) for own in there)
    ends = "; ".join(f"{own.label} {words(float(own.mean[-1]))}" for own in _by_end(there))
    alt = f"Line chart of {y_label} against {x_label}. At the end: {ends}."
    captions = [caption or (BAND if banded else "One seed each."), *([CUT] if cut else [])]
    return Picture(name, title, alt, figure, " ".join(captions))


def _accuracy(
    name: str, title: str, lines: Sequence[Line | None], names: Mapping[str, Pen]
) -> Picture | None:
    return draw(
        name,
        title,
        "test accuracy, mean over clients (%)",
        lines,
        names,
        scale=100,
        words=lambda value: f"{100 * value:.1f} %",
    )


def _over_seeds(group: Group, view: str, column: str, split: str = "test") -> Line | None:
    return line(group.label, [of_view(run, view, column, split) for run in group.runs])


def _titled(view: str) -> str:
    return f"Test accuracy, {view.replace('/', ', ')}"


def _by_end(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda own: -float(own.mean[-1]))


def is_wide(values: Sequence[np.ndarray]) -> bool:
    """Whether numbers are told apart on a logarithmic axis only."""
    every = np.concatenate(values)
    positive = every[every > 0]
    return bool((every >= 0).all() and len(positive) and positive.max() > WIDE_RANGE * positive.min())


def _zoom(axes: Axes, lines: Sequence[Line], scale: float) -> bool:
    """Show what follows on the beginning, if with the beginning it would be a small part of the picture."""
    late = [np.concatenate([own.low[at], own.high[at]]) for own in lines if (at := _late(own)).any()]
    values, every = np.concatenate(late), np.concatenate([own.mean for own in lines])
    low, high = float(values.min()), float(values.max())
    if len(every) == len(lines) or 3 * (high - low) > float(every.max() - every.min()):
        return False
    if axes.get_yscale() == "log":
        return False
    margin = 0.08 * (high - low) or 0.01 * abs(high)
    axes.set_ylim(scale * (low - margin), scale * (high + margin))
    return True


def _late(own: Line) -> np.ndarray:
    begin = own.x[0] + SETTLED * (own.x[-1] - own.x[0])
    late: np.ndarray = own.x >= begin
    return late
