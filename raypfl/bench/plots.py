"""What was measured, as one figure: ratios to the plain loop, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from raypfl.bench.runner import Result
from raypfl.engine.phases import CLIENT_PHASES, PHASES
from raypfl.records.files import replacing

PLOT = "bench.png"


def write(folder: Path, results: Sequence[Result]) -> None:
    """Draw `bench.png`: a group of bars a workload beside the plain loop, and shares of its time.

    Raises:
        StorageError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 1.6 + 0.7 * len(results)), layout="constrained")
    speed, shares = figure.subplots(1, 2)
    names = [result.workload.name for result in results]
    contenders = list(dict.fromkeys(one.contender for result in results for one in result.measured[1:]))
    height = 0.8 / len(contenders)
    for place, contender in enumerate(contenders):
        found = [
            (row, one.over(result.baseline))
            for row, result in enumerate(results)
            for one in result.measured
            if one.contender == contender
        ]
        middle = [own.median for _, own in found]
        error = [[own.median - own.low for _, own in found], [own.high - own.median for _, own in found]]
        at = [row + (place - (len(contenders) - 1) / 2) * height for row, _ in found]
        speed.barh(at, middle, height, xerr=error, capsize=2, label=contender)
    speed.axvline(1.0, color="black", linewidth=0.8)
    clock = "processor time" if results[0].local else "wall clock"
    speed.set_xlabel(f"round beside the plain loop, {clock}; below 1 is faster")
    start = [0.0] * len(results)
    for phase in (*CLIENT_PHASES, *PHASES):
        width = [result.phases.get(phase, 0.0) / sum(result.phases.values()) for result in results]
        if any(width):
            shares.barh(range(len(results)), width, 0.8, left=start, label=phase)
            start = [before + own for before, own in zip(start, width, strict=True)]
    shares.set_xlabel("share of a round, engine without Ray")
    shares.set_xlim(0.0, 1.0)
    for axes in (speed, shares):
        axes.set_yticks(range(len(results)), names)
        axes.invert_yaxis()
    speed.legend(fontsize="small")
    shares.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    with replacing(folder / PLOT) as path:
        figure.savefig(path, format="png", dpi=120)
