"""Who has how much of which class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, MultipleLocator

from raypfl.report.loading import Group, Run
from raypfl.report.picture import COLOURS, Picture, new_figure

MOST_CLIENTS = 100
"""In one picture; of more, those with the lowest ids."""
MOST_PARTITIONS = 3
MOST_TICKS = 12


def bubbles(groups: Sequence[Group]) -> list[Picture]:
    """Class by client, the area of a bubble being training samples; one picture a partition."""
    runs: dict[str, list[Run]] = {}
    for group in groups:
        for run in group.runs:
            if run.folder.partition_table.is_file():
                runs.setdefault(run.partition or run.name, []).append(run)
    return [
        _bubbles(alike[0], number, len(runs))
        for number, alike in enumerate(list(runs.values())[:MOST_PARTITIONS], 1)
    ]


def training_samples(run: Run) -> pd.DataFrame:
    """Training samples per class, a row a client, a column a class."""
    table = run.samples
    own = table[table["split"] == "train"].set_index("client")
    classes = [name for name in own.columns if name.startswith("class_")]
    own = own[classes].rename(columns=lambda name: int(name.removeprefix("class_")))
    counts: pd.DataFrame = own.sort_index()
    return counts


def _bubbles(run: Run, number: int, partitions: int) -> Picture:
    samples = training_samples(run)
    shown = samples.iloc[:MOST_CLIENTS]
    counts = shown.to_numpy(dtype=float)
    clients, classes = counts.shape
    figure, (totals, axes) = new_figure(
        min(6.5, 1.9 + 0.22 * classes), rows=2, sharex=True, height_ratios=(0.6, 0.22 * classes)
    )
    totals.bar(range(clients), counts.sum(1), color=COLOURS[5], width=0.8)
    totals.set_ylabel("samples")
    totals.grid(axis="x", visible=False)
    # The largest bubble fills its cell: points a cell, of the narrower side.
    cell = 72 * min(3.7 / clients, (min(6.5, 1.9 + 0.22 * classes) - 1.6) / classes)
    x, y = np.nonzero(counts)
    area = (1.15 * cell) ** 2 * counts[x, y] / counts.max()
    axes.scatter(x, y, s=area, color=COLOURS[0], alpha=0.75, linewidth=0)
    axes.set_ylim(-0.7, classes - 0.3)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.yaxis.set_major_locator(
        MultipleLocator(1) if classes <= MOST_TICKS else MaxNLocator(MOST_TICKS, integer=True)
    )
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_ylabel("class")
    axes.set_xlabel("client")
    present = (samples.to_numpy() > 0).sum(1)
    sizes = samples.sum(axis=1)
    config = run.config.get("partition", {})
    options = ", ".join(
        f"{key} {config[key]}" for key in ("name", "alpha", "classes_per_client") if key in config
    )
    seed = f", seed {run.summary.seed}" if partitions > 1 else ""
    more = f" Of {len(samples)} clients the first {clients} are shown." if len(samples) > clients else ""
    left = f" Of {partitions} partitions the first {MOST_PARTITIONS} are shown."
    return Picture(
        f"partition-{number}",
        f"Training samples of each client ({options}{seed})",
        f"Bubble chart of {classes} classes by {clients} clients. A client has {sizes.min()} to "
        f"{sizes.max()} training samples of {present.min()} to {present.max()} classes, "
        f"{present.mean():.1f} on average.",
        figure,
        f"The area of a bubble is the number of samples; the largest is {int(counts.max())}.{more}"
        + (left if number == 1 and partitions > MOST_PARTITIONS else ""),
    )
