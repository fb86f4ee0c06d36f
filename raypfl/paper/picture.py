"""The traces of a toy as one picture: how far apart each pair's answers are, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from raypfl.records.files import replacing

if TYPE_CHECKING:
    from raypfl.paper.toys import Trace


def draw(path: Path, title: str, traces: Sequence[Trace], printed: Mapping[str, float]) -> None:
    """A line a pair, the mean over seeds, with a band from the lowest to the highest seed.

    Args:
        path: a PNG file.
        title: above the picture.
        traces: a seed each, of the same pairs and rounds.
        printed: the paper's number of a pair; a dotted line.

    Raises:
        StorageError: the file cannot be written.
    """
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.subplots()
    pairs = traces[0].columns[1:]
    values_SRE = np.array([[row[1:] for row in trace.rounds] for trace in traces])
    rounds = np.arange(1, values_SRE.shape[1] + 1)
    for place, pair in enumerate(pairs):
        of_pair_SR = values_SRE[:, :, place]
        (line,) = axes.plot(rounds, of_pair_SR.mean(0), label=pair)
        axes.fill_between(rounds, of_pair_SR.min(0), of_pair_SR.max(0), color=line.get_color(), alpha=0.15)
    for value in sorted(set(printed.values())):
        pairs_there = ", ".join(pair for pair in printed if printed[pair] == value)
        axes.axhline(value, color="grey", linestyle=":", linewidth=1)
        axes.annotate(f"paper: {pairs_there}", (rounds[-1], value), ha="right", va="bottom", color="grey")
    axes.set(xlabel="round", ylabel="divergence", title=title, ylim=(0, np.log(2)))
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", ncols=2)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Title": title})
