"""Masks over the columns of rows: the largest entries of each row, bits for sending, overlaps of pairs."""

# K rows, P columns, Q columns of one piece, B bytes.

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.algebra.columns import column_blocks
from raypfl.algebra.phases import phase

BITS = 8
# Words of eight bytes, lowest first.
GATHER = sum(1 << (BITS - 1) * (BITS - bit) for bit in range(BITS))
REPEAT = int.from_bytes([1] * BITS, "little", signed=True)
SELECT = int.from_bytes([1 << bit for bit in range(BITS)], "little", signed=True)


def largest(score_KQ: Tensor, count: int | Tensor) -> Tensor:
    """The `count` largest entries of every row, equal ones by their place, first come first served.

    Exactly `count` a row, whatever is equal: bool `[K, Q]`. A tensor `[K]` holds the count of each row.
    """
    if isinstance(count, Tensor):
        mask_KQ = torch.empty_like(score_KQ, dtype=torch.bool)
        for value in count.unique().tolist():
            alike_K = count == value
            mask_KQ[alike_K] = largest(score_KQ[alike_K], value)
        return mask_KQ
    columns = score_KQ.shape[1]
    if count <= 0 or count >= columns:
        return torch.full_like(score_KQ, count > 0, dtype=torch.bool)
    cut_K1 = score_KQ.kthvalue(columns - count + 1, dim=1, keepdim=True).values
    above_KQ, at_cut_KQ = score_KQ > cut_K1, score_KQ == cut_K1
    free_K1 = count - above_KQ.sum(1, keepdim=True)
    if torch.equal(at_cut_KQ.sum(1, keepdim=True), free_K1):
        # Nothing to choose, as nearly always; counting places takes as long as all the rest.
        return above_KQ | at_cut_KQ
    return above_KQ | (at_cut_KQ & (at_cut_KQ.cumsum(1) <= free_K1))


def pack_bits(mask_KP: Tensor) -> Tensor:
    """A bool mask as bits, eight columns a byte, zeros behind the last: uint8 `[K, ceil(P / 8)]`."""
    rows, columns = mask_KP.shape
    padded = mask_KP.new_zeros(rows, -(-columns // BITS) * BITS)
    padded[:, :columns] = mask_KP
    # Eight bytes of 0 or 1 are one word; the product moves each to its place in the highest byte.
    return (padded.view(torch.int64) * GATHER >> 8 * (BITS - 1)).to(torch.uint8)


def unpack_bits(packed_KB: Tensor, columns: int) -> Tensor:
    """The bool mask `[K, columns]` that `pack_bits` packed."""
    # A byte in each of a word's eight, and of each another bit.
    spread = packed_KB.long() * REPEAT & SELECT
    return spread.view(torch.uint8)[:, :columns] != 0


@phase("distances")
def overlaps(packed_KB: Tensor) -> Tensor:
    """`|M_i and M_j|`, the columns two masks share, for all pairs: whole numbers in float64 `[K, K]`."""
    shared_KK = torch.zeros(len(packed_KB), len(packed_KB), dtype=torch.float64, device=packed_KB.device)
    for block in column_blocks(packed_KB.shape[1] * BITS):
        part = unpack_bits(packed_KB[:, block.start // BITS : block.stop // BITS], block.stop - block.start)
        # Exact in float32: a block has fewer columns than 2^24.
        ones = part.float()
        shared_KK += ones @ ones.T
    return shared_KK
