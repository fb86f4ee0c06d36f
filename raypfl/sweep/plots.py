"""Figures of a sweep: heat maps of two keys, lines with error bars over one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from raypfl.records.files import replacing
from raypfl.sweep.results import PointResult
from raypfl.sweep.summary import CHOSEN, show, text, varied

DPI = 150
MOST_LINES = 12
"""More values than this of a key are drawn as points against it and not as lines or cells."""

TITLES = {
    "best_test": f"Test accuracy: {CHOSEN['test']}",
    "score": f"Validation accuracy: {CHOSEN['validation']}",
}


def write_plots(
    folder: Path, name: str, points: Sequence[PointResult], on: str, per: Sequence[str] = ()
) -> list[Path]:
    """Draw a sweep: for two keys of few values a heat map and lines, else each key by itself.

    Args:
        folder: where figures go.
        name: of the sweep.
        points: its points; those that are not complete are left out.
        on: the split that points are chosen on; with validation there are figures of it, too.
        per: keys whose values are not compared: a heat map's colours start anew in each of their columns.

    Returns:
        The files.

    Raises:
        StorageError: a figure cannot be written.
    """
    points = [point for point in points if point.complete]
    keys = varied(points)
    written = []
    for measure in ("best_test", "score") if on == "validation" else ("best_test",):
        figures: dict[str, Figure] = {}
        if len(keys) == 2 and _is_grid(points, keys):
            down, across = keys[::-1] if keys[0] in per else keys
            relative = across in per
            figures[f"heat_map_{measure}"] = heat_map(points, down, across, measure, relative=relative)
            for over, each in ((down, across), (across, down)):
                figures[f"{measure}_over_{over}"] = lines(points, over, each, measure)
        else:
            for key in keys:
                figures[f"{measure}_over_{key}"] = lines(points, key, None, measure)
        for file, figure in figures.items():
            figure.suptitle(f"{name}\n{TITLES[measure]}", fontsize="medium")
            path = folder / f"{file}.png"
            with replacing(path) as temporary:
                figure.savefig(temporary, format="png", dpi=DPI)
            written.append(path)
    return written


def heat_map(
    points: Sequence[PointResult], down: str, across: str, measure: str, *, relative: bool
) -> Figure:
    """Accuracy in % of every combination of two keys, with mean ± sd over seeds in each cell.

    With `relative`, colours are points below the best of the column, and the best cell is bold.
    """
    rows, columns = _values(points, down), _values(points, across)
    accuracy = np.full((len(rows), len(columns)), np.nan)
    cells: dict[tuple[int, int], str] = {}
    for point in points:
        at = rows.index(text(point.values.get(down))), columns.index(text(point.values.get(across)))
        accuracy[at] = 100 * point.measures[measure].mean
        cells[at] = show(point.measures[measure])
    best = np.nanmax(accuracy, axis=0, keepdims=True) if relative else np.nanmax(accuracy)
    shown = accuracy - best if relative else accuracy
    figure = Figure(figsize=(2.5 + 1.4 * len(columns), 1.8 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shown, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=across, ylabel=down)
    middle = (np.nanmin(shown) + np.nanmax(shown)) / 2
    is_best = accuracy == best
    for (row, column), cell in cells.items():
        ink = "white" if shown[row, column] < middle else "black"
        weight = "bold" if is_best[row, column] else "normal"
        axes.text(column, row, cell, ha="center", va="center", color=ink, fontsize="small", weight=weight)
    figure.colorbar(
        image, ax=axes, label="points below the best of the column" if relative else "accuracy in %"
    )
    return figure


def lines(points: Sequence[PointResult], over: str, each: str | None, measure: str) -> Figure:
    """Accuracy in % over one key with error bars (sd over seeds), a line for each value of another.

    Without another, points that share a value of `over` stand above each other and are not joined.
    """
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    labels = _values(points, over)
    numeric = all(isinstance(point.values.get(over), int | float) for point in points)
    for value in _values(points, each) if each else [None]:
        own = [point for point in points if each is None or text(point.values.get(each)) == value]
        if numeric:
            own = sorted(own, key=lambda point: float(point.values[over]))  # type: ignore[arg-type]
        x = [
            float(point.values[over]) if numeric else labels.index(text(point.values.get(over)))  # type: ignore[arg-type]
            for point in own
        ]
        y = [100 * point.measures[measure].mean for point in own]
        bars = [100 * (point.measures[measure].sd or 0.0) for point in own]
        joined = len(set(x)) == len(x) and len(x) <= MOST_LINES
        axes.errorbar(
            x,
            y,
            yerr=bars,
            marker="o",
            capsize=3,
            linestyle="-" if joined else "none",
            label=None if each is None else f"{each} = {value}",
        )
    if numeric:
        positive = [float(point.values[over]) for point in points]  # type: ignore[arg-type]
        if min(positive) > 0 and max(positive) / min(positive) > 50:
            axes.set_xscale("log")
    else:
        axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    axes.set(xlabel=over, ylabel="accuracy in %")
    axes.grid(alpha=0.3)
    if each is not None:
        axes.legend(fontsize="small")
    return figure


def _values(points: Sequence[PointResult], key: str) -> list[str]:
    return list(dict.fromkeys(text(point.values.get(key)) for point in points))


def _is_grid(points: Sequence[PointResult], keys: Sequence[str]) -> bool:
    sizes = [len(_values(points, key)) for key in keys]
    return max(sizes) <= MOST_LINES and len(points) <= sizes[0] * sizes[1]
