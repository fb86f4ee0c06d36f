"""What a run would hold in memory at once, by the arithmetic of what its method declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.filesize import decimal

from raypfl.data import Pool
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

    def check(self, nodes: Sequence[Node]) -> None:
        """Refuse what does not fit.

        Raises:
            PlacementError: the nodes have less; with the arithmetic.
        """
        have = sum(node.memory_bytes for node in nodes)
        if self.total > have > 0:
            raise PlacementError(
                f"the run needs about {decimal(self.total)} of memory, and the {len(nodes)} node(s) have "
                f"{decimal(int(have))}: {self}. "
                "Use fewer clients, a smaller model or more nodes."
            )


def memory_of(world: World, pool: Pool, placement: Placement, hub: Hub, work: Sequence[Work]) -> Memory:
    """By the arithmetic of the state and messages that the method declares, in its first round."""
    net, config = hub.net, world.config
    row = max(own.width for own in (net, *net.personal)) * FLOAT_BYTES
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
        sending=_bytes(together) + int(hub.plan.uploads.sum()) * net.width * FLOAT_BYTES,
        data=pool.x.nbytes + pool.y.nbytes,
        processes=1 if config.engine.name == "local" else 2 + placement.num_hosts,
    )


def _bytes(message: tuple[torch.Tensor, ...]) -> int:
    return sum(field.nbytes for field in message)
