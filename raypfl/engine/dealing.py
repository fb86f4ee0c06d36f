"""Which blocks live on which host. No result depends on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raypfl.engine.world import World
from raypfl.errors import PlacementError


def deal(world: World, num_hosts: int) -> list[list[int]]:
    """Deal blocks to hosts so that every host trains about as many samples.

    The block with the most samples goes first, each to the host with the least so far.

    Raises:
        PlacementError: there are more hosts than blocks.
    """
    blocks = world.blocks()
    if num_hosts > len(blocks):
        raise PlacementError(
            f"{num_hosts} client hosts for {len(blocks)} blocks of {world.block} clients "
            f"({world.num_clients} in all): some would have nothing to do. Use engine.num_actors of at most "
            f"{len(blocks)}, or a smaller engine.block."
        )
    samples = torch.from_numpy(world.label_counts).sum(1)
    load = [int(samples[ids].sum()) for ids in blocks]
    dealt: list[list[int]] = [[] for _ in range(num_hosts)]
    totals = [0] * num_hosts
    for block in sorted(range(len(blocks)), key=lambda block: -load[block]):
        host = min(range(num_hosts), key=lambda host: (totals[host], len(dealt[host])))
        dealt[host].append(block)
        totals[host] += load[block]
    return [sorted(own) for own in dealt]


def ids_of(world: World, blocks: Sequence[int]) -> Tensor:
    """The clients of some blocks, ascending."""
    cut = world.blocks()
    return torch.cat([cut[block] for block in blocks])
