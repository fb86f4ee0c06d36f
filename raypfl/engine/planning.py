"""What a run would need, worked out and checked before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.filesize import decimal

from raypfl.clock import VirtualClock, speeds_of
from raypfl.data import Pool
from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.host import ClientHost, Work
from raypfl.engine.hub import Hub, Opening
from raypfl.engine.memory import FLOAT_BYTES, memory_of
from raypfl.engine.messages import take
from raypfl.engine.placement import Node, Placement, attached, connected, named_address, place
from raypfl.engine.world import World, settled_arithmetic, training_device
from raypfl.methods import Method
from raypfl.methods.peers import Peers
from raypfl.training import Network, TrainingConfig

AnyPeers = Peers[Any, Any, Any, Any, Any]


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
        nodes = nodes_of(named_address(engine.address), world.config.storage_path)
        placement = place(world, nodes)
    deal(world, placement.num_hosts)
    return placement, nodes


def nodes_of(address: str | None, storage: str | None = None) -> list[Node]:
    """The nodes of a cluster; with no address that which this process is in, or would start on this machine.

    Raises:
        PlacementError: there is no such cluster.
        StorageError: `storage` is given, and some node does not see it.
    """
    if address is None and not attached():
        return [this_machine()]
    from raypfl.engine.shared_storage import check_seen_by_all

    with connected(address) as found:
        if storage is not None:
            check_seen_by_all(storage)
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
        hub, opening, work = _opened(world, dealt, device)
        memory = memory_of(world, pool, placement, hub, work)
        memory.check(nodes)
        trial = _try_one(world, pool, hub, work)
    down_bytes, up_bytes = int(opening.traffic["bytes"].sum()), trial.up_bytes
    seconds = _round_seconds(world, opening.participants, trial)
    seconds /= placement.num_hosts if config.engine.name == "ray" else 1
    lines = {
        "data": f"{pool.name}, {len(pool.y)} samples of {'x'.join(map(str, world.input_shape))}, "
        f"{decimal(memory.data)} a node",
        "partition": f"{config.partition.name}, {world.num_clients} clients, "
        f"{_range(world)} training samples each, {world.federation.fingerprint[:12]}",
        "model": f"{config.model.name}, {net.num_weights:,} parameters, "
        f"{decimal(net.width * FLOAT_BYTES)} a row{_personal(world, net)}",
        "participants": f"{opening.participants} a round, {config.rounds} rounds",
        "engine": f"{config.engine.name}: {placement.request()}, on {device.type}",
        "blocks": f"{len(world.blocks())} of {world.block} clients, {world.width} models a forward, "
        f"{min(map(len, dealt))} to {max(map(len, dealt))} blocks a host{_idle(world, placement, nodes)}",
        "memory": f"{decimal(memory.total)} in all: {memory}",
        "bytes a round": f"{decimal(down_bytes)} down, {decimal(up_bytes * opening.uploads)} up",
        "time": f"about {seconds:.2g} s of training a round, {seconds * config.rounds / 60:.2g} min in all",
    }
    if config.clock is not None:
        lines["virtual time"] = _clock(world, config.clock, hub.method)
    if isinstance(hub.method, Peers):
        lines |= _topology(world, hub.method)
    width = max(map(len, lines))
    below = "\n" + " " * (width + 4)
    return "\n".join(f"  {name:<{width}}  {text}".replace("\n", below) for name, text in lines.items())


def expected_seconds(world: World, pool: Pool) -> float:
    """Seconds of training in all rounds on one core of this machine, by the first epoch of one client."""
    device = training_device(world.config)
    with settled_arithmetic(world.config.engine.threads):
        hub, opening, work = _opened(world, deal(world, 1), device)
        trial = _try_one(world, pool, hub, work)
    return _round_seconds(world, opening.participants, trial) * world.config.rounds


class _Trial(NamedTuple):
    """One client's first epoch."""

    up_bytes: int
    seconds: float
    samples: int


def _opened(
    world: World, dealt: Sequence[Sequence[int]], device: torch.device
) -> tuple[Hub, Opening, list[Work]]:
    """The first round, opened; of all at once, whatever a clock makes of it."""
    plain = world._replace(config=world.config.model_copy(update={"clock": None}))
    hub = Hub(plain, [ids_of(world, blocks) for blocks in dealt], device)
    return hub, *hub.open(1, train=True, evaluate_pre=False, evaluate_post=False)


