"""How many hosts, what each asks for, and whether it fits: settled before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raypfl.engine.world import World
from raypfl.errors import PlacementError


@dataclass(frozen=True)
class Node:
    """What one machine of a cluster has."""

    cpus: float
    gpus: float
    memory_bytes: float


@dataclass(frozen=True)
class Placement:
    """What a run asks of Ray."""

    num_hosts: int
    host_cpus: float
    host_gpus: float
    server_cpus: float
    server_gpus: float

    def request(self) -> str:
        """In words."""
        host, server = (
            _resources(self.host_cpus, self.host_gpus),
            _resources(self.server_cpus, self.server_gpus),
        )
        return f"{self.num_hosts} client hosts with {host} each, and a server with {server}"


def place(world: World, nodes: list[Node]) -> Placement:
    """Settle the number of hosts and check that all actors fit.

    `engine.num_actors` or `engine.clients_per_actor` if given; else one host a GPU share where hosts ask for
    GPUs, and one a core elsewhere, but no more than there are blocks.

    Raises:
        PlacementError: with the arithmetic of what does not fit.
    """
    engine, wanted = world.config.engine, world.config.resources
    room = sum(_hosts_on(node, wanted.num_cpus_per_actor, wanted.num_gpus_per_actor) for node in nodes)
    blocks = math.ceil(world.num_clients / world.block)
    if engine.num_actors is not None:
        num_hosts = engine.num_actors
    elif engine.clients_per_actor is not None:
        num_hosts = math.ceil(world.num_clients / engine.clients_per_actor)
    else:
        num_hosts = max(1, min(room, blocks))
    placement = Placement(
        num_hosts,
        wanted.num_cpus_per_actor,
        wanted.num_gpus_per_actor,
        wanted.num_cpus_server,
        wanted.num_gpus_server,
    )
    if not _fits(placement, nodes):
        raise PlacementError(
            f"the run asks for {placement.request()}. {_arithmetic(placement, nodes)} Lower engine.num_actors, "
            "resources.num_cpus_per_actor or resources.num_gpus_per_actor, or add nodes."
        )
    return placement


def _fits(placement: Placement, nodes: list[Node]) -> bool:
    """Whether some node has room for the server and all nodes together for the hosts."""
    total = [_hosts_on(node, placement.host_cpus, placement.host_gpus) for node in nodes]
    for number, node in enumerate(nodes):
        left = Node(node.cpus - placement.server_cpus, node.gpus - placement.server_gpus, node.memory_bytes)
        if left.cpus < 0 or left.gpus < 0:
            continue
        beside = _hosts_on(left, placement.host_cpus, placement.host_gpus)
        if sum(total) - total[number] + beside >= placement.num_hosts:
            return True
    return False


def _hosts_on(node: Node, cpus: float, gpus: float) -> int:
    """Hosts that fit a node. Shares of a GPU do not add up over GPUs: floor(1 / share) on each."""
    by_cpu = math.inf if cpus == 0 else math.floor(node.cpus / cpus + 1e-9)
    if gpus == 0:
        by_gpu = math.inf
    elif gpus < 1:
        by_gpu = math.floor(node.gpus + 1e-9) * math.floor(1 / gpus + 1e-9)
    else:
        by_gpu = math.floor(node.gpus / gpus + 1e-9)
    least = min(by_cpu, by_gpu)
    return int(node.cpus) or 1 if math.isinf(least) else int(least)


def _arithmetic(placement: Placement, nodes: list[Node]) -> str:
    parts = []
    for node in nodes:
        fit = _hosts_on(node, placement.host_cpus, placement.host_gpus)
        parts.append(f"a node with {_resources(node.cpus, node.gpus)} has room for {fit} hosts")
    share = placement.host_gpus
    rule = f" (floor(1 / {share:g}) = {math.floor(1 / share + 1e-9)} a GPU)" if 0 < share < 1 else ""
    return f"But {'; '.join(parts)}{rule}."


def _resources(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU and {gpus:g} GPU" if gpus else f"{cpus:g} CPU"


@contextmanager
def connected(address: str | None, num_cpus: int | None = None) -> Iterator[list[Node]]:
    """A Ray cluster: the one at `address` or RAY_ADDRESS, one this process is connected to, or a local one.

    Only a local cluster that was started here is shut down again.
    """
    import ray

    if ray.is_initialized():
        yield _nodes()
        return
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "address": "local"}
    else:
        options |= {"address": address}
    ray.init(**options)
    try:
        yield _nodes()
    finally:
        ray.shutdown()


def _nodes() -> list[Node]:
    import ray

    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(has.get("CPU", 0), has.get("GPU", 0), has.get("memory", 0)) for has in found]
