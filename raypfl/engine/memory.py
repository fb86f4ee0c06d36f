"""What a run would hold in memory at once, by the arithmetic of what its method declares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.filesize import decimal

from raypfl.data import Pool
from raypfl.engine.columns import CHUNK_ENTRIES
from raypfl.engine.host import Work
from raypfl.engine.hub import Hub
from raypfl.engine.placement import Node, Placement
from raypfl.engine.world import World
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
    """What clients keep, of the host with most of them, and what its participants will keep instead."""
    working: int
    """Models in training at a host."""
    heard: int
    """What a round's participants at one host receive, of the host that receives most."""
    servers: int
    server: int
    """What all servers keep."""
    step: int
    """What one server works on beside it when it takes in uploads."""
    sending: int
    """What the server has prepared for a round's participants, and their uploads, on their way."""
    data: int
    """The data set, on each node."""
    processes: int
    by_columns: bool
    """Whether more servers could hold what one does."""

    @property
    def host(self) -> int:
        """All that one host holds."""
        return self.states + self.working + self.heard

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.hosts * self.host
            + self.server
            + self.servers * self.step
            + self.sending
            + self.data
            + self.processes * PROCESS_BYTES
        )

    def __str__(self) -> str:
        servers = f", held by {self.servers}" if self.servers > 1 else ""
        return (
            f"{self.hosts} x {decimal(self.host)} hosts ({decimal(self.states)} kept by clients, "
            f"{decimal(self.working)} in training, {decimal(self.heard)} received), "
            f"{decimal(self.server)} server{servers}, {decimal(self.servers * self.step)} in its step, "
            f"{decimal(self.sending)} messages, "
            f"{decimal(self.data)} data, {self.processes} x {decimal(PROCESS_BYTES)} processes"
        )

    def check(self, nodes: Sequence[Node]) -> None:
        """Refuse what does not fit.

        Raises:
            PlacementError: the nodes have less, or none has room for a server; with the arithmetic.
        """
        have = sum(node.memory_bytes for node in nodes)
        if self.total > have > 0:
            raise PlacementError(
                f"the run needs about {decimal(self.total)} of memory, and the {len(nodes)} node(s) have "
                f"{decimal(int(have))}: {self}. "
                "Use fewer clients, a smaller model or more nodes."
            )
        largest = max(node.memory_bytes for node in nodes)
        one = -(-self.server // self.servers) + self.step + PROCESS_BYTES
        if one > largest > 0:
            advice = "Use fewer clients or a smaller model."
            if self.by_columns:
                count = -(-self.server // max(1, int(largest) - self.step - PROCESS_BYTES))
                advice = f"Let several servers hold it, with the same bits: server.sharding={count} or more."
            raise PlacementError(
                f"a server needs about {decimal(one)} of memory, and the largest of {len(nodes)} nodes has "
                f"{decimal(int(largest))}: {self}. {advice}"
            )


def memory_of(world: World, pool: Pool, placement: Placement, hub: Hub, work: Sequence[Work]) -> Memory:
    """By the arithmetic of the state and messages that the method declares, in its first round."""
    net, config, method = hub.net, world.config, hub.method
    row = max(own.width for own in (net, *net.personal)) * FLOAT_BYTES
    state = _bytes(method.init_state(net, hub.clients.take(torch.tensor([0], device=hub.device))))
    if config.training.keeps_momentum:
        state += net.num_weights * FLOAT_BYTES
    uploads = int(hub.plan.uploads.sum()) * net.width * FLOAT_BYTES
    # Methods whose server works column by column take in a few columns of all uploads, and write in place.
    most = CHUNK_ENTRIES * FLOAT_BYTES if method.columns and hub.timing is None else math.inf
    kept = _bytes(hub.hub)
    return Memory(
        row=row,
        hosts=len(work),
        # A round's new rows stand beside the old ones until every client has done its work.
        states=max((len(ids) + len(own.ids)) * state for ids, own in zip(hub.dealt, work, strict=True)),
        working=world.width * WORKING_ROWS * row,
        heard=max(_bytes(own.down) for own in work),
        servers=config.server.sharding,
        server=kept,
        step=int(min(uploads, most) + min(kept, most)),
        sending=sum(_bytes(own.down) for own in work) + uploads,
        data=pool.x.nbytes + pool.y.nbytes,
        processes=1 if config.engine.name == "local" else 1 + config.server.sharding + placement.num_hosts,
        by_columns=bool(method.columns),
    )


def _bytes(message: tuple[torch.Tensor, ...]) -> int:
    return sum(field.nbytes for field in message)
