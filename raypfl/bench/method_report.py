"""What methods cost, as a table and as files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from raypfl.bench.methods import OPTIMIZER, Cost, Costs, Round
from raypfl.bench.report import number, ratio, save
from raypfl.bench.runner import spread
from raypfl.records.grid import Grid

SECONDS = ("train_seconds", "server_seconds", "evaluation_seconds")


def show(costs: Costs) -> Grid:
    """One workload's table: medians, and quartiles in brackets."""
    header = (
        "method",
        "epoch to FedAvg",
        "at most",
        "",
        "epochs",
        "update s",
        "server ms",
        "to FedAvg",
        "evaluation s",
        "to FedAvg",
        "KB down",
        "KB up",
    )
    return Grid(header, tuple(map(_row, costs.measured)), note=_note(costs))


def write(folder: Path, costs: Costs) -> None:
    """Write every turn into `bench.parquet`, and what they come to and ran on into `bench.json`.

    Raises:
        StorageError: the files cannot be written.
    """
    summary = {
        **asdict(costs.workload),
        "optimizer": OPTIMIZER,
        "methods": [_summary(cost) for cost in costs.measured],
        "left_out": costs.left_out,
    }
    save(folder, _turns(costs), {"methods_on": summary})


def _row(cost: Cost) -> tuple[str, ...]:
    def median(name: str, factor: float = 1.0) -> str:
        return number(cost.spread(name).median * factor)

    def beside(name: str) -> str:
        return f"{spread(cost.ratios(name)).median:.2f}"

    return (
        cost.entry.name,
        ratio(spread(cost.epoch_ratios)),
        "" if cost.at_most is None else f"{cost.at_most:.2f}",
        "above" if cost.is_above else "",
        number(cost.epochs),
        median("train_seconds"),
        median("server_seconds", 1e3),
        beside("server_seconds"),
        median("evaluation_seconds"),
        beside("evaluation_seconds"),
        f"{cost.column('down_bytes').mean() / 1e3:.0f}",
        f"{cost.column('up_bytes').mean() / 1e3:.0f}",
    )


def _note(costs: Costs) -> str:
    workload = costs.workload
    turns = len(costs.measured[0].turns) if costs.measured else 0
    note = (
        f"{workload.name}: {workload.model}, {workload.num_clients} clients x {workload.train_samples} "
        f"samples, batches of {workload.batch_size}, {workload.epochs} epochs where a method has no passes "
        f"of its own, {OPTIMIZER['name']}. {turns} turns, each right beside a round of FedAvg; processor "
        "time of one thread; medians [quartiles], ratios those of quotients of the same turn.\n"
        "epoch: the local update of all clients over its epochs, the passes that it makes over a client's "
        "samples (of FedRep, of head and extractor together; of Per-FedAvg, without samples that it leaves "
        "out). at most: by the arithmetic of the method; above: it takes more. server: plan, download and "
        "aggregation. evaluation: of validation and test samples. KB: a participant's messages in a round."
    )
    return "\n".join([note, *(f"Left out: {name}: {why}" for name, why in costs.left_out.items())])


def _turns(costs: Costs) -> list[dict[str, Any]]:
    return [
        {
            "workload": costs.workload.name,
            "entry": cost.entry.name,
            "method": cost.entry.options["name"],
            "round": round,
            "epochs": cost.epochs,
            "epoch_ratio": float(epoch_ratio),
            "at_most": cost.at_most,
            **turn.own._asdict(),
            **{f"fedavg_{name}": value for name, value in turn.fedavg._asdict().items()},
        }
        for cost in costs.measured
        for round, (turn, epoch_ratio) in enumerate(zip(cost.turns, cost.epoch_ratios, strict=True), 1)
    ]


def _summary(cost: Cost) -> dict[str, Any]:
    return {
        "entry": cost.entry.name,
        "options": cost.entry.options,
        "epochs": cost.epochs,
        "at_most": cost.at_most,
        "is_above": cost.is_above,
        "epoch_ratio": spread(cost.epoch_ratios)._asdict(),
        **{name: cost.spread(name)._asdict() for name in Round._fields},
        **{f"{name}_ratio": spread(cost.ratios(name))._asdict() for name in SECONDS},
    }
