"""One figure a study: speed, the server's seconds by phase, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raypfl.engine.phases import PHASES
from raypfl.records.files import replacing
from raypfl.scaling.fit import LEAST_FOR_HALF, SIZES, fit, larger_half
from raypfl.scaling.results import groups

LABELS = {
    "clients": "clients",
    "participants": "participants a round",
    "parameters": "parameters",
    "hosts": "hosts",
}


def plot(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw every study that has measured points; the files, `STUDY.png`.

    Raises:
        StorageError: a file cannot be written.
    """
    done = table[(table.status == "done") & (table.measure == "rounds")]
    paths = []
    for name, rows in done.groupby("study", sort=False):
        figure = _figure(rows)
        figure.suptitle(str(name))
        paths.append(folder / f"{name}.png")
        with replacing(paths[-1]) as path:
            figure.savefig(path, format="png", dpi=120)
    return paths


def _figure(rows: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    speed, server, memory = figure.subplots(1, 3)
    along = next((size for size in (*SIZES, "hosts") if rows[size].nunique() > 1), None)
    if along is None:
        # Nothing but kinds of things: a bar would do, and a point with a name says as much.
        rows = rows.assign(place=rows.settings)
        along = "place"
    for group, own in groups(rows):
        own = own.sort_values(along, kind="stable")
        low, high = own.round_seconds - own.round_seconds_low, own.round_seconds_high - own.round_seconds
        error = np.stack([low, high]) * (own.client_steps_per_second / own.round_seconds).to_numpy()
        speed.errorbar(
            own[along], own.client_steps_per_second, error, marker="o", capsize=2, label=group or None
        )
        memory.plot(own[along], own.memory_bytes / 2**30, marker="o", label=group or None)
    _phases(server, rows, along)
    _dress(speed, "client steps a second", along)
    _dress(server, "server, seconds a round", along)
    _dress(memory, "memory of all processes, GiB", along)
    return figure


def _phases(axes: Axes, rows: pd.DataFrame, along: str) -> None:
    """The median over groups of every phase, and a fit to all of them together where growth has settled."""
    middle = rows.groupby(along).median(numeric_only=True).reset_index()
    axes.plot(middle[along], middle.server_seconds, color="black", marker="o", label="all")
    for phase in PHASES:
        seconds = middle[f"{phase}_seconds"]
        if (seconds > 0).any():
            axes.plot(middle[along], seconds, marker=".", label=phase)
    if along not in SIZES:
        return
    settled = larger_half(middle, along) if len(middle) >= LEAST_FOR_HALF else middle
    found = fit(settled, "server_seconds", [along])
    if found is not None:
        line = found.factor * settled[along].astype(float) ** found.exponents[along]
        text = f"exponent {found.exponents[along]:.2f}"
        axes.plot(settled[along], line, color="grey", linestyle="--", label=text)


def _dress(axes: Axes, label: str, along: str) -> None:
    axes.set_ylabel(label)
    axes.set_yscale("log")
    if along in SIZES:
        axes.set_xscale("log")
    axes.set_xlabel(LABELS.get(along, ""))
    axes.grid(which="both", alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
