"""What a trial asks of Ray, whether that fits, and how many trials fit at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from raypfl.engine.placement import Node, Placement, place
from raypfl.engine.world import World
from raypfl.errors import PlacementError
from raypfl.settings import RunConfig
from raypfl.sweep.config import TrialConfig

MOST_AT_ONCE = 10_000
"""Trials that ask for next to nothing are still not started without end."""


class Share(NamedTuple):
    """CPUs and GPUs that stay together on a node."""

    cpus: float
    gpus: float


class Ask(NamedTuple):
    """What one trial asks for: the process that leads it, and its actors if it has any."""

    shares: tuple[Share, ...]
    num_actors: int | None = None
    """Client hosts of the Ray engine; None for the local engine."""

    def bundles(self) -> list[dict[str, float]]:
        """The same as Ray has it. It is reserved before a trial starts, so none waits for another."""
        bundles = [{"CPU": share.cpus, "GPU": share.gpus} for share in self.shares]
        bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
        wanted = list(filter(None, bundles)) or [{"CPU": 1.0}]
        # The process that leads actors computes nothing; its bundle is empty, and must come first.
        return [{}, *wanted] if self.num_actors else wanted

    def request(self) -> str:
        """In words."""
        cpus, gpus = (sum(amounts) for amounts in zip(*self.shares, strict=True))
        actors = f" in {len(self.shares)} parts" if len(self.shares) > 1 else ""
        return f"{cpus:g} CPU{f' and {gpus:g} GPU' if gpus else ''}{actors}"


def ask_of(config: RunConfig, trial: TrialConfig, world: World | None, nodes: Sequence[Node]) -> Ask:
    """What a trial asks for.

    Args:
        config: the run.
        trial: what trials with the local engine ask for.
        world: the run's, for a trial with the Ray engine, whose actors depend on it.
        nodes: of the cluster.

    Raises:
        PlacementError: it is more than the cluster has, with the arithmetic.
    """
    if config.engine.name == "local":
        ask = Ask((Share(trial.cpus or config.engine.threads, trial.gpus),))
    else:
        assert world is not None
        placement = place(world, nodes)
        ask = Ask(_shares(placement), placement.num_hosts)
    if not at_once(ask, nodes):
        have = "; ".join(
            f"{node.cpus:g} CPU and {node.gpus:g} GPU" if node.gpus else f"{node.cpus:g} CPU"
            for node in nodes
        )
        raise PlacementError(
            f"a trial asks for {ask.request()}, and the cluster has nodes of {have}. Lower trial.cpus, "
            "trial.gpus, engine.num_actors or resources, or use a larger cluster."
        )
    return ask


def _shares(placement: Placement) -> tuple[Share, ...]:
    server = Share(placement.server_cpus, placement.server_gpus)
    servers = [server] * placement.num_servers if any(server) else []
    hosts = [Share(placement.host_cpus, placement.host_gpus)] * placement.num_hosts
    return (*servers, *hosts)


def at_once(ask: Ask, nodes: Sequence[Node]) -> int:
    """How many such trials fit the nodes beside each other, share by share on the first node with room."""
    free_cpus = [node.cpus for node in nodes]
    # Shares of a GPU do not add up over GPUs.
    free_gpus = [[1.0] * int(node.gpus) for node in nodes]
    for count in range(MOST_AT_ONCE):
        if not all(_take(share, free_cpus, free_gpus) for share in ask.shares):
            return count
    return MOST_AT_ONCE


def _take(share: Share, free_cpus: list[float], free_gpus: list[list[float]]) -> bool:
    """Take a share from the first node that has it."""
    for node, gpus in enumerate(free_gpus):
        if free_cpus[node] < share.cpus - 1e-9:
            continue
        each = min(share.gpus, 1.0)
        wanted = math.ceil(share.gpus) if share.gpus else 0
        able = [number for number, free in enumerate(gpus) if free >= each - 1e-9][:wanted]
        if len(able) < wanted:
            continue
        free_cpus[node] -= share.cpus
        for number in able:
            gpus[number] -= each
        return True
    return False
