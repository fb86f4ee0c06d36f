"""What methods share in which clients receive other clients' models, each its own choice of them.

The models are sent to a host once, as a pool; every participant has the row numbers of those it receives.
"""

# S participants, q models that each receives at most, U models that somebody receives.

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.methods.contract import SERVER, Message, Plan


def pool_of(plan: Plan) -> tuple[Tensor, Tensor]:
    """Clients whose models somebody receives, ascending `[U]`, and `plan.peers` as places in that list.

    Returns:
        int64 `[U]`, and int64 `[S, q]` with -1 for none.
    """
    peers = _peers(plan)
    ids = peers[peers >= 0].unique()
    return ids, torch.where(peers >= 0, torch.searchsorted(ids, peers), -1)


def peer_messages(plan: Plan, **pools: Tensor) -> list[Message]:
    """The messages that the plan says: to each participant the rows of the pools `[1, U, ...]` it receives.

    Rows that a participant receives count for each participant, however often a simulation copies them.
    """
    counts = (_peers(plan) >= 0).sum(1).tolist()
    out = []
    for client, count in zip(plan.ids.tolist(), counts, strict=True):
        for name, pool in pools.items():
            values = count * pool[0, :1].numel()
            if values:
                out.append(Message(SERVER, client, name, values, values * pool.element_size()))
    return out


def _peers(plan: Plan) -> Tensor:
    assert plan.peers is not None, "the plan says whose models are sent"
    return plan.peers
