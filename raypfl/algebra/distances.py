"""Distances between models, safe where models are nearly equal or far from the origin.

A Gram matrix of raw float32 rows loses small distances completely (relative error 1.0 for distance 0.01
among models of norm 12). Rows are therefore centred, which distances do not notice, and multiplied in
float64; both happen in column blocks, so the rows are never copied whole.
"""

# K models, P parameters.

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from raypfl.algebra.phases import phase

COLUMN_BLOCK = 8192
"""Columns converted to float64 at once; fixed, since the bits of a sum depend on how it is cut."""


def column_blocks(num_columns: int) -> Iterator[slice]:
    """Slices that cover the columns of a matrix of rows."""
    for start in range(0, num_columns, COLUMN_BLOCK):
        yield slice(start, min(start + COLUMN_BLOCK, num_columns))


@phase("distances")
def row_distances(a_KP: Tensor, b_KP: Tensor, order: Literal[1, 2] = 2) -> Tensor:
    """Distance of every row to the row of another matrix beside it: float64 `[K]`.

    Exact where the two are close, since their differences are taken first.

    Args:
        a_KP: rows `[K, P]`.
        b_KP: as many.
        order: 2 for the Euclidean distance, 1 for the sum of absolute differences.
    """
    total_K = a_KP.new_zeros(len(a_KP), dtype=torch.float64)
    for columns in column_blocks(a_KP.shape[1]):
        difference = a_KP[:, columns].double() - b_KP[:, columns].double()
        total_K += difference.abs().pow_(order).sum(1)
    return total_K.sqrt_() if order == 2 else total_K


@phase("distances")
def all_rows_equal(w_KP: Tensor) -> bool:
    """Whether every model is bitwise the first one (a common start, or a single model)."""
    # One at a time: models that differ mostly differ in the first row that is looked at.
    return all(torch.equal(row, w_KP[0]) for row in w_KP[1:])


@phase("distances")
def pairwise_distances(w_KP: Tensor) -> Tensor:
    """Euclidean distances between all rows: float64 `[K, K]`, symmetric with a zero diagonal."""
    gram_KK = w_KP.new_zeros(len(w_KP), len(w_KP), dtype=torch.float64)
    for columns in column_blocks(w_KP.shape[1]):
        # A copy also of float64 rows: it is centred in place.
        part = w_KP[:, columns].to(torch.float64, copy=True)
        part -= part.mean(0)
        gram_KK.addmm_(part, part.T)
    norms_K = gram_KK.diagonal()
    squared_KK = (norms_K[:, None] + norms_K[None, :] - 2.0 * gram_KK).clamp_min_(0.0)
    squared_KK.fill_diagonal_(0.0)
    # The products of two blocks may be summed in another order below the diagonal than above it.
    return torch.maximum(squared_KK, squared_KK.T).sqrt_()


@phase("distances")
def pairwise_similarities(w_KP: Tensor) -> Tensor:
    """Cosine of the angle between all rows, not centred: float64 `[K, K]`; 0 where a row is zero."""
    gram_KK = w_KP.new_zeros(len(w_KP), len(w_KP), dtype=torch.float64)
    for columns in column_blocks(w_KP.shape[1]):
        part = w_KP[:, columns].double()
        gram_KK.addmm_(part, part.T)
    norms_K = gram_KK.diagonal().sqrt()
    return gram_KK / (norms_K[:, None] * norms_K[None, :]).clamp_min(torch.finfo(torch.float64).tiny)
