"""What runs cost: bytes, also those of the busiest node, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pandas as pd

from raypfl.records.metrics import SERVER, TRAINING
from raypfl.report.curves import Line, draw, is_wide, line, of_view
from raypfl.report.loading import Group, Run
from raypfl.report.picture import (
    COLOURS,
    Picture,
    height_for,
    label_ends,
    new_figure,
    pens,
    plain_numbers,
    spread,
)

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


class Load(NamedTuple):
    """Bytes of the busiest node of each round, by round."""

    sent: pd.Series[float]
    received: pd.Series[float]
    node: pd.Series[int]
    """Which one it is: the server (-1) or a client."""


def traffic(groups: Sequence[Group]) -> list[Picture]:
    """Accuracy against bytes, and the load of the busiest node."""
    if not any(len(run.traffic) for group in groups for run in group.runs):
        return []
    return [*accuracy_by_bytes(groups), *busiest(groups)]


def accuracy_by_bytes(groups: Sequence[Group]) -> list[Picture]:
    """What accuracy the bytes of all messages so far have bought."""
    names = pens([group.label for group in groups])
    largest = max(float(run.traffic["bytes"].sum()) for group in groups for run in group.runs)
    unit, word = _unit(largest)
    lines: list[Line] = []
    for group in groups:
        found = line(group.label, [of_view(run, group.view, "accuracy_mean") for run in group.runs])
        spent = mean_series([_bytes_by_round(run).cumsum() for run in group.runs])
        if found is not None and spent.sum() > 0:
            # On a logarithmic axis there is no place for what costs nothing.
            paid = Line(group.label, *(values[found.x > 0] for values in found[1:]))
            lines.append(paid._replace(x=spent.reindex(paid.x).to_numpy(dtype=float) / unit))
    totals = np.array([own.x[-1] for own in lines])
    picture = draw(
        "accuracy-by-bytes",
        "Accuracy against traffic",
        "test accuracy, mean over clients (%)",
        lines,
        names,
        x_label=f"{word} in all messages so far",
        x_log=is_wide([totals]),
        scale=100,
        words=lambda value: f"{100 * value:.1f} %",
        caption="As each paper reports it; every message between clients, or with the server, counts once.",
    )
    return [picture] if picture else []


def busiest(groups: Sequence[Group]) -> list[Picture]:
    """Bytes sent and received in each round by the node with the most of both together."""
    names = pens([group.label for group in groups])
    loads = [
        (group, found)
        for group in groups
        if (found := [load_of(run) for run in group.runs if len(run.traffic)])
    ]
    most = max(float(own.max()) for _, found in loads for load in found for own in load[:2])
    unit, word = _unit(most)
    figure, (above, below) = new_figure(2 * height_for(len(groups)) - 1.2, rows=2, sharex=True)
    words = []
    for axes, ways in ((above, "sent"), (below, "received")):
        ends = []
        for group, found in loads:
            own = line(group.label, [getattr(load, ways) / unit for load in found])
            if own is None:
                continue
            pen = names[group.label]
            # Where nothing is sent there is no line: a logarithmic axis has no place for it.
            mean = np.where(own.mean > 0, own.mean, np.nan)
            axes.plot(own.x, mean, color=pen.color, linestyle=pen.linestyle)
            axes.fill_between(own.x, own.low, own.high, color=pen.color, alpha=0.15, linewidth=0)
            ends.append((own, pen))
        axes.set_ylabel(f"{ways} ({word} a round)")
        if is_wide([own.mean for own, _ in ends]):
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        spread(axes, 2)
        figure.draw_without_rendering()
        label_ends(axes, [(own.label, own.x[-1], own.mean[-1], pen) for own, pen in ends])
    below.set_xlabel("round")
    for group, found in loads:
        sent = fmean(float(load.sent.mean()) for load in found)
        received = fmean(float(load.received.mean()) for load in found)
        servers = {int(node) for load in found for node in load.node}
        who = "the server" if servers == {SERVER} else "a client"
        words.append(f"{group.label}: {who}, {sent / unit:.3g} sent, {received / unit:.3g} {word} received")
    return [
        Picture(
            "busiest-node",
            "Load of the busiest node",
            f"Two line charts over rounds. On average a round: {'; '.join(words)}.",
            figure,
            "In each round, the node with the most bytes sent and received together: the server where there "
            "is one, else the peer that others ask most. Lines: mean over seeds; bands: their range.",
        )
    ]


def load_of(run: Run) -> Load:
    """The busiest node of each round; of equally busy ones that with the lowest id."""
    messages = run.traffic
    sent = messages.groupby(["round", "src"])["bytes"].sum().rename_axis(["round", "node"])
    received = messages.groupby(["round", "dst"])["bytes"].sum().rename_axis(["round", "node"])
    both = pd.DataFrame({"sent": sent, "received": received}).fillna(0.0).sort_index()
    total = both.sum(axis=1)
    busy = both.loc[total.groupby(level="round").idxmax()]
    node = busy.index.get_level_values("node").to_series(index=busy.index.get_level_values("round"))
    by_round = busy.droplevel("node")
    return Load(by_round["sent"], by_round["received"], node)


def seconds(groups: Sequence[Group]) -> list[Picture]:
    """Mean wall-clock seconds of a round, by what is done in it."""
    groups = [group for group in groups if all(run.summary.rounds for run in group.runs)]
    if not groups:
        return []
    names = [group.label for group in groups]
    parts: dict[str, list[float]] = {"training": [], "evaluation": [], "server": []}
    for group in groups:
        rounds = [_costs(run) for run in group.runs]
        whole, server, evaluation = (
            fmean(float(own[f"{what}_seconds"].mean()) for own in rounds)
            for what in ("round", "server", "evaluation")
        )
        parts["server"].append(server)
        parts["evaluation"].append(evaluation)
        parts["training"].append(max(0.0, whole - server - evaluation))
    figure, axes = new_figure(1.3 + 0.32 * len(groups))
    left = np.zeros(len(groups))
    for (what, values), color in zip(parts.items(), (COLOURS[0], COLOURS[4], COLOURS[1]), strict=True):
        axes.barh(range(len(groups)), values, left=left, color=color, height=0.65, label=what)
        left += np.array(values)
    for place, whole in enumerate(left):
        axes.text(whole, place, f" {whole:.3g} s", va="center", fontsize=8.5)
    axes.set_yticks(range(len(groups)), names)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * left.max())
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("wall-clock seconds a round")
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8.5)
    words = "; ".join(
        f"{name} {left[place]:.3g} s ({', '.join(f'{what} {own[place]:.2g}' for what, own in parts.items())})"
        for place, name in enumerate(names)
    )
    return [
        Picture(
            "seconds",
            "Time of a round",
            f"Stacked bars, a row a setting: {words}.",
            figure,
            "Training is what is left of a round beside the server's step and evaluation, with what hosts "
            "and driver say to each other. Runs on machines under other load do not compare.",
        )
    ]


def virtual_time(groups: Sequence[Group]) -> list[Picture]:
    """Accuracy against the virtual clock, where runs have one."""
    lines: list[Line | None] = []
    for group in groups:
        ends = [_virtual_ends(run) for run in group.runs]
        found = line(group.label, [of_view(run, group.view, "accuracy_mean") for run in group.runs])
        if found is None or any(own.empty for own in ends):
            continue
        time = mean_series(ends)
        x = np.array([0.0 if round == 0 else time.get(round, np.nan) for round in found.x])
        lines.append(found._replace(x=x))
    picture = draw(
        "accuracy-by-clock",
        "Accuracy in virtual time",
        "test accuracy, mean over clients (%)",
        lines,
        pens([group.label for group in groups]),
        x_label="virtual seconds",
        scale=100,
        words=lambda value: f"{100 * value:.1f} %",
        caption="By the run's own clock (`clock`), which no machine's speed changes.",
    )
    return [picture] if picture else []


def mean_series(series: Sequence[pd.Series[float]]) -> pd.Series[float]:
    """The mean of several series in the places that all of them have."""
    return pd.concat(series, axis=1, join="inner").mean(axis=1)


def _virtual_ends(run: Run) -> pd.Series[float]:
    times = run.table("clock", ["round", "client", "end"])
    ends: pd.Series[float] = times.groupby("round")["end"].max().cummax()
    # Peers at their own pace may have begun nothing in a round.
    return ends.reindex(range(1, run.summary.rounds + 1)).ffill() if len(ends) else ends


def _bytes_by_round(run: Run) -> pd.Series[float]:
    found = run.traffic.groupby("round")["bytes"].sum()
    rounds = range(1, run.summary.rounds + 1)
    return found.reindex(rounds, fill_value=0).astype(float)


def _costs(run: Run) -> pd.DataFrame:
    point, model, split = TRAINING
    rows = run.rounds
    own: pd.DataFrame = rows[(rows["point"] == point) & (rows["model"] == model) & (rows["split"] == split)]
    return own


def _unit(largest: float) -> tuple[float, str]:
    return next((unit for unit in UNITS if largest >= unit[0]), UNITS[-1])
