"""Models that clients keep for themselves, of the shared architecture or of others.

Client i has the architecture `net.personal[i mod A]`. Rows of all clients are as wide as the widest of them;
behind the columns of a narrower model are zeros.
"""

# K clients, A architectures.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypfl.methods.contract import Answer
from raypfl.methods.start import common_start
from raypfl.rng import key
from raypfl.training import Cohort, Network


def like_the_shared(net: Network) -> bool:
    """Whether clients' own models have the architecture of the shared one."""
    return net.personal[0] is net


def kinds_of(net: Network, ids: Tensor) -> Tensor:
    """Which architecture each client has, int64 `[K]`."""
    return ids % len(net.personal)


def run_by_architecture(
    cohort: Cohort, work: Callable[..., tuple[Tensor, ...]], *rows: Tensor
) -> tuple[Tensor, ...]:
    """`cohort.run` in chunks of clients with the same architecture."""
    return cohort.run(work, *rows, kinds=kinds_of(cohort.net, cohort.ids))


def own_network(chunk: Cohort) -> Network:
    """The network of the own models of clients that all have the same."""
    return chunk.net.personal[int(kinds_of(chunk.net, chunk.ids)[0])]


def personal_start(net: Network, seed: int, ids: Tensor) -> Tensor:
    """The first own model of each client, `[K, widest]`.

    That of the shared architecture is the common start. Every other architecture has one draw for all clients
    that have it: what tells their models apart later is their data.
    """
    if like_the_shared(net):
        return common_start(net, seed, len(ids))
    rows = torch.zeros(len(net.personal), max(own.width for own in net.personal), dtype=net.dtype)
    rows = rows.to(net.device)
    for kind, own in enumerate(net.personal):
        rows[kind, : own.width] = own.draw(key(seed, f"init of personal model {kind}"))[0]
    return rows[kinds_of(net, ids)]


def answer_of_own(net: Network, ids: Tensor, rows: Tensor) -> Answer:
    """How clients' own models `[K, widest]` answer: logits `[K, B, C]`, each by its architecture."""
    kinds = kinds_of(net, ids).to(rows.device)

    def answer(x: Tensor) -> Tensor:
        parts, places = [], []
        for kind in kinds.unique().tolist():
            here = (kinds == kind).nonzero()[:, 0]
            own = net.personal[kind]
            parts.append(own.bind(rows[here, : own.width])(x[here]))
            places.append(here)
        return torch.cat(parts)[torch.cat(places).argsort()]

    return answer
