"""What a run would need, worked out and checked before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.filesize import decimal

from raypfl.data import Pool
from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.host import ClientHost, Work
from raypfl.engine.hub import Hub
from raypfl.engine.messages import take
from raypfl.engine.placement import Node, Placement, connected, place
from raypfl.engine.world import World, settled_arithmetic, training_device
from raypfl.errors import PlacementError

FLOAT_BYTES = 4
WORKING_ROWS = 8
"""Rows a model in training takes: weights, gradient, two moments, and the copies of a step."""
PROCESS_BYTES = 400 * 2**20
"""A Python process with torch in it, before it holds any data."""


class Memory(NamedTuple):
    """What a run would hold at once, in bytes."""

    row: int
    """A client's model."""
    hosts: int
    states: int
    """What clients keep, of the host with most of them."""
    working: int
    """Models in training at a host."""
    heard: int
    """What a round's participants at one host receive, of the host that receives most."""
    server: int
    sending: int
    """What the server has prepared for a round's participants, and their uploads."""
    data: int
    processes: int

    @property
    def total(self) -> int:
        """All of it."""
        host = self.states + self.working + self.heard
        return self.hosts * host + self.server + self.sending + self.data + self.processes * PROCESS_BYTES

    def __str__(self) -> str:
        host = self.states + self.working + self.heard
        return (
            f"{self.hosts} x {decimal(host)} hosts ({decimal(self.states)} kept by clients, "
            f"{decimal(self.working)} in training, {decimal(self.heard)} received), "
            f"{decimal(self.server)} server, {decimal(self.sending)} of its messages, "
            f"{decimal(self.data)} data, {self.processes} x {decimal(PROCESS_BYTES)} processes"
        )


