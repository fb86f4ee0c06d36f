"""How fast a round is, beside a plain PyTorch loop that takes turns with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raypfl.bench.report import refuse_overwriting, show, write
from raypfl.bench.runner import Measured, Result, Spread, measure
from raypfl.bench.workloads import WORKLOADS, Workload, chosen
from raypfl.console import Console

__all__ = ["WORKLOADS", "Measured", "Result", "Spread", "Workload", "chosen", "measure", "run"]


def run(
    workloads: Sequence[Workload], rounds: int, *, console: Console, out: Path | None = None
) -> list[Result]:
    """Measure workloads one after the other and show a table of each.

    Args:
        workloads: what to measure (`chosen`).
        rounds: counted rounds of each contender.
        console: where progress and tables go.
        out: a folder for `bench.parquet` (every round) and `bench.json` (what they come to, and machine
            and versions); written after each workload.

    Raises:
        StorageError: the folder has results already, or cannot be written.
    """
    if out is not None:
        refuse_overwriting(out)
    results: list[Result] = []
    for workload in workloads:
        results.append(measure(workload, rounds, console))
        console.table(show(results[-1]))
        if out is not None:
            write(out, results)
    return results
