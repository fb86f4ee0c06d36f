"""How many hosts, what each asks for, and whether it fits: settled before anything starts."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from raypfl.engine.world import World
from raypfl.errors import PlacementError

KNOCK_SECONDS = 10.0
"""How long the head of a cluster may take to accept a connection."""


HostsPlace = Literal["any", "pack", "spread"]
ServerPlace = Literal["any", "beside", "apart"]


@dataclass(frozen=True)
class Node:
    """What one machine of a cluster has, or one bundle of a placement group."""

    cpus: float
    gpus: float
    memory_bytes: float
    id: str = ""
    """Ray's name of the node; empty where it is not one that actors can be sent to."""


@dataclass(frozen=True)
class Placement:
    """What a run asks of Ray."""

    num_hosts: int
    host_cpus: float
    host_gpus: float
    server_cpus: float
    server_gpus: float
    num_servers: int = 1
    hosts: HostsPlace = "any"
    server: ServerPlace = "any"

    def request(self) -> str:
        """In words."""
        host, server = (
            _resources(self.host_cpus, self.host_gpus),
            _resources(self.server_cpus, self.server_gpus),
        )
        where = {"any": "", "beside": " beside a host", "apart": " on a node without hosts"}[self.server]
        servers = f"a server with {server}{where}"
        if self.num_servers > 1:
            servers = f"{self.num_servers} servers with {server} each"
        return f"{self.num_hosts} client hosts with {host} each, and {servers}"


def place(world: World, nodes: Sequence[Node]) -> Placement:
    """Settle the number of hosts and check that all actors fit.

    `engine.num_actors` or `engine.clients_per_actor` if given; else one host a GPU share where hosts ask for
    GPUs, and one a core elsewhere, but no more than there are blocks.

    Raises:
        PlacementError: with the arithmetic of what does not fit.
    """
    engine, wanted = world.config.engine, world.config.resources
    one = Placement(
        1,
        wanted.num_cpus_per_actor,
        wanted.num_gpus_per_actor,
        wanted.num_cpus_server,
        wanted.num_gpus_server,
        world.config.server.sharding,
        hosts=wanted.hosts,
        server=wanted.server,
    )
    room = _room(one, nodes)
    if engine.num_actors is not None:
        num_hosts = engine.num_actors
    elif engine.clients_per_actor is not None:
        num_hosts = math.ceil(world.num_clients / engine.clients_per_actor)
    else:
        cores = sum(node.cpus for node in nodes)
        blocks = math.ceil(world.num_clients / world.block)
        num_hosts = max(1, int(min(cores if math.isinf(room) else room, blocks)))
    placement = replace(one, num_hosts=num_hosts)
    if num_hosts > room:
        servers = "server.sharding, " if placement.num_servers > 1 else ""
        raise PlacementError(
            f"the run asks for {placement.request()}. {_arithmetic(placement, nodes)} Lower {servers}"
            "engine.num_actors, resources.num_cpus_per_actor or resources.num_gpus_per_actor, or add nodes."
        )
    return placement


def fewer(placement: Placement, nodes: Sequence[Node]) -> Placement:
    """The placement with as many hosts as fit, at least one; no result depends on their number."""
    room = _room(placement, nodes)
    return replace(placement, num_hosts=max(1, int(min(placement.num_hosts, room))))


def _room(ask: Placement, nodes: Sequence[Node]) -> float:
    """Hosts that fit all nodes, the servers where they leave most room; 0 if these do not fit."""
    if ask.num_servers == 1:
        return max((room for _, room in _room_by_server(ask, nodes)), default=0)
    # Most hosts with so many servers on the nodes so far.
    most = [0.0] + [-math.inf] * ask.num_servers
    for node in nodes:
        here = [_hosts_on(node, ask, servers) for servers in range(len(most))]
        most = [
            max(most[servers - own] + here[own] for own in range(servers + 1)) for servers in range(len(most))
        ]
    return max(0.0, most[-1])


def node_of_server(ask: Placement, nodes: Sequence[Node]) -> Node | None:
    """The node on which the server leaves most room for hosts; None if it fits nowhere."""
    rooms = list(_room_by_server(ask, nodes))
    return max(rooms, key=lambda found: found[1])[0] if rooms else None


def _room_by_server(ask: Placement, nodes: Sequence[Node]) -> Iterator[tuple[Node, float]]:
    """Each node that the server may be on, with the hosts that then fit all nodes."""
    alone = [_hosts_on(node, ask) for node in nodes]
    for number, node in enumerate(nodes):
        beside = _hosts_on(node, ask, servers=1)
        if beside < 0 or (ask.server == "beside" and beside < 1):
            continue
        here = 0 if ask.server == "apart" else beside
        yield node, sum(alone[:number]) + here + sum(alone[number + 1 :])