def this_machine() -> Node:
    """What Ray would find here."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Node(len(os.sched_getaffinity(0)), torch.cuda.device_count(), memory)


def settle(world: World) -> tuple[Placement, list[Node]]:
    """The placement, checked against the cluster that the run would use."""
    engine = world.config.engine
    training_device(world.config)
    if engine.name == "local":
        placement, nodes = Placement(engine.num_actors or 1, 1, 0, 0, 0), [this_machine()]
    else:
        nodes = _nodes(engine.address or os.environ.get("RAY_ADDRESS"))
        placement = place(world, nodes)
    deal(world, placement.num_hosts)
    return placement, nodes


def _nodes(address: str | None) -> list[Node]:
    if address is None:
        return [this_machine()]
    with connected(address) as found:
        return found


def describe(world: World, pool: Pool) -> str:
    """Actors, memory, bytes and time, as text.

    Bytes are the method's own messages of a first round, and the time is that of one client's first epoch,
    so one client is trained for a moment.

    Raises:
        PlacementError: actors or memory do not fit, with the arithmetic.
    """
    placement, nodes = settle(world)
    dealt = deal(world, placement.num_hosts)
    config = world.config
    device = training_device(config)
    with settled_arithmetic(config.engine.threads):
        net = world.network(device)
        hub = Hub(world, [ids_of(world, blocks) for blocks in dealt], device)
        opening, work = hub.open(1, train=True, evaluate_pre=False, evaluate_post=False)
        memory = _memory(world, pool, placement, hub, work)
        _check_memory(memory, nodes)
        up_bytes, epoch_seconds, samples = _try_one(world, pool, hub, work)
    down_bytes = int(opening.traffic["bytes"].sum())
    per_epoch = float(world.label_counts.sum(1).mean()) / samples * epoch_seconds
    at_once = placement.num_hosts if config.engine.name == "ray" else 1
    seconds = per_epoch * config.training.epochs * opening.participants / at_once
    lines = {
        "data": f"{pool.name}, {len(pool.y)} samples of {'x'.join(map(str, world.input_shape))}, "
        f"{decimal(memory.data)} a node",
        "partition": f"{config.partition.name}, {world.num_clients} clients, "
        f"{_range(world)} training samples each, {world.federation.fingerprint[:12]}",
        "model": f"{config.model.name}, {net.num_weights:,} parameters, {decimal(memory.row)} a row",
        "participants": f"{opening.participants} a round, {config.rounds} rounds",
        "engine": f"{config.engine.name}: {placement.request()}, on {device.type}",
        "blocks": f"{len(world.blocks())} of {world.block} clients, {world.width} models a forward, "
        f"{min(map(len, dealt))} to {max(map(len, dealt))} blocks a host{_idle(world, placement, nodes)}",
        "memory": f"{decimal(memory.total)} in all: {memory}",
        "bytes a round": f"{decimal(down_bytes)} down, {decimal(up_bytes * opening.participants)} up",
        "time": f"about {seconds:.2g} s of training a round, {seconds * config.rounds / 60:.2g} min in all",
    }
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())


def _memory(world: World, pool: Pool, placement: Placement, hub: Hub, work: Sequence[Work]) -> Memory:
    """By the arithmetic of the state and messages that the method declares, in its first round."""
    net, config = hub.net, world.config
    row = net.width * FLOAT_BYTES
    one = hub.method.init_state(net, hub.clients.take(torch.tensor([0], device=hub.device)))
    state = _bytes(one)
    if config.training.keeps_momentum:
        state += net.num_weights * FLOAT_BYTES
    together = hub.method.download(net, hub.hub, hub.plan)
    return Memory(
        row=row,
        hosts=len(work),
        # A round's new rows stand beside the old ones, which stay until every client has done its work.
        states=2 * max(map(len, hub.dealt)) * state,
        working=world.width * WORKING_ROWS * row,
        heard=max(_bytes(own.down) for own in work),
        server=_bytes(hub.hub),
        sending=_bytes(together) + len(hub.plan.ids) * row,
        data=pool.x.nbytes + pool.y.nbytes,
        processes=1 if config.engine.name == "local" else 2 + placement.num_hosts,
    )


def _bytes(message: tuple[torch.Tensor, ...]) -> int:
    return sum(field.nbytes for field in message)


def _idle(world: World, placement: Placement, nodes: Sequence[Node]) -> str:
    """What to set where there are fewer blocks than cores, and the number of hosts was left open."""
    engine, cores = world.config.engine, int(sum(node.cpus for node in nodes))
    open_ended = engine.name == "ray" and engine.num_actors is None and engine.clients_per_actor is None
    if not open_ended or placement.host_gpus or placement.num_hosts >= min(cores, world.num_clients):
        return ""
    block = max(1, world.num_clients // cores)
    return f"; engine.block={block} would keep all {cores} cores busy, and move last bits"


def _try_one(world: World, pool: Pool, hub: Hub, work: list[Work]) -> tuple[int, float, int]:
    """Bytes that a participant sends, seconds of its epoch, and its samples; nothing is kept."""
    own = next(own for own in work if len(own.ids))
    block = int(own.ids[0]) // world.block
    once = world.config.training.model_copy(update={"epochs": 1})
    trial = world._replace(config=world.config.model_copy(update={"training": once}), width=1)
    host = ClientHost(trial, [block], pool.x, pool.y, hub.device)
    first = take(own.down, torch.tensor([0], device=hub.device), hub.method.shared)
    one = own._replace(ids=own.ids[:1], down=first)
    host.work(one)
    begin = time.perf_counter()
    _, report = host.work(one)
    samples = int(world.label_counts[int(own.ids[0])].sum())
    return int(report.traffic["bytes"].sum()), time.perf_counter() - begin, samples


def _range(world: World) -> str:
    sizes = world.label_counts.sum(1)
    return str(sizes.min()) if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"


def _check_memory(memory: Memory, nodes: list[Node]) -> None:
    have = sum(node.memory_bytes for node in nodes)
    if memory.total > have > 0:
        raise PlacementError(
            f"the run needs about {decimal(memory.total)} of memory, and the {len(nodes)} node(s) have "
            f"{decimal(int(have))}: {memory}. "
            "Use fewer clients, a smaller model or more nodes."
        )
