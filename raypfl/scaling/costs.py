"""What a client's update costs beside the server's part of a round: by formula, counted, and in seconds.

Table VIII of DiversiFed (arXiv 2407.15464) has, for each data set and number of clients, flops of a client
(three times its forward passes, the backward pass counted as two) and of the server. Its server column is
`3/2 m^2 P` to the last printed digit: half of all pairs, three flops for each of their coordinates
(difference, square, sum). That leaves the combination of models out. Here both are also counted as they are
done, by torch's counter, which knows matrix products and convolutions and leaves element-wise work out: a
Gram matrix, a combination and the mean row, `4 m^2 P + 2 m P` for DiversiFed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from raypfl.engine.host import ClientHost, Work
from raypfl.engine.local import LocalEngine
from raypfl.engine.messages import take
from raypfl.engine.world import World, settled_arithmetic, training_device
from raypfl.scaling.measure import Measured, Progress, Protocol, facts_of, rounds_of, world_of
from raypfl.settings import RunConfig

SERVER_FORMULAS: dict[str, Callable[[int, int], float]] = {"diversifed": lambda m, p: 1.5 * m * m * p}
"""Flops of the server by the papers' own counting, from participants and parameters."""

BACKWARD = 2.0
"""Flops of a backward pass, in forward passes, as the paper counts."""


def measure_costs(config: RunConfig, protocol: Protocol, progress: Progress = lambda _: None) -> Measured:
    """One client's update in full; and the server, in rounds in which every client does one small step.

    How much clients train changes nothing for the server.

    Raises:
        RaypflError: the run cannot be started, or a client fails.
    """
    world, pool = world_of(config)
    once = config.training.model_copy(update={"epochs": 1, "steps": 1, "batch_size": 2})
    short = world._replace(config=config.model_copy(update={"training": once}))
    with closing(LocalEngine(short, pool)) as engine:
        rows = list(rounds_of(engine, short, protocol, progress))
        server_flops, work = _server(engine, protocol.warm_up + len(rows) + 1)
    with settled_arithmetic(config.engine.threads):
        client = _client(world, pool, work, protocol)
    progress("client")
    formula = SERVER_FORMULAS.get(config.method.name)
    facts = facts_of(world, 1)
    costs = {**client, "server_flops": server_flops}
    if formula is not None:
        costs["server_flops_formula"] = formula(facts["participants"], facts["parameters"])
    return Measured({**facts, **costs}, rows)


def _server(engine: LocalEngine, round: int) -> tuple[int, Work]:
    """Flops of the server in one more round, and what its first host was asked to do."""
    hub = engine.hub
    with _counter() as opening:
        _, work = hub.open(round, train=True, evaluate_pre=False, evaluate_post=False)
    uploads = [upload for host, own in zip(engine.hosts, work, strict=True) for upload in host.work(own)[0]]
    with _counter() as ending:
        hub.close(uploads)
    flops = opening.get_total_flops() + ending.get_total_flops()
    return flops, next(own for own in work if len(own.ids))


def _client(world: World, pool: Any, work: Work, protocol: Protocol) -> dict[str, float]:
    """Flops and seconds of the update of one participant."""
    device = training_device(world.config)
    first = take(work.down, torch.tensor([0], device=device), world.method().shared)
    one = work._replace(ids=work.ids[:1], uploads=torch.ones(1, dtype=torch.bool), down=first)
    block = int(one.ids[0]) // world.block
    alone = world._replace(width=1, phases=False)

    with _counter() as counter:
        ClientHost(alone, [block], pool.x, pool.y, device).work(one)
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    while len(seconds) < protocol.rounds and sum(seconds) <= protocol.seconds:
        host = ClientHost(alone, [block], pool.x, pool.y, device)
        begin = time.perf_counter(), time.process_time()
        host.work(one)
        seconds.append(time.perf_counter() - begin[0])
        cpu_seconds.append(time.process_time() - begin[1])
    samples = int(world.label_counts[int(one.ids[0])].sum())
    passes = world.method().passes(world.config.training, samples)
    return {
        "client_flops": counter.get_total_flops(),
        "client_flops_formula": (1.0 + BACKWARD) * _forward(world, pool) * samples * passes,
        "client_seconds": median(seconds),
        "client_cpu_seconds": median(cpu_seconds),
    }


def _forward(world: World, pool: Any) -> int:
    """Flops of one sample's way through the network."""
    net = world.network(torch.device("cpu"))
    with torch.no_grad(), _counter() as counter:
        net.bind(net.draw(0))(torch.tensor(pool.x[:1])[None])
    return int(counter.get_total_flops())


def _counter() -> FlopCounterMode:
    # torch's registry knows addmm, and not the form that writes to its first argument.
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})


def _addmm_flops(
    out: Sequence[int], left: Sequence[int], right: Sequence[int], *_: object, **__: object
) -> int:
    """Of a product, from the shapes of its arguments."""
    return 2 * left[0] * left[1] * right[1]
