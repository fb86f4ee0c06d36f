"""How fast a round is beside a plain PyTorch loop, and a method beside FedAvg; they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raypfl.bench import method_report, methods, plots
from raypfl.bench.methods import Costs
from raypfl.bench.report import refuse_overwriting, show, show_phases, write
from raypfl.bench.runner import Measured, Result, Spread, measure
from raypfl.bench.workloads import WORKLOADS, Workload, chosen
from raypfl.console import Console

__all__ = [
    "WORKLOADS",
    "Costs",
    "Measured",
    "Result",
    "Spread",
    "Workload",
    "chosen",
    "measure",
    "run",
    "run_methods",
]


def run(
    workloads: Sequence[Workload],
    rounds: int,
    *,
    console: Console,
    local: bool = False,
    out: Path | None = None,
) -> list[Result]:
    """Measure workloads one after the other and show a table of each.

    Args:
        workloads: what to measure (`chosen`).
        rounds: counted rounds of each contender.
        console: where progress and tables go.
        local: without Ray, both in this process and in its processor time, which other processes of a busy
            machine do not lengthen as they do wall clock.
        out: a folder for `bench.parquet` (every round), `bench.json` (what they come to, and machine
            and versions) and `bench.png`; written after each workload.

    Raises:
        StorageError: the folder has results already, or cannot be written.
    """
    if out is not None:
        refuse_overwriting(out)
    results: list[Result] = []
    for workload in workloads:
        results.append(measure(workload, rounds, console, local=local))
        console.table(show(results[-1]))
        console.table(show_phases(results[-1]))
        if out is not None:
            write(out, results)
            plots.write(out, results)
    return results


def run_methods(
    workload: Workload,
    chosen: Sequence[methods.Entry],
    rounds: int,
    *,
    console: Console,
    out: Path | None = None,
) -> Costs:
    """Measure methods beside FedAvg on one workload and show the table.

    Args:
        workload: what they train on.
        chosen: what is measured (`methods.entries`).
        rounds: counted turns of each.
        console: where progress and the table go.
        out: a folder for `bench.parquet` (every turn) and `bench.json`.

    Raises:
        StorageError: the folder has results already, or cannot be written.
    """
    if out is not None:
        refuse_overwriting(out)
    costs = methods.measure(workload, chosen, rounds, console)
    console.table(method_report.show(costs))
    if out is not None:
        method_report.write(out, costs)
    return costs
