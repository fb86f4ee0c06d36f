"""One point: rounds of one configuration, timed; nothing is evaluated and no folder is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from raypfl import data
from raypfl.data import Pool
from raypfl.engine.contract import Engine, RoundReport
from raypfl.engine.local import LocalEngine
from raypfl.engine.phases import PHASES
from raypfl.engine.placement import connected, place
from raypfl.engine.world import World, make_world, training_device
from raypfl.settings import RunConfig

COUNTING = "counting"
"""What `progress` is told when the warm-up is over."""

Progress = Callable[[str], None]


class Protocol(NamedTuple):
    """How many rounds are timed."""

    warm_up: int
    rounds: int
    """At most so many count."""
    seconds: float
    """No further round is begun after so many seconds of them."""


class Measured(NamedTuple):
    """One point, in plain types."""

    facts: dict[str, Any]
    """What does not change from round to round, by column."""
    rounds: list[dict[str, float]]
    """One row a counted round."""


def world_of(config: RunConfig) -> tuple[World, Pool]:
    """The run of a configuration, with the server's seconds split, and its data."""
    pool = data.load(config.data, config.seed)
    federation = data.partition(config.partition, pool, config.seed)
    return make_world(config, pool, federation)._replace(phases=True), pool


def measure_rounds(config: RunConfig, protocol: Protocol, progress: Progress = lambda _: None) -> Measured:
    """Warm up, then time rounds of training and aggregation.

    Raises:
        RaypflError: the run cannot be started, or a client fails.
    """
    world, pool = world_of(config)
    begin = time.perf_counter()
    with engine_of(world, pool) as (engine, num_hosts):
        start_seconds = time.perf_counter() - begin
        rows = list(rounds_of(engine, world, protocol, progress))
    return Measured({**facts_of(world, num_hosts), "start_seconds": start_seconds}, rows)


def facts_of(world: World, num_hosts: int) -> dict[str, Any]:
    """Sizes and settings of a run, by column."""
    config = world.config
    resources = config.resources
    ray = config.engine.name == "ray"
    return {
        "method": config.method.name,
        "data": config.data.name,
        "model": config.model.name,
        "clients": world.num_clients,
        "participants": config.participation.participants(world.num_clients),
        "parameters": world.network(torch.device("cpu")).num_weights,
        "engine": config.engine.name,
        "hosts": num_hosts,
        "servers": config.server.sharding,
        "gpus_per_host": resources.num_gpus_per_actor if ray else 0.0,
        "device": training_device(config).type,
        "block": world.block,
        "width": world.width,
        "threads": config.engine.threads,
    }


@contextmanager
def engine_of(world: World, pool: Pool) -> Iterator[tuple[Engine, int]]:
    """The engine that the configuration asks for, and its number of hosts."""
    engine: Engine
    with ExitStack() as stack:
        if world.config.engine.name == "local":
            local = LocalEngine(world, pool)
            engine, num_hosts = local, len(local.hosts)
        else:
            # Only here, so that everything else works where Ray is not installed.
            from raypfl.engine.ray import Crew, RayEngine, share

            placement = place(world, stack.enter_context(connected(world.config.engine.address)))
            crew = stack.enter_context(closing(Crew(placement)))
            engine, num_hosts = RayEngine(world, share(pool), crew), placement.num_hosts
        yield stack.enter_context(closing(engine)), num_hosts


def rounds_of(
    engine: Engine, world: World, protocol: Protocol, progress: Progress
) -> Iterator[dict[str, float]]:
    """Warm up, then one row by column for each round that counts."""
    steps_N = _steps(world)
    for round in range(1, protocol.warm_up + 1):
        engine.round(round, evaluate_pre=False, evaluate_post=False)
        progress(f"warm-up {round}/{protocol.warm_up}")
    progress(COUNTING)
    begin = time.perf_counter()
    for number in range(1, protocol.rounds + 1):
        since = time.perf_counter()
        report = engine.round(protocol.warm_up + number, evaluate_pre=False, evaluate_post=False)
        seconds = time.perf_counter() - since
        yield {"round": protocol.warm_up + number, "seconds": seconds, **_row(report, steps_N)}
        progress(f"round {number}/{protocol.rounds}, {seconds:.3g} s")
        if time.perf_counter() - begin > protocol.seconds:
            return


def _row(report: RoundReport, steps_N: np.ndarray) -> dict[str, float]:
    trained = [block["client"] for block in report.clients if block["split"] == "train"]
    ids = np.concatenate([np.atleast_1d(own) for own in trained]) if trained else np.empty(0, np.int64)
    bytes_of = [block["bytes"][block["src"] >= 0].sum() for block in report.traffic]
    received = [block["bytes"][block["dst"] >= 0].sum() for block in report.traffic]
    spent = report.server_phases or {}
    return {
        "trained": len(ids),
        "client_steps": float(steps_N[ids].sum()),
        "work_seconds": report.work_seconds,
        "server_seconds": report.server_seconds,
        "server_cpu_seconds": sum(own.cpu_seconds for own in spent.values()),
        **{f"{name}_seconds": spent[name].seconds if name in spent else 0.0 for name in PHASES},
        **{f"{name}_cpu_seconds": spent[name].cpu_seconds if name in spent else 0.0 for name in PHASES},
        "upload_bytes": float(sum(bytes_of)),
        "download_bytes": float(sum(received)),
    }


def _steps(world: World) -> np.ndarray:
    """Batches that each client trains on in one local update, float64 `[N]`."""
    training, method = world.config.training, world.method()
    sizes_N = world.label_counts.sum(1)
    batches_N = np.ceil(sizes_N / training.batch_size)
    passes_N = np.array([method.passes(training, int(size)) for size in sizes_N])
    steps_N: np.ndarray = passes_N * batches_N
    return steps_N
