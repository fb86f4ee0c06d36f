"""The common starting point of all clients, drawn once a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.rng import key
from raypfl.training import Network


def common_start(net: Network, seed: int, num_clients: int = 1) -> Tensor:
    """One initialisation for everybody: rows `[num_clients, width]`, the same on every host."""
    return net.draw(key(seed, "init")).repeat(num_clients, 1)


def own_starts(net: Network, seed: int, ids: Tensor) -> Tensor:
    """An initialisation of its own for each client: rows `[len(ids), width]`."""
    return torch.cat([net.draw(key(seed, "init", client=client)) for client in ids.tolist()])
