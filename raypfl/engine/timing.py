"""Virtual time of a run: the clock's arithmetic on a method's plans and messages."""

# N clients, S participants, E edges.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.clock import (
    ServerRound,
    Speeds,
    VirtualClock,
    drops_out,
    pull_seconds,
    server_round,
    speeds_of,
    transfer_seconds,
    unanswered,
)
from raypfl.errors import ConfigError
from raypfl.methods import Clients, Message, Plan
from raypfl.topology import Graph, graph_of
from raypfl.training import Network

if TYPE_CHECKING:
    from raypfl.engine.world import AnyMethod, World

EVERYONE = -1
"""The client of a row that is about a whole round."""


class Stay(NamedTuple):
    """A client's iteration, or, as client -1, a round of all; virtual seconds since the run began."""

    client: int
    iteration: int
    start: float
    end: float
    outcome: str
    """done, late, surplus or failed."""
    heard: int = 0
    """How many peers it heard."""
    staleness: float = 0.0
    """By how many versions those were behind its own iterations on average; negative: ahead."""
    staleness_max: int = 0


class Heard(NamedTuple):
    """Whom peers can hear, once it is clear who answers."""

    plan: Plan
    """Without those who have failed and what is not answered."""
    receivers: np.ndarray
    """Of all edges that were asked for, int64 `[E]`."""
    sources: np.ndarray
    silent: np.ndarray
    """Which of them carry nothing, bool `[E]`."""


class Timing:
    """The clock of a run."""

    def __init__(self, world: World, net: Network, method: AnyMethod, clients: Clients) -> None:
        assert world.config.clock is not None
        self.clock: VirtualClock = world.config.clock
        self.seed = world.config.seed
        self.wanted = world.config.participation.participants(world.num_clients)
        sizes = world.label_counts.sum(1)
        passes = np.array([method.passes(world.config.training, int(size)) for size in sizes])
        self.speeds: Speeds = speeds_of(self.clock, passes, sizes, self.seed)
        known = method.upload_bytes(net, clients)
        self.upload_bytes = None if known is None else known.cpu().numpy()

    @property
    def decides(self) -> bool:
        """Whether a server may leave out somebody whom it selected."""
        clock = self.clock
        return clock.deadline is not None or clock.over_selection > 1 or clock.drop_out > 0

    def server(self, plan: Plan, messages: Sequence[Message], sent: np.ndarray | None = None) -> ServerRound:
        """What becomes of the selected clients, in the order of `plan.ids`.

        Args:
            plan: the round's.
            messages: to all of them.
            sent: bytes that each of the N clients uploads; absent: what the method says it will.
        """
        ids = plan.ids.cpu().numpy()
        uploads = plan.uploads.cpu().numpy()
        upload_bytes = self.upload_bytes if sent is None else sent
        # Without a bandwidth sizes do not matter, only that something is sent.
        coming = np.where(uploads, 1 if upload_bytes is None else upload_bytes[ids], 0)
        received = self._by_receiver(messages)[ids]
        _, latency, bandwidth, _ = self.speeds
        link = latency[ids], bandwidth[ids]
        end = transfer_seconds(received, *link) + self.speeds.compute[ids] + transfer_seconds(coming, *link)
        return server_round(
            end,
            uploads=uploads,
            failed=drops_out(self.clock, self.seed, plan.round, ids),
            wanted=self.wanted,
            deadline=self.clock.deadline,
        )

    def answered(self, plan: Plan, also_failed: np.ndarray | None = None) -> Heard:
        """Whom peers hear, and who takes part: not those who fail in this round.

        Args:
            plan: the round's.
            also_failed: who has failed besides, bool `[N]`; they still take part.
        """
        assert plan.graph is not None
        ids = plan.ids.cpu().numpy()
        failing = drops_out(self.clock, self.seed, plan.round, ids)
        failed = np.zeros(plan.graph.num_peers, dtype=bool) if also_failed is None else also_failed.copy()
        failed[ids] |= failing
        receivers, sources = plan.graph.receivers.numpy(), plan.graph.sources.numpy()
        silent = unanswered(
            receivers,
            sources,
            latency=self.speeds.latency,
            failed=failed,
            timeout=self.clock.timeout,
        )
        graph = plan.graph
        if failing.any():
            plan = plan.among(torch.from_numpy(~failing).to(plan.ids.device))
        if (dropped := silent | failed[receivers]).any():
            plan = plan._replace(graph=_without(graph, torch.from_numpy(dropped)))
        return Heard(plan, receivers, sources, silent)

    def pulls(self, heard: Heard, messages: Sequence[Message]) -> np.ndarray:
        """Seconds that each peer's pulling takes, float64 `[N]`."""
        num = len(self.speeds.compute)
        code = heard.receivers * num + heard.sources
        sent = np.zeros(len(code))
        # Every message is on an edge: nobody hears one that the plan does not let it hear.
        ends = np.array([message.dst * num + message.src for message in messages], dtype=np.int64)
        np.add.at(sent, np.searchsorted(code, ends), [message.bytes for message in messages])
        return pull_seconds(
            heard.receivers,
            heard.sources,
            sent,
            speeds=self.speeds,
            silent=heard.silent,
            timeout=self.clock.timeout,
        )

    def _by_receiver(self, messages: Sequence[Message]) -> np.ndarray:
        total = np.zeros(len(self.speeds.compute))
        receivers = np.array([message.dst for message in messages], dtype=np.int64)
        np.add.at(total, receivers, [message.bytes for message in messages])
        return total


