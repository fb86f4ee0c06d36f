"""What was measured, as a table and as files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.bench.contenders import Turn, cores
from raypfl.bench.runner import WARM_UP, Measured, Result, Spread
from raypfl.engine.phases import CLIENT_PHASES, PHASES
from raypfl.errors import StorageError
from raypfl.records.environment import environment
from raypfl.records.files import replacing, write_json
from raypfl.records.grid import Grid

TABLE, SUMMARY = "bench.parquet", "bench.json"


def show(result: Result) -> Grid:
    """One workload's table: medians, and quartiles in brackets."""
    workload = result.workload
    done = (
        f"{workload.name}: {workload.model}, {workload.num_clients} clients x {workload.train_samples} "
        f"samples, {workload.epochs} epochs of batches of {workload.batch_size}; "
        f"{len(result.baseline.turns)} rounds in turn, medians [quartiles]."
    )
    held = f"Server at its peak: {result.server_rows:.2f} rows per client."
    if result.local:
        here = tuple(
            (
                one.contender,
                _bracketed(one.spread("seconds")),
                ratio(one.over(result.baseline)),
                number(one.start_seconds),
            )
            for one in result.measured
        )
        note = f"{done} Processor time of one thread, both in one process.\n{held}"
        return Grid(("contender", "round s", "to plain loop", "start s"), here, note=note)
    rows = tuple(_row(one, result.baseline) for one in result.measured)
    header = (
        "contender",
        "round s",
        "to plain loop",
        "host s",
        "server ms",
        "engine ms",
        "2x copy ms",
        "start s",
    )
    faster = result.all_over_one
    gain = "" if faster is None else f"Ray, a host a core over one host: {ratio(faster)} rounds/s. "
    note = (
        f"{done} host: work of the slowest; "
        "engine: the rest of the round but the server's part; 2x copy: twice copying the bytes sent.\n"
        f"{gain}{held}"
    )
    return Grid(header, rows, note=note)


def show_phases(result: Result) -> Grid:
    """Where the time goes, clients and server, in the engine without Ray."""
    total = sum(result.phases.values())
    rows = tuple(
        (phase, number(result.phases[phase] * 1e3), f"{result.phases[phase] / total:.1%}")
        for phase in (*CLIENT_PHASES, *PHASES)
        if phase in result.phases
    )
    note = (
        f"{result.workload.name}: one thread, without Ray. forward: losses of batches; optimizer: the step; "
        "evaluation: less its batches; the server's: distances, qp, mixing, sampling, messages."
    )
    return Grid(("spent on", "ms a round", "share"), rows, note=note)


def refuse_overwriting(folder: Path) -> None:
    """Check that a folder has no results yet, before anything is measured.

    Raises:
        StorageError: it has.
    """
    for name in (TABLE, SUMMARY):
        if (folder / name).exists():
            raise StorageError(f"{folder / name} is there already. Give another folder.")


def write(folder: Path, results: Sequence[Result]) -> None:
    """Write every round into `bench.parquet`, and what they come to and ran on into `bench.json`.

    Raises:
        StorageError: the files cannot be written.
    """
    save(folder, _rounds(results), {"workloads": [_summary(result) for result in results]})


def save(folder: Path, rounds: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Write rows into `bench.parquet`, and a summary with what they were measured on into `bench.json`.

    Raises:
        StorageError: the files cannot be written.
    """
    with replacing(folder / TABLE) as path:
        pq.write_table(pa.Table.from_pylist(list(rounds)), path)
    measured_on = {"environment": environment(), "cores": cores(), "warm_up": WARM_UP}
    write_json(folder / SUMMARY, {**measured_on, **summary})


def _row(one: Measured, baseline: Measured) -> tuple[str, ...]:
    def milliseconds(name: str, factor: float = 1.0) -> str:
        return number(one.spread(name).median * factor * 1e3)

    return (
        one.contender,
        _bracketed(one.spread("seconds")),
        ratio(one.over(baseline)),
        number(one.spread("work_seconds").median),
        milliseconds("server_seconds"),
        milliseconds("own_seconds"),
        milliseconds("copy_seconds", 2.0),
        number(one.start_seconds),
    )


def number(value: float) -> str:
    """Three digits; empty for what is missing."""
    return "" if math.isnan(value) else f"{value:.3g}"


def _bracketed(spread: Spread) -> str:
    return f"{spread.median:.3g} [{spread.low:.3g} {spread.high:.3g}]"


def ratio(spread: Spread) -> str:
    """A median, and quartiles in brackets."""
    return f"{spread.median:.2f} [{spread.low:.2f} {spread.high:.2f}]"


def _rounds(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {
            "workload": result.workload.name,
            "clients": result.workload.num_clients,
            "batch_size": result.workload.batch_size,
            "contender": one.contender,
            "processes": one.processes,
            "round": round,
            "ratio": turn.seconds / plain.seconds,
            **turn._asdict(),
        }
        for result in results
        for one in result.measured
        for round, (turn, plain) in enumerate(zip(one.turns, result.baseline.turns, strict=True), 1)
    ]


def _summary(result: Result) -> dict[str, Any]:
    return {
        **asdict(result.workload),
        "server_rows": result.server_rows,
        "clock": "processor" if result.local else "wall",
        "all_over_one": None if result.all_over_one is None else result.all_over_one._asdict(),
        "phases": dict(result.phases),
        "contenders": [
            {
                "contender": one.contender,
                "processes": one.processes,
                "start_seconds": one.start_seconds,
                "ratio": one.over(result.baseline)._asdict(),
                **{name: _spread(one.spread(name)) for name in Turn._fields},
            }
            for one in result.measured
        ],
    }


def _spread(spread: Spread) -> dict[str, float] | None:
    """Nothing where the contender does not have the quantity; JSON knows no NaN."""
    return None if math.isnan(spread.median) else spread._asdict()
