"""What can be known to fail of a study, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.filesize import decimal

from raypfl import data
from raypfl.data import Federation, Pool
from raypfl.engine.memory import FLOAT_BYTES, PROCESS_BYTES
from raypfl.engine.placement import Node, Placement
from raypfl.engine.planning import settle
from raypfl.engine.world import World, make_world
from raypfl.errors import ConfigError, PlacementError, RaypflError
from raypfl.scaling.config import Point

MOST_SAID = 6
"""Points that a message names."""


def check(points: Iterable[Point]) -> None:
    """Refuse points whose data, actors or models do not fit.

    Raises:
        ConfigError: with a line for each point that cannot be measured, and why.
    """
    datasets = _Datasets()
    wrong = []
    for point in points:
        try:
            _check(point, datasets)
        except RaypflError as error:
            wrong.append(f"    {point.study}, {point.settings}: {error}")
    if wrong:
        more = [f"    and {len(wrong) - MOST_SAID} more"] if len(wrong) > MOST_SAID else []
        listed = "\n".join([*wrong[:MOST_SAID], *more])
        raise ConfigError(
            f"{len(wrong)} point(s) of the study cannot be measured, so nothing was started:\n{listed}"
        )


class _Datasets:
    """The last data set and the last partition of it: points next to one another mostly share them."""

    def __init__(self) -> None:
        self._pool: tuple[str, Pool] | None = None
        self._federation: tuple[str, Federation] | None = None

    def of(self, point: Point) -> tuple[Pool, Federation]:
        config = point.config
        which = f"{config.data.model_dump_json()}/{config.seed}"
        if self._pool is None or self._pool[0] != which:
            self._pool, self._federation = (which, data.load(config.data, config.seed)), None
        pool = self._pool[1]
        dealt = config.partition.model_dump_json()
        if self._federation is None or self._federation[0] != dealt:
            self._federation = dealt, data.partition(config.partition, pool, config.seed)
        return pool, self._federation[1]


def _check(point: Point, datasets: _Datasets) -> None:
    config = point.config
    if point.measure == "costs" and config.engine.name != "local":
        raise ConfigError(
            f"engine.name = {config.engine.name}: costs are counted in one process. Set engine.name=local "
            "for this study."
        )
    pool, federation = datasets.of(point)
    world = make_world(config, pool, federation)
    placement, nodes = settle(world)
    _check_memory(world, pool, placement, nodes)


def _check_memory(world: World, pool: Pool, placement: Placement, nodes: list[Node]) -> None:
    """By what the run needs at least: rows at clients and server, a round's messages, data, processes."""
    cpu = torch.device("cpu")
    net, method, clients = world.network(cpu), world.method(), world.clients(cpu)
    one = method.init_state(net, clients.take(torch.tensor([0])))
    kept = world.num_clients * sum(field.nbytes for field in one)
    participants = world.config.participation.participants(world.num_clients)
    messages = 2 * participants * net.width * FLOAT_BYTES
    processes = 1 if world.config.engine.name == "local" else 1 + placement.num_servers + placement.num_hosts
    least = kept + messages + pool.x.nbytes + pool.y.nbytes + processes * PROCESS_BYTES
    have = sum(node.memory_bytes for node in nodes)
    if least > have > 0:
        raise PlacementError(
            f"needs at least {decimal(least)} of memory, and there are {decimal(int(have))}: "
            f"{decimal(kept)} kept by {world.num_clients} clients, {decimal(messages)} messages of "
            f"{participants} participants, {decimal(pool.x.nbytes)} data, {processes} x "
            f"{decimal(PROCESS_BYTES)} processes. Use fewer clients, a smaller model or fewer participants."
        )
