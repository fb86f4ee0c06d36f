"""What a sweep would take: its trials, how many at once, and the time, from rounds that are tried."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq

from raypfl.console import Console
from raypfl.records.folder import RunFolder
from raypfl.settings import RunConfig
from raypfl.sweep.session import Sweep, opened
from raypfl.sweep.summary import text
from raypfl.sweep.trials import Trial, kind_of, one_of_each_kind
from raypfl.workshop import Workshop, pool_key

CALIBRATION_ROUNDS = 2
"""The first of them warms up."""

MOST_CALIBRATED = 6
"""Kinds of trials that are timed; others are taken to cost what the timed ones do on average."""


def plan(config: str | Path, overrides: Sequence[str] = (), *, allow_imports: Collection[str] = ()) -> str:
    """Trials, concurrency and time of a sweep, as text.

    Two rounds of a trial of each kind are run here, in one process, and nothing of them is kept.

    Raises:
        RaypflError: what `raypfl sweep` would refuse.
    """
    sweep = opened(config, overrides, allow_imports)
    sweep.check()
    at_once = sweep.at_once()
    kinds = one_of_each_kind(sweep.examples)
    timed = dict(list(kinds.items())[:MOST_CALIBRATED])
    seconds = {kind: _round_seconds(sweep, trial) for kind, trial in timed.items()}
    average = sum(seconds.values()) / len(seconds)
    each = [seconds.get(kind_of(trial), average) * trial.config.rounds for trial in sweep.examples]
    # No schedule is shorter than its longest trial.
    total = max(sum(each) / len(each) * sweep.total / at_once, max(each))
    seeds = len({trial.seed for trial in sweep.examples})
    lines = {
        "sweep": f"{sweep.config.name}, in {sweep.folder.path}",
        "space": "; ".join(_values(sweep.examples)),
        "trials": f"{sweep.total}: {sweep.total // seeds} points, {seeds} seeds each",
        "chosen": f"on {sweep.on}" + "".join(f", per {key}" for key in sweep.config.select.per),
        "scheduler": sweep.config.scheduler.name,
        "each asks": "; ".join(dict.fromkeys(sweep.ask(trial).request() for trial in kinds.values())),
        "at once": str(at_once),
        "a round": f"{_range(list(seconds.values()))} s, tried with {len(timed)} of {len(kinds)} kinds",
        "a trial": f"{_range(each)} s",
        "time": f"about {timedelta(seconds=math.ceil(total))}"
        + ("" if sweep.config.scheduler.name == "none" else " without early stopping"),
    }
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


def _round_seconds(sweep: Sweep, trial: Trial) -> float:
    """Seconds of a trial's second round, over as many processes as it would have."""
    config = trial.config
    actors = sweep.ask(trial).num_actors or 1
    engine = config.engine.model_copy(update={"name": "local", "num_actors": None, "clients_per_actor": None})
    with tempfile.TemporaryDirectory(prefix="raypfl-plan-") as scratch:
        short = config.model_copy(
            update={
                "engine": engine,
                "rounds": CALIBRATION_ROUNDS,
                "name": "try",
                "storage_path": scratch,
            }
        )
        folder = RunFolder.create(scratch, "try")
        workshop = Workshop(Console())
        _give(sweep, workshop, short)
        workshop.work(folder, short, "try", 1, 1)
        rows = pq.read_table(folder.metrics / "rounds.parquet").to_pylist()
    last = (float(row["round_seconds"]) for row in rows if row["round"] == CALIBRATION_ROUNDS)
    return max(last) / actors


def _give(sweep: Sweep, workshop: Workshop, config: RunConfig) -> None:
    if (which := pool_key(config)) in sweep.pools:
        workshop.give(config, sweep.pools[which])


def _values(trials: Sequence[Trial]) -> list[str]:
    """Each key with its values."""
    values: dict[str, dict[str, None]] = {}
    for trial in trials:
        for key, value in trial.values.items():
            values.setdefault(key, {})[text(value)] = None
    return [
        f"{key} {', '.join(list(found)[:8])}{', ...' if len(found) > 8 else ''}"
        for key, found in values.items()
    ]


def _range(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    return f"{low:.2g}" if high < 1.05 * low else f"{low:.2g} to {high:.2g}"
