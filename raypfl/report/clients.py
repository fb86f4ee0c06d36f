"""How figures are spread over clients in the round that is shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypfl.records.statistics import client_statistics
from raypfl.report.loading import Group, has_validation
from raypfl.report.picture import Picture, new_figure, pens

MOST_POINTS = 400
"""Points of one setting; of more clients only the box is drawn."""


def distribution(groups: Sequence[Group]) -> list[Picture]:
    """Test accuracy of every client in the best round: points, quartiles, and the worst decile."""
    on_validation = has_validation(groups)
    found = [(group, values) for group in groups if len(values := _values(group, on_validation))]
    if not found:
        return []
    names = pens([group.label for group in groups])
    figure, axes = new_figure(1.0 + 0.42 * len(found))
    words = []
    for place, (group, values) in enumerate(found):
        color = names[group.label].color
        axes.boxplot(
            100 * values,
            positions=[place],
            orientation="horizontal",
            widths=0.5,
            whis=(10, 90),
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": "none", "edgecolor": color},
            whiskerprops={"color": color},
            capprops={"color": color},
            medianprops={"color": color, "linewidth": 2.2},
        )
        if len(values) <= MOST_POINTS:
            # Beside each other by rank, not by chance: the same picture every time.
            offsets = 0.22 * np.sin(2.4 * np.arange(len(values)))
            axes.plot(100 * values, place + offsets, ".", color=color, alpha=0.45, markersize=4)
        statistics = client_statistics(values, values, np.ones(len(values)))
        worst = statistics.accuracy_worst_decile
        axes.plot(100 * worst, place, marker="D", color="black", markersize=5, linestyle="none", zorder=5)
        words.append(
            f"{group.label}: median {100 * np.median(values):.1f} %, worst decile {100 * worst:.1f} %"
        )
    axes.set_yticks(range(len(found)), [group.label for group, _ in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("test accuracy of a client (%)")
    seeds = max(len(group.runs) for group in groups)
    return [
        Picture(
            "clients",
            "Clients in the best round, as each paper reports it",
            f"Accuracy of single clients, a row a setting. {'; '.join(words)}.",
            figure,
            f"A point: one client{' with one seed' if seeds > 1 else ''}. Box: quartiles and median; "
            "whiskers: 10 % and 90 %; black diamond: mean of the worst 10 %.",
        )
    ]


def _values(group: Group, on_validation: bool) -> np.ndarray:
    """Accuracy of each client with each seed, in [0, 1], in the order of seeds and clients."""
    parts = []
    for run in group.runs:
        score = run.score("best", on_validation=on_validation)
        if score is not None:
            parts.append(run.client_scores(score.round, group.view).to_numpy(dtype=float))
    return np.concatenate(parts) if parts else np.empty(0)
