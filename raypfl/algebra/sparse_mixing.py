"""Mixing of rows by a sparse matrix: every receiver gathers the senders it hears, and nobody else's row.

A block of columns is small enough to stay in cache while all receivers read from it, so a matrix of rows
passes through memory once. Within a block each receiver's rows are gathered and summed by one fused
operation, in the dtype of the rows and in ascending order of senders.

What is promised of the bits on one kind of machine: a receiver's result depends on its own weights and on the
rows these name, not on other receivers, not on the width of a block and not on the number of threads. (On a
CPU float32 terms are added by fused multiply-adds, float64 terms by a product and a sum.)
"""

# R receivers, N senders, P parameters, E entries, D receivers that differ, B columns of one block.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from raypfl.algebra.csr import Csr, csr_degrees, csr_row_sums, csr_take
from raypfl.algebra.phases import phase
from raypfl.algebra.threads import in_shares
from raypfl.errors import ShapeError

BLOCK_ENTRIES = 2**17
"""Entries of a block of rows on a CPU: with the mixed block 1 MiB of float32, what a core's cache holds."""

BLOCK_ALIGNMENT = 64
"""Columns that a block is a multiple of: whole cache lines."""

BLOCKS_ON_DEVICE = 16
"""Blocks that an accelerator cuts rows into: few launches, an eighth of the rows as extra memory."""

DEGREE_WORTH_COMPARING = 16
"""Mean number of senders from which on receivers are compared, to compute equal ones once."""

Columns = slice | Tensor
"""Columns of rows: a slice with step 1, or their numbers, int64."""


def mix_sparse(weights: Csr, w_NP: Tensor) -> Tensor:
    """`A W` out of place: row i is `sum_j a_ij w_j` over the senders j that receiver i names.

    A receiver with a single weight of exactly 1 gets a copy, bit for bit. A row of `w_NP` that is not finite
    reaches the receivers that name it and no others. A receiver that names nobody gets zeros.

    Args:
        weights: `A`, `[R, N]`.
        w_NP: rows, float32 or float64 `[N, P]`.

    Returns:
        `[R, P]`, dtype and device of `w_NP`.

    Raises:
        ShapeError: a sender has no row.
    """
    return mix_groups([(slice(0, w_NP.shape[1]), weights)], w_NP)


@phase("mixing")
def mix_groups(groups: Sequence[tuple[Columns, Csr]], w_NP: Tensor) -> Tensor:
    """`A_c W_c` for each group c of columns, with a matrix of its own: extractor, head, buffers.

    Columns that stay at home are a group too, with `csr_copying` of every receiver's own row.

    Args:
        groups: the columns of each group and its matrix `[R, N]`; together they hold every column once.
        w_NP: rows `[N, P]`.

    Raises:
        ShapeError: groups differ in receivers, leave a column out or hold one twice, or a sender has no row.
    """
    _check_groups(groups, w_NP)
    out_RP = w_NP.new_empty(len(groups[0][1].offsets) - 1, w_NP.shape[1])
    for columns, weights in groups:
        mixer = _Mixer(weights, w_NP.dtype)
        in_shares(partial(mixer.mix, out_RP, w_NP), list(blocks_of(columns, w_NP)))
    return out_RP


def weighted_sum(weights: Csr, values_E: Tensor, part_NB: Tensor) -> Tensor:
    """`A part` for one block of columns, with the values of `A` in the dtype of the block: `[R, B]`."""
    if len(weights.columns) == 0:
        return part_NB.new_zeros(len(weights.offsets) - 1, part_NB.shape[1])
    return embedding_bag(
        weights.columns,
        part_NB,
        weights.offsets,
        mode="sum",
        per_sample_weights=values_E,
        include_last_offset=True,
    )


