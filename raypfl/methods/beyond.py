"""A server's step of any length towards the mean of uploads."""

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.training import Network


def towards(net: Network, w: Tensor, mean: Tensor, beta: float) -> Tensor:
    """`(1 - beta) w + beta mean` of travelling columns `[1, shared]`, running statistics up to the mean only.

    Beyond it a variance could become negative. Exact at 0 and 1: nothing moves, or the result is the mean.
    """
    out = torch.lerp(w, mean, beta)
    statistics = slice(net.num_weights, net.shared.stop)
    out[:, statistics] = torch.lerp(w[:, statistics], mean[:, statistics], min(beta, 1.0))
    return out