def _round_seconds(world: World, participants: int, trial: _Trial) -> float:
    """Seconds of training a round, one client after another."""
    return trial.seconds * participants * _trials(world, trial.samples)


def _trials(world: World, samples: int) -> float:
    """A mean client's work in a round, as a multiple of an epoch of a client with so many samples."""
    method, training = world.method(), world.config.training
    mean = int(world.label_counts.sum(1).mean())
    once = method.passes(_one_epoch(training), samples) * samples
    return method.passes(training, mean) * mean / once


def _one_epoch(training: TrainingConfig) -> TrainingConfig:
    return training.model_copy(update={"epochs": 1, "steps": None})


def _topology(world: World, method: AnyPeers) -> dict[str, str]:
    """Who hears whom, with which weights, and how fast that mixes."""
    from raypfl.topology.describe import describe as described

    sizes = torch.from_numpy(world.label_counts.sum(1))
    told = described(method.topology, world.num_clients, sizes, world.config.seed)
    return {"topology": "\n".join((method.topology.name, *told))}


def _clock(world: World, clock: VirtualClock, method: Method[Any, Any, Any, Any, Any]) -> str:
    """Virtual time: how a round ends, and how fast clients and links are."""
    if clock.mode == "async":
        ends = "no rounds: every peer at its own pace"
    elif clock.order != "jacobi":
        ends = f"peers train one after another ({clock.order})"
    else:
        late = "" if clock.deadline is None else f", uploads after {clock.deadline:g} s are thrown away"
        more = "" if clock.over_selection == 1 else f", {clock.over_selection:g} times as many are selected"
        ends = f"rounds end together{late}{more}"
    sizes = world.label_counts.sum(1)
    passes = np.array([method.passes(world.config.training, int(size)) for size in sizes])
    speeds = speeds_of(clock, passes, sizes, world.config.seed)
    told = [
        f"a local update takes {_span(speeds.compute, 's')}",
        f"a message {_span(speeds.latency, 's')}"
        + ("" if clock.bandwidth is None else f" and {_span(speeds.bandwidth, 'bytes a second')}"),
    ]
    if clock.drop_out:
        told.append(f"{clock.drop_out:.0%} of clients fail in a round")
    return "\n".join((ends, *told))


def _span(values: np.ndarray, unit: str) -> str:
    low, middle, high = (float(value) for value in np.quantile(values, (0, 0.5, 1)))
    return f"{low:g} {unit}" if low == high else f"{low:.3g} to {high:.3g} {unit} (median {middle:.3g})"


def _idle(world: World, placement: Placement, nodes: Sequence[Node]) -> str:
    """What to set where there are fewer blocks than cores, and the number of hosts was left open."""
    engine, cores = world.config.engine, int(sum(node.cpus for node in nodes))
    open_ended = engine.name == "ray" and engine.num_actors is None and engine.clients_per_actor is None
    if not open_ended or placement.host_gpus or placement.num_hosts >= min(cores, world.num_clients):
        return ""
    block = max(1, world.num_clients // cores)
    return f"; engine.block={block} would keep all {cores} cores busy, and move last bits"


def _try_one(world: World, pool: Pool, hub: Hub, work: list[Work]) -> _Trial:
    """Bytes that a participant sends, seconds of its epoch, and its samples; nothing is kept."""
    own = next(own for own in work if len(own.ids))
    block = int(own.ids[0]) // world.block
    once = _one_epoch(world.config.training)
    trial = world._replace(config=world.config.model_copy(update={"training": once}), width=1)
    host = ClientHost(trial, [block], pool.x, pool.y, hub.device)
    first = take(own.down, torch.tensor([0], device=hub.device), hub.method.shared)
    one = own._replace(ids=own.ids[:1], uploads=torch.ones(1, dtype=torch.bool), down=first)
    host.work(one)
    begin = time.perf_counter()
    _, report = host.work(one)
    samples = int(world.label_counts[int(own.ids[0])].sum())
    return _Trial(int(report.traffic["bytes"].sum()), time.perf_counter() - begin, samples)


def _personal(world: World, net: Network) -> str:
    """The clients' own architectures, where they have others."""
    own = zip(world.config.personal_model, net.personal, strict=False)
    texts = [f"{config.name} ({one.num_weights:,})" for config, one in own]
    return f"; personal: {', '.join(texts)}" if texts else ""


def _range(world: World) -> str:
    sizes = world.label_counts.sum(1)
    return str(sizes.min()) if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