def _hosts_on(node: Node, ask: Placement, servers: int = 0) -> float:
    """Hosts that fit a node beside so many servers; infinitely many if they ask for nothing.

    Shares of a GPU do not add up over GPUs: floor(1 / share) hosts fit each, and floor(rest / share) one that
    servers have shares of.

    Returns:
        Their number; less than any if the servers do not fit.
    """
    cpus = node.cpus - servers * ask.server_cpus
    gpus = _gpus_beside(node.gpus, [ask.server_gpus] * servers)
    if _floor(cpus) < 0 or gpus is None:
        return -math.inf
    by_cpu = math.inf if ask.host_cpus == 0 else _floor(cpus / ask.host_cpus)
    if ask.host_gpus == 0:
        return by_cpu
    if ask.host_gpus >= 1:
        return min(by_cpu, _floor(gpus.count(1.0) / ask.host_gpus))
    return min(by_cpu, sum(_floor(free / ask.host_gpus) for free in gpus))


def _gpus_beside(gpus: float, shares: Sequence[float]) -> list[float] | None:
    """What is free of each GPU of a node beside shares of them, each on the fullest one with room for it.

    None if they do not fit.
    """
    free = [1.0] * _floor(gpus)
    if gpus > len(free):
        # A bundle of a placement group may have a part of one.
        free.append(gpus - len(free))
    for share in shares:
        each = min(share, 1.0)
        for _ in range(math.ceil(share)):
            able = [number for number, own in enumerate(free) if own >= each - 1e-9]
            if not able:
                return None
            free[min(able, key=free.__getitem__)] -= each
    return free


def _floor(quotient: float) -> int:
    # 1 / (1 / 93) is 92.99999999999999 in binary, and means 93.
    return math.floor(quotient + 1e-9)


def _arithmetic(placement: Placement, nodes: Sequence[Node]) -> str:
    share = placement.host_gpus
    rule = f" (floor(1 / {share:g}) = {_floor(1 / share)} a GPU)" if 0 < share < 1 else ""
    parts = [
        f"a node with {_resources(node.cpus, node.gpus)} has room for {_hosts_on(node, placement):g} of them"
        for node in nodes
    ]
    server = ""
    if placement.server == "apart":
        server = f", and without the server's node there is room for {_room(placement, nodes):g}"
    elif placement.server_cpus or placement.server_gpus:
        them = "the server" if placement.num_servers == 1 else f"the {placement.num_servers} servers"
        server = f", and beside {them} there is room for {_room(placement, nodes):g}"
    return f"But {'; '.join(parts)}{rule}{server}."


def _resources(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU and {gpus:g} GPU" if gpus else f"{cpus:g} CPU"


@contextmanager
def connected(address: str | None, num_cpus: int | None = None) -> Iterator[list[Node]]:
    """A Ray cluster: one this process is connected to, the one at `address` or RAY_ADDRESS, or a local one.

    Only a local cluster that was started here is shut down again.

    Raises:
        PlacementError: no cluster answers at `address`, or none could be started.
    """
    import ray

    if attached():
        yield nodes_alive()
        return
    address = named_address(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "address": "local"}
    else:
        _knock(address)
        options |= {"address": address}
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no type of its own for a start that took too long.
        where = "on this machine" if address is None else f"at {address}"
        raise PlacementError(
            f"no Ray cluster {where}: {error}\nOn a busy machine try again; engine.name=local needs no Ray."
        ) from error
    try:
        yield nodes_alive()
    finally:
        ray.shutdown()


def named_address(configured: str | None) -> str | None:
    """The cluster that is to be joined: the configured one, or that of RAY_ADDRESS; None: one of our own."""
    return configured or os.environ.get("RAY_ADDRESS") or None


def attached() -> bool:
    """Whether this process is connected to a cluster already, as a task, an actor or a program that is."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _knock(address: str) -> None:
    """Fail at once where nobody answers: Ray itself tries for more than two minutes."""
    if address.startswith(("http://", "https://")):
        raise PlacementError(
            f"{address} is the address of a dashboard, which takes jobs: cluster/submit --address {address} "
            "CONFIG. A run joins a cluster from one of its nodes, by HOST:6379 or auto (engine.address, "
            "RAY_ADDRESS)."
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except OSError as error:
        raise PlacementError(
            f"no Ray cluster answers at {address} ({error}). Check engine.address and RAY_ADDRESS; without "
            "them a cluster is started on this machine."
        ) from None


def nodes_alive() -> list[Node]:
    """The nodes there are, or the bundles of the placement group that this process is in."""
    import ray
    from ray.util.placement_group import get_current_placement_group

    group = get_current_placement_group()
    if group is not None:
        bundles = [dict(bundle) for bundle in group.bundle_specs]
        # Whoever makes a group puts itself into its first bundle, as Ray Tune does.
        context = ray.get_runtime_context()
        own: dict[str, float] = context.get_assigned_resources()  # type: ignore[no-untyped-call]
        for name, amount in own.items():
            bundles[0][name] = bundles[0].get(name, 0) - amount
        return [_node(bundle) for bundle in bundles]
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [_node(node["Resources"], node["NodeID"]) for node in found if node["Alive"]]


def _node(has: dict[str, float], id: str = "") -> Node:
    return Node(has.get("CPU", 0), has.get("GPU", 0), has.get("memory", 0), id)