class _Mixer:
    """One matrix, prepared to mix one block of columns after another."""

    def __init__(self, weights: Csr, dtype: torch.dtype) -> None:
        degrees_R, one_hot_R = csr_degrees(weights), csr_row_sums(weights) == 1
        one_hot_R &= degrees_R == 1
        self.copied, self.summed = one_hot_R.nonzero()[:, 0], (~one_hot_R).nonzero()[:, 0]
        self.sources = weights.columns[weights.offsets[self.copied]]
        summed = csr_take(weights, self.summed) if len(self.copied) else weights
        self.weights, self.which = _distinct_receivers(summed)
        self.values_E = self.weights.values.to(dtype)

    def mix(self, out_RP: Tensor, w_NP: Tensor, blocks: Sequence[Columns]) -> None:
        """Write the mixed columns of some blocks to `out_RP`."""
        for block in blocks:
            if isinstance(block, slice):
                self._into(out_RP[:, block], w_NP[:, block])
            else:
                mixed_RB = w_NP.new_empty(len(out_RP), len(block))
                self._into(mixed_RB, w_NP[:, block])
                out_RP[:, block] = mixed_RB

    def _into(self, out_RB: Tensor, part_NB: Tensor) -> None:
        """Write the mixed block to `out_RB`."""
        if len(self.copied):
            # Not a sum with weight 1: that starts at +0, and so loses the sign of -0.
            _write(out_RB, self.copied, part_NB.index_select(0, self.sources))
        if len(self.summed):
            mixed_DB = weighted_sum(self.weights, self.values_E, part_NB)
            _write(out_RB, self.summed, mixed_DB if self.which is None else mixed_DB[self.which])


def _write(out_RB: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Put rows at the ascending places `ids`."""
    if len(ids) == len(out_RB):
        out_RB.copy_(rows)
    else:
        out_RB.index_copy_(0, ids, rows)


def blocks_of(columns: Columns, w_NP: Tensor) -> Iterator[Columns]:
    """The given columns of `w_NP`, cut into blocks by the shape of the rows alone."""
    rows, total = w_NP.shape
    width = -(-total // BLOCKS_ON_DEVICE) if w_NP.is_cuda else BLOCK_ENTRIES // max(rows, 1)
    width = max(width // BLOCK_ALIGNMENT, 1) * BLOCK_ALIGNMENT
    if isinstance(columns, Tensor):
        yield from columns.split(width) if len(columns) else ()
        return
    start, stop, _ = columns.indices(total)
    for at in range(start, stop, width):
        yield slice(at, min(at + width, stop))


def require_senders(weights: Csr, w_NP: Tensor) -> None:
    """Refuse weights that name a sender without a row: reading it would be out of bounds."""
    if len(weights.columns) and int(weights.columns.max()) >= len(w_NP):
        raise ShapeError(f"Sender {int(weights.columns.max())} has no row: there are {len(w_NP)} rows.")


def _distinct_receivers(weights: Csr) -> tuple[Csr, Tensor | None]:
    """Receivers without repetition, and which of them each receiver is; None where nothing is gained.

    On a complete graph all receivers take the same; with few senders hardly any two do.
    """
    receivers = len(weights.offsets) - 1
    if len(weights.columns) < DEGREE_WORTH_COMPARING * receivers:
        return weights, None
    offsets = weights.offsets.tolist()
    columns_E, values_E = weights.columns.cpu().numpy(), weights.values.cpu().numpy()
    place: dict[tuple[bytes, bytes], int] = {}
    which: list[int] = []
    first: list[int] = []
    for receiver, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        row = (columns_E[start:stop].tobytes(), values_E[start:stop].tobytes())
        if place.setdefault(row, len(place)) == len(first):
            first.append(receiver)
        which.append(place[row])
    if len(first) == receivers:
        return weights, None
    device = weights.offsets.device
    return csr_take(weights, torch.tensor(first, device=device)), torch.tensor(which, device=device)


def _check_groups(groups: Sequence[tuple[Columns, Csr]], w_NP: Tensor) -> None:
    total = w_NP.shape[1]
    times_P = torch.zeros(total, dtype=torch.int32, device=w_NP.device)
    for columns, weights in groups:
        require_senders(weights, w_NP)
        if isinstance(columns, slice):
            times_P[columns] += 1
        else:
            times_P += columns.bincount(minlength=total)
    receivers = {len(weights.offsets) - 1 for _, weights in groups}
    if len(receivers) != 1:
        raise ShapeError(f"Groups of columns with {sorted(receivers)} receivers. All must have the same.")
    wrong_P = times_P != 1
    if bool(wrong_P.any()):
        at = int(wrong_P.nonzero()[0])
        raise ShapeError(
            f"Column {at} of {total} is in {int(times_P[at])} groups. Every column must be in exactly one; "
            "what stays at home is a group that copies each receiver's own row."
        )