def check_clock(world: World) -> None:
    """Refuse a dead-line that cannot be kept, or not be judged.

    Raises:
        ConfigError: no client can meet it; or the method's uploads have a size that only training tells.
    """
    clock = world.config.clock
    if clock is None:
        return
    cpu = torch.device("cpu")
    net, method, clients = world.network(cpu), world.method(), world.clients(cpu)
    timing = Timing(world, net, method, clients)
    if clock.mode == "async" or clock.order != "jacobi":
        _check_turns(world, method)
    if method.without_server or not timing.decides:
        return
    if clock.bandwidth is not None and timing.upload_bytes is None:
        raise ConfigError(
            f"clock.bandwidth: how much method {world.config.method.name} uploads is not known before a "
            "client has trained, so nobody can tell who is late. Leave out clock.bandwidth, or "
            "clock.deadline, clock.over_selection and clock.drop_out."
        )
    if clock.deadline is not None:
        everyone = Plan(1, clients.ids, clients.sizes)
        fastest = float(timing.server(everyone, []).end.min())
        if fastest > clock.deadline:
            raise ConfigError(
                f"clock.deadline = {clock.deadline:g}: the fastest client needs at least {fastest:.4g} s "
                "from what it receives to its upload, so no round would have a participant. Use more, or "
                "lower clock.compute."
            )


def _check_turns(world: World, method: AnyMethod) -> None:
    clock, name = world.config.clock, world.config.method.name
    assert clock is not None
    asked = "clock.mode = async" if clock.mode == "async" else f"clock.order = {clock.order}"
    if not method.by_turns:
        raise ConfigError(
            f"{asked}: peers of method {name} work in rounds that all begin together. Leave it out for "
            f"{name}, or choose another method."
        )
    participants = world.config.participation.participants(world.num_clients)
    if clock.mode == "async" and participants < world.num_clients:
        raise ConfigError(
            f"{asked}: there is no round to be selected for, so participation must be 1.0; it selects "
            f"{participants} of {world.num_clients}. Set "
            "participation={fraction: 1.0}; clock.drop_out and topology.p_active take peers away."
        )


def columns_of_stays(stays: Sequence[Stay]) -> dict[str, Any]:
    """Rows by column, as the clock's table takes them."""
    return {name: [getattr(stay, name) for stay in stays] for name in Stay._fields}


def _without(graph: Graph, dropped_E: Tensor) -> Graph:
    return graph_of(graph.num_peers, graph.receivers[~dropped_E], graph.sources[~dropped_E])
