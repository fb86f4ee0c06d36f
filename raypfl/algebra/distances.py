"""Distances between models, safe where models are nearly equal or far from the origin.

A Gram matrix of raw float32 rows loses small distances completely (relative error 1.0 for distance 0.01
among models of norm 12). Rows are therefore centred, which distances do not notice, and multiplied in
float64; both happen in column blocks, so the rows are never copied whole.
"""

# K models, P parameters.

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from raypfl.algebra.columns import column_blocks, double_blocks, sum_over_columns
from raypfl.algebra.phases import phase
from raypfl.algebra.threads import on_threads

ROWS_AT_ONCE = 256
"""Of a product whose upper half is left out; fewer make it slower than it gains."""
MOST_ENTRIES = 2**24
"""Of a Gram matrix of which every thread may have two: 128 MiB."""


@phase("distances")
def row_distances(a_KP: Tensor, b_KP: Tensor, order: Literal[1, 2] = 2) -> Tensor:
    """Distance of every row to the row of another matrix beside it: float64 `[K]`.

    Exact where the two are close, since their differences are taken first.

    Args:
        a_KP: rows `[K, P]`.
        b_KP: as many, or a single one for all.
        order: 2 for the Euclidean distance, 1 for the sum of absolute differences.
    """

    def summed(section: slice) -> Tensor:
        total_K = a_KP.new_zeros(len(a_KP), dtype=torch.float64)
        a_KQ, b_KQ = a_KP[:, section], b_KP[:, section]
        for columns in column_blocks(a_KQ.shape[1], len(a_KQ)):
            difference = a_KQ[:, columns].double() - b_KQ[:, columns].double()
            total_K += difference.abs().pow_(order).sum(1)
        return total_K

    total_K = sum_over_columns(a_KP.shape[1], summed)
    return total_K.sqrt_() if order == 2 else total_K


@phase("distances")
def row_norms(w_KP: Tensor) -> Tensor:
    """Euclidean norm of every row: float64 `[K]`."""
    return row_distances(w_KP, w_KP.new_zeros(1, 1).expand(1, w_KP.shape[1]))


@phase("distances")
def all_rows_equal(w_KP: Tensor) -> bool:
    """Whether every model is bitwise the first one (a common start, or a single model)."""

    def differ(section: slice) -> Tensor:
        w_KQ = w_KP[:, section]
        # One at a time: models that differ mostly differ in the first row that is looked at.
        equal = all(torch.equal(row, w_KQ[0]) for row in w_KQ[1:])
        return torch.tensor(0.0 if equal else 1.0)

    return not sum_over_columns(w_KP.shape[1], differ)


@phase("distances")
def pairwise_distances(w_KP: Tensor) -> Tensor:
    """Euclidean distances between all rows: float64 `[K, K]`, symmetric with a zero diagonal."""
    gram_KK = _gram(w_KP, centred=True)
    norms_K = gram_KK.diagonal()
    squared_KK = (norms_K[:, None] + norms_K[None, :] - 2.0 * gram_KK).clamp_min_(0.0)
    squared_KK.fill_diagonal_(0.0)
    # The products of two blocks may be summed in another order below the diagonal than above it.
    return torch.maximum(squared_KK, squared_KK.T).sqrt_()


@phase("distances")
def pairwise_similarities(w_KP: Tensor) -> Tensor:
    """Cosine of the angle between all rows, not centred: float64 `[K, K]`; 0 where a row is zero."""
    gram_KK = _gram(w_KP, centred=False)
    norms_K = gram_KK.diagonal().sqrt()
    return gram_KK / (norms_K[:, None] * norms_K[None, :]).clamp_min(torch.finfo(torch.float64).tiny)


def _gram(w_KP: Tensor, *, centred: bool) -> Tensor:
    """Inner products of all rows, or of their differences to the mean row: float64 `[K, K]`.

    Of many rows those below the diagonal are computed and mirrored.
    """
    num_models = len(w_KP)
    starts = range(0, num_models, ROWS_AT_ONCE) if num_models >= 2 * ROWS_AT_ONCE else range(1)
    stops = [*starts[1:], num_models]
    # As a product: the mean of a few rows takes `Tensor.mean` as long as the Gram matrix itself.
    mean_1K = w_KP.new_full((1, num_models), 1.0 / max(num_models, 1), dtype=torch.float64)

    def summed(section: slice) -> Tensor:
        gram_KK = w_KP.new_zeros(num_models, num_models, dtype=torch.float64)
        w_KQ = w_KP[:, section]
        for _, part in double_blocks(w_KQ):
            if centred:
                part -= mean_1K @ part
            for start, stop in zip(starts, stops, strict=True):
                gram_KK[start:stop, :stop].addmm_(part[start:stop], part[:stop].T)
        return gram_KK

    too_large = num_models**2 > MOST_ENTRIES
    with on_threads(None) if too_large else nullcontext():
        gram_KK = sum_over_columns(w_KP.shape[1], summed)
    return gram_KK if len(stops) == 1 else gram_KK.tril_().add_(gram_KK.tril(-1).T)
