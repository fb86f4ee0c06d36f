"""Linear maps over rows: each receiver's new model is a combination of the senders' models."""

# K models, P parameters.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raypfl.algebra.columns import by_blocks, double_memory
from raypfl.algebra.phases import phase


@phase("mixing")
def pull_together(attraction_KK: Tensor, w_KP: Tensor) -> Tensor:
    """Move every model by weighted differences: `w_i + sum_j a_ij (w_j - w_i)`.

    Equal to `C W` with `C = A + diag(1 - A 1)`, formed without the cancellation that entries of `A` far
    above 1 would cause: the differences are taken from centred rows, in float64, one block of columns at
    a time; the result has the dtype of `w_KP`.

    Args:
        attraction_KK: `A`, float64 `[K, K]`, zero on the diagonal; negative entries repel.
        w_KP: rows `[K, P]`.
    """
    out_KP = torch.empty_like(w_KP)
    total_K1 = attraction_KK.sum(1, keepdim=True)
    mean_1K = w_KP.new_full((1, len(w_KP)), 1.0 / max(len(w_KP), 1), dtype=torch.float64)

    def moved(blocks: Iterator[tuple[slice, Tensor]]) -> None:
        room = double_memory(w_KP)
        for columns, part in blocks:
            centred = torch.sub(part, mean_1K @ part, out=room[: part.numel()].view_as(part))
            part.addmm_(attraction_KK, centred).addcmul_(centred, total_K1, value=-1.0)
            out_KP[:, columns] = part

    by_blocks(w_KP, moved)
    return out_KP


@phase("mixing")
def mix(coefficients_RK: Tensor, w_KP: Tensor) -> Tensor:
    """`C W`, accumulated in float64: `[R, P]` in the dtype of `w_KP`.

    Args:
        coefficients_RK: what each receiver takes of each model, float64 `[R, K]`.
        w_KP: rows `[K, P]`.
    """
    out_RP = w_KP.new_empty(len(coefficients_RK), w_KP.shape[1])

    def mixed(blocks: Iterator[tuple[slice, Tensor]]) -> None:
        for columns, part in blocks:
            out_RP[:, columns] = coefficients_RK @ part

    by_blocks(w_KP, mixed)
    return out_RP


def weighted_mean(weights_K: Tensor, w_KP: Tensor) -> Tensor:
    """`sum_k p_k w_k` with the weights scaled to sum to one: `[1, P]` in the dtype of `w_KP`.

    Accumulated in float64, so that the mean of equal rows is that row.

    Args:
        weights_K: non-negative weights `[K]`, for example sample counts.
        w_KP: rows `[K, P]`.
    """
    share_1K = (weights_K.double() / weights_K.double().sum())[None]
    return mix(share_1K, w_KP)


@phase("messages")
def replace_rows(w_NP: Tensor, ids_S: Tensor, new_SP: Tensor) -> Tensor:
    """`w_NP` with the rows `ids_S` (distinct) replaced; nothing is copied where all are replaced in order."""
    return new_SP if _is_everyone(w_NP, ids_S) else w_NP.index_copy(0, ids_S, new_SP)


@phase("messages")
def rows_of(w_NP: Tensor, ids_S: Tensor) -> Tensor:
    """The rows `ids_S` of `w_NP`; `w_NP` itself where these are all of them in order, to hold them once."""
    return w_NP if _is_everyone(w_NP, ids_S) else w_NP[ids_S]


def _is_everyone(w_NP: Tensor, ids_S: Tensor) -> bool:
    return torch.equal(ids_S, torch.arange(len(w_NP), device=ids_S.device))
