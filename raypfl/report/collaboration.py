"""Who collaborates with whom: matrices between clients, distances of those that pull and push, messages."""

# N clients.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raypfl.records.metrics import SERVER
from raypfl.report.loading import Group, Run
from raypfl.report.partition import training_samples
from raypfl.report.picture import COLOURS, DASHES, Pen, Picture, label_ends, new_figure, spread

MOST_CLIENTS = 100
"""In one matrix; of more, those with the lowest ids."""
PANELS = 4
"""Rounds in one picture: the first, the last, and some in between."""
ORDERED = "Clients stand in the order of their most frequent class, so that alike ones are neighbours."
UNHEARD = "#ededed"
COEFFICIENT, DISTANCE = "coefficient", "distance"
OWN = {
    COEFFICIENT,
    "head weight",
    "extractor weight",
    "weight",
    "relationship",
    "mask overlap",
    "weight of critical parameters",
}
"""Matrices whose diagonal is about what is one's own, and so large that it would hide the rest."""
TITLES = {
    COEFFICIENT: "Coefficients of the server's combination",
    "head weight": "Weights of heads",
    "extractor weight": "Weights of extractors",
    "weight": "Weights of models",
    "weight of critical parameters": "Weights of models, for critical parameters",
    "relationship": "Learned weights of core models",
    "mask overlap": "Share of a client's weights in another's mask",
    "divergence": "Divergence of answers",
    "affinity": "Affinity",
}
SIDES = {"pulled": Pen(COLOURS[0], DASHES[0]), "pushed": Pen(COLOURS[1], DASHES[1])}
META = "meta"
"""Kind of messages that say how many samples a peer has; they go with every other one."""


def matrices(groups: Sequence[Group]) -> list[Picture]:
    """Each matrix that a setting recorded, over rounds, of its first seed that has them."""
    found = []
    for group in groups:
        run = next((run for run in group.runs if len(run.pairs)), None)
        if run is not None:
            names = [name for name in run.pairs["name"].unique() if name != DISTANCE]
            found += [_matrix(group, run, name) for name in names]
    return found


def distances(groups: Sequence[Group]) -> list[Picture]:
    """Distances between models over rounds, of pairs that pull and of pairs that push each other."""
    pictures = (_distances(group) for group in groups)
    return [picture for picture in pictures if picture is not None]


def heard(groups: Sequence[Group]) -> list[Picture]:
    """Who heard whom, where there is no server: the share of rounds, by what was sent."""
    found = []
    for group in groups:
        for run in group.runs:
            messages = run.traffic
            between = messages[(messages["src"] != SERVER) & (messages["dst"] != SERVER)]
            between = between[between["kind"] != META]
            if len(between):
                found.append(_heard(group, run, between))
                break
    return found


def _matrix(group: Group, run: Run, name: str) -> Picture:
    entries = run.pairs[run.pairs["name"] == name]
    rounds = np.array(sorted(entries["round"].unique()))
    shown = rounds[np.unique(np.linspace(0, len(rounds) - 1, PANELS).round().astype(int))]
    order = _order(run, entries)
    dense = {round: _dense(entries[entries["round"] == round], order) for round in shown}
    diagonal = np.concatenate([matrix.diagonal() for matrix in dense.values()])
    own = ""
    if name in OWN:
        for matrix in dense.values():
            np.fill_diagonal(matrix, np.nan)
        if np.isfinite(diagonal).any():
            span = f"{np.nanmin(diagonal):.3g} to {np.nanmax(diagonal):.3g}"
            own = f" The weight on the own one, left out on the diagonal, is {span}."
    values = np.concatenate([matrix.ravel() for matrix in dense.values()])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    signed = low < 0
    largest = max(abs(low), abs(high)) or 1.0
    figure = _panels(
        {f"round {round}": matrix for round, matrix in dense.items()},
        order,
        f"{name} (pushes below 0)" if signed else name,
        cmap="RdBu" if signed else "cividis",
        low=-largest if signed else 0.0,
        high=largest,
    )
    more = len(np.union1d(entries["receiver"], entries["source"])) > len(order)
    cut = f" The {len(order)} clients with the lowest ids are shown." if more else ""
    title = TITLES.get(name, name.capitalize())
    seed = f", seed {run.summary.seed}" if len(group.runs) > 1 else ""
    return Picture(
        f"{slug(group.label)}-{slug(name)}",
        f"{group.label}: {title}{seed}",
        f"Matrices of {len(order)} receiving by {len(order)} sending clients in rounds "
        f"{', '.join(map(str, shown))}. Values from {low:.3g} to {high:.3g}.",
        figure,
        f"{ORDERED} Grey: no entry.{own}{cut}",
    )


def _distances(group: Group) -> Picture | None:
    spans, caption = _of_pairs(group), "Lines: median over pairs; bands: from 10 % to 90 % of them."
    if not spans:
        spans, caption = _of_diagnostics(group), "Mean over pairs."
    if not spans:
        return None
    figure, axes = new_figure(3.0)
    ends, words = [], []
    for label, span in spans.items():
        pen = SIDES[label]
        axes.plot(span.index, span["middle"], color=pen.color, linestyle=pen.linestyle)
        axes.fill_between(span.index, span["low"], span["high"], color=pen.color, alpha=0.15, linewidth=0)
        last = float(span["middle"].iloc[-1])
        ends.append((label, float(span.index[-1]), last, pen))
        words.append(f"{label} {last:.3g}")
    axes.set_xlabel("round")
    axes.set_ylabel("distance of two models (2-norm)")
    axes.set_ylim(bottom=0)
    spread(axes, max(map(len, spans.values())))
    figure.draw_without_rendering()
    label_ends(axes, ends)
    return Picture(
        f"{slug(group.label)}-distances",
        f"{group.label}: distances of models that pull and push each other",
        f"Line chart of distances over rounds. At the end: {'; '.join(words)}.",
        figure,
        f"Before the server's step. {caption}",
    )


