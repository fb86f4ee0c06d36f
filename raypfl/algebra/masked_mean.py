"""Means over the senders that have a coordinate, coordinate by coordinate."""

# R receivers, N senders, P parameters, B columns of one block.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raypfl.algebra.csr import Csr, csr_row_sums
from raypfl.algebra.phases import phase
from raypfl.algebra.sparse_mixing import Columns, blocks_of, require_senders, weighted_sum
from raypfl.algebra.threads import in_shares
from raypfl.errors import ShapeError


@phase("mixing")
def masked_mean(senders: Csr, w_NP: Tensor, mask_NP: Tensor, whole: Csr | None = None) -> Tensor:
    """`sum_j a_ij m_j w_j / sum_j a_ij m_j` per coordinate, and 0 where no sender has it.

    DisPFL: weights 1 for the neighbours and the receiver itself. A coordinate that a single sender has is
    then copied from it. CriticalFL's sparse upload: weights `n_j` for the peers, and `whole` with weight
    `n_i` at the receiver's own row, which counts in every coordinate.

    Columns come in blocks and bits are promised as in `sparse_mixing`. What stands in `w_NP` outside its mask
    is not read, not even where it is not finite.

    Args:
        senders: `a`, positive weights of the rows that count where they have a coordinate, `[R, N]`.
        w_NP: rows `[N, P]`.
        mask_NP: which coordinates a sender has, bool `[N, P]`.
        whole: positive weights of rows that count everywhere, whatever their mask, `[R, N]`.

    Returns:
        `[R, P]`, dtype and device of `w_NP`.

    Raises:
        ShapeError: masks do not fit the rows, a sender has no row, or `whole` has other receivers.
    """
    _check(senders, w_NP, mask_NP, whole)
    out_RP = w_NP.new_empty(len(senders.offsets) - 1, w_NP.shape[1])
    values_E = senders.values.to(w_NP.dtype)
    smallest = torch.finfo(w_NP.dtype).tiny

    def mean_of(blocks: Sequence[Columns]) -> None:
        for block in blocks:
            part_NB, mask_NB = w_NP[:, block], mask_NP[:, block]
            total_RB = weighted_sum(senders, values_E, _only_where(mask_NB, part_NB))
            # As bytes: conversion of bools is several times slower on a CPU.
            weight_RB = weighted_sum(senders, values_E, mask_NB.view(torch.uint8).to(w_NP.dtype))
            if whole is not None:
                total_RB += weighted_sum(whole, whole.values.to(w_NP.dtype), part_NB)
                weight_RB += csr_row_sums(whole).to(w_NP.dtype)[:, None]
            # Without a sender the total is exactly 0.
            out_RP[:, block] = total_RB.div_(weight_RB.clamp_min_(smallest))

    in_shares(mean_of, list(blocks_of(slice(0, w_NP.shape[1]), w_NP)))
    return out_RP


def _only_where(mask_NB: Tensor, part_NB: Tensor) -> Tensor:
    """`part_NB` where the mask is true and 0 elsewhere, whatever stood there.

    On the bits of the numbers: `torch.where` takes ten times as long on a CPU, and a product keeps NaN.
    """
    whole_number = torch.int32 if part_NB.dtype == torch.float32 else torch.int64
    keep_NB = mask_NB.view(torch.uint8).to(whole_number).neg_()
    return keep_NB.bitwise_and_(part_NB.view(whole_number)).view(part_NB.dtype)


def _check(senders: Csr, w_NP: Tensor, mask_NP: Tensor, whole: Csr | None) -> None:
    if mask_NP.shape != w_NP.shape or mask_NP.dtype != torch.bool:
        found = f"{mask_NP.dtype} {list(mask_NP.shape)}"
        raise ShapeError(f"Masks {found} for rows {list(w_NP.shape)}. Give one bool a coordinate.")
    require_senders(senders, w_NP)
    if whole is None:
        return
    require_senders(whole, w_NP)
    if len(whole.offsets) != len(senders.offsets):
        rows = f"{len(whole.offsets) - 1} and {len(senders.offsets) - 1}"
        raise ShapeError(f"Weights of whole and of masked rows for {rows} receivers. They must be the same.")
