"""The common starting point of all clients, drawn once a seed."""

from __future__ import annotations

from torch import Tensor

from raypfl.rng import key
from raypfl.training import Network


def common_start(net: Network, seed: int, num_clients: int = 1) -> Tensor:
    """One initialisation for everybody: rows `[num_clients, width]`, the same on every host."""
    return net.draw(key(seed, "init")).repeat(num_clients, 1)