def _of_pairs(group: Group) -> dict[str, pd.DataFrame]:
    """Quantiles by round of the distances of pairs with a positive and with a negative coefficient."""
    runs = [run for run in group.runs if {COEFFICIENT, DISTANCE} <= set(run.pairs["name"])]
    if not runs:
        return {}
    frame = pd.concat([_signed_distances(run) for run in runs])
    found = {}
    for label, sign in (("pulled", 1), ("pushed", -1)):
        side = frame[frame["sign"] == sign]
        if len(side):
            spans = side.groupby("round")[DISTANCE].quantile([0.1, 0.5, 0.9]).unstack()
            found[label] = spans.set_axis(["low", "middle", "high"], axis=1)
    return found


def _signed_distances(run: Run) -> pd.DataFrame:
    """Distance and the coefficient's sign of every pair of different clients, by round."""
    pairs = run.pairs[run.pairs["receiver"] != run.pairs["source"]]
    wide: pd.DataFrame = pairs.pivot(
        index=["round", "receiver", "source"], columns="name", values="value"
    ).reset_index()
    wide["sign"] = np.sign(wide[COEFFICIENT]).astype(int)
    return wide


def _of_diagnostics(group: Group) -> dict[str, pd.DataFrame]:
    """The same of runs that have recorded means, but no matrices."""
    tables = [run.table("diagnostics", ["round", "name", "value"]) for run in group.runs]
    frame = pd.concat([table for table in tables if len(table)] or tables)
    found = {}
    for label in SIDES:
        own = frame[frame["name"] == f"{label}_distance"].dropna()
        if len(own):
            mean = own.groupby("round")["value"].mean()
            found[label] = pd.DataFrame({"low": mean, "middle": mean, "high": mean})
    return found


def _heard(group: Group, run: Run, messages: pd.DataFrame) -> Picture:
    rounds = messages["round"].nunique()
    kinds = messages.groupby("kind", observed=True)["bytes"].sum().sort_values(ascending=False)
    shown = list(kinds.index[:PANELS])
    shares: dict[str, np.ndarray] = {}
    order = _order(run, messages.rename(columns={"dst": "receiver", "src": "source"}))
    words = []
    for kind in shown:
        own = messages[messages["kind"] == kind].drop_duplicates(["round", "src", "dst"])
        share = own.groupby(["dst", "src"]).size().div(rounds).reset_index(name="value")
        shares[kind] = _dense(share.rename(columns={"dst": "receiver", "src": "source"}), order)
        words.append(f"{kind} from {len(own) / rounds / len(order):.1f} others")
    figure = _panels(shares, order, "share of rounds", cmap="cividis", low=0.0, high=1.0)
    seed = f", seed {run.summary.seed}" if len(group.runs) > 1 else ""
    return Picture(
        f"{slug(group.label)}-heard",
        f"{group.label}: who heard whom{seed}",
        f"Matrices of {len(order)} receiving by {len(order)} sending clients, by kind of message. In a "
        f"round a client hears {', '.join(words)}, on average.",
        figure,
        "By kind of message, the share of rounds in which the receiver got it from the source. "
        f"{ORDERED} Grey: never.",
    )


def _panels(
    matrices: Mapping[str, np.ndarray], order: np.ndarray, label: str, *, cmap: str, low: float, high: float
) -> Figure:
    """Matrices with one colour scale, each under its title."""
    columns = min(2, len(matrices))
    rows = -(-len(matrices) // columns)
    figure, grid = new_figure(0.9 + 1.95 * rows, rows, columns, squeeze=False, sharex=True, sharey=True)
    every = max(1, -(-len(order) // 10))
    places = range(0, len(order), every)
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=False):
        shown = np.ma.masked_invalid(matrix)
        image = axes.imshow(shown, cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
        axes.set_facecolor(UNHEARD)
        axes.set_title(title)
        axes.set_xticks(places, order[::every], rotation=90, fontsize=7)
        axes.set_yticks(places, order[::every], fontsize=7)
        axes.grid(visible=False)
    for axes in grid.flat[len(matrices) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("source (client)")
    for axes in grid[:, 0]:
        axes.set_ylabel("receiver (client)")
    figure.colorbar(image, ax=grid, shrink=0.8, label=label)
    return figure


def _order(run: Run, entries: pd.DataFrame) -> np.ndarray:
    """The clients of a matrix, by most frequent class and id where the partition is known."""
    clients = np.union1d(entries["receiver"], entries["source"])[:MOST_CLIENTS]
    if not run.folder.partition_table.is_file():
        return clients
    favourite = training_samples(run).idxmax(axis=1).reindex(clients).to_numpy()
    order: np.ndarray = clients[np.lexsort((clients, favourite))]
    return order


def _dense(entries: pd.DataFrame, order: np.ndarray) -> np.ndarray:
    wide = entries.pivot(index="receiver", columns="source", values="value")
    matrix: np.ndarray = wide.reindex(index=order, columns=order).to_numpy(dtype=float).copy()
    return matrix


def slug(label: str) -> str:
    """A label as a part of a file's name."""
    kept = "".join(letter if letter.isalnum() or letter in "_." else "-" for letter in label.lower())
    return "-".join(part for part in kept.split("-") if part)
