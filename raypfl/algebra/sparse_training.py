"""Sparse training: how dense each tensor is, and exchanging small weights for promising ones."""

# K rows, Q columns of one tensor.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from raypfl.algebra.masks import largest
from raypfl.errors import ConfigError

SLACK = 1e-12
"""Rounding of a share of a count: a third of 9 is 3, not 3.0000000000000004 and so 4, nor 2.9999999999999996
and so 2."""


def erk_densities(shapes: Sequence[Sequence[int]], density: float, power: float = 1.0) -> list[float]:
    """The density of each tensor, proportional to `(sum of sides / size)^power`, none above 1.

    Erdos-Renyi-Kernel: tensors whose share would exceed 1 become dense, those with the largest score first,
    and the others share what is left, so that `sum_l density_l N_l = density * sum_l N_l`.

    Args:
        shapes: sides of each tensor, none empty.
        density: of all tensors together, in (0, 1].
        power: 0 spreads evenly, 1 follows the sides.

    Raises:
        ConfigError: density out of range.
    """
    if not 0 < density <= 1:
        raise ConfigError(f"density = {density}. Take more than 0 and at most 1.")
    sizes = [math.prod(shape) for shape in shapes]
    scores = [
        (sum(shape) / size) ** power if shape else 1.0 for shape, size in zip(shapes, sizes, strict=True)
    ]
    total = density * sum(sizes)
    sparse = set(range(len(shapes)))
    factor = 0.0
    while sparse:
        left = total - sum(size for at, size in enumerate(sizes) if at not in sparse)
        factor = left / sum(scores[at] * sizes[at] for at in sparse)
        top = max(scores[at] for at in sparse)
        if top * factor <= 1:
            break
        sparse -= {at for at in sparse if scores[at] == top}
    return [factor * score if at in sparse else 1.0 for at, score in enumerate(scores)]


def erk_counts(shapes: Sequence[Sequence[int]], density: float, power: float = 1.0) -> list[int]:
    """`floor(density_l N_l)`: how many entries of each tensor are trained; all of them at density 1."""
    densities = erk_densities(shapes, density, power)
    sizes = [math.prod(shape) for shape in shapes]
    return [
        min(math.floor(part * size * (1 + SLACK)), size) for part, size in zip(densities, sizes, strict=True)
    ]


def exchange_counts(mask_KQ: Tensor, share: float) -> Tensor:
    """`ceil(share * nnz)` of each row, at least 1 where share and row are not empty: int64 `[K]`."""
    trained_K = mask_KQ.sum(1)
    if share <= 0:
        return torch.zeros_like(trained_K)
    counts_K = (trained_K.double() * share * (1 - SLACK)).ceil().long()
    return counts_K.clamp_min(1).minimum(trained_K)


def prune_and_regrow(w_KQ: Tensor, mask_KQ: Tensor, promise_KQ: Tensor, counts_K: Tensor) -> Tensor:
    """Drop the smallest trained weights of each row and train the most promising of the others instead.

    Entries that were just dropped may come back, so as many are trained as before, whatever the density.
    Equal entries are dropped and taken by their place, the first ones first. A weight that is not finite
    counts as the largest, a promise that is not finite as none.

    Args:
        w_KQ: weights of one tensor `[K, Q]`.
        mask_KQ: which are trained, bool `[K, Q]`.
        promise_KQ: not negative: magnitudes of gradients, or random numbers for random regrowth, `[K, Q]`.
        counts_K: how many each row exchanges, at most as many as it trains, int64 `[K]`.

    Returns:
        The new mask, bool `[K, Q]`.
    """
    highest = torch.finfo(w_KQ.dtype).max
    size_KQ = w_KQ.abs().nan_to_num(nan=highest, posinf=highest)
    dropped_KQ = largest((-size_KQ).masked_fill(~mask_KQ, -torch.inf), counts_K)
    kept_KQ = mask_KQ & ~dropped_KQ
    usable_KQ = promise_KQ.masked_fill(~promise_KQ.isfinite(), 0.0)
    return kept_KQ | largest(usable_KQ.masked_fill(kept_KQ, -1.0), counts_K)
