"""Sparse mixing weights: for each receiver the senders it hears, and how much it takes of each."""

# R receivers, N senders, E entries in all, S receivers that are taken.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.errors import ShapeError


class Csr(NamedTuple):
    """A matrix `[R, N]` with few entries, in compressed rows; `csr_from_pairs` makes one that is valid."""

    offsets: Tensor
    """Entries `offsets[i]` to `offsets[i + 1]` belong to receiver i, int64 `[R + 1]`."""
    columns: Tensor
    """The sender of each entry, ascending within a receiver, none twice, int64 `[E]`."""
    values: Tensor
    """The weight of each entry, none zero, float64 `[E]`."""


def csr_from_pairs(receivers_E: Tensor, senders_E: Tensor, values_E: Tensor, num_receivers: int) -> Csr:
    """The matrix with `values_E` at `(receivers_E, senders_E)`, given in any order; zeros are left out.

    A stored zero would make its sender one that is heard: `0 * NaN` is NaN.

    Raises:
        ShapeError: the lists differ in length, a receiver or sender is out of range, or a pair comes twice.
    """
    if not len(receivers_E) == len(senders_E) == len(values_E):
        lengths = f"{len(receivers_E)}, {len(senders_E)} and {len(values_E)}"
        raise ShapeError(f"Entries of a sparse matrix: lists of {lengths}. They must be equally long.")
    kept_E = values_E != 0
    receivers_E, senders_E, values_E = receivers_E[kept_E], senders_E[kept_E], values_E[kept_E]
    if len(receivers_E) and not 0 <= int(receivers_E.min()) <= int(receivers_E.max()) < num_receivers:
        span = f"{int(receivers_E.min())} to {int(receivers_E.max())}"
        raise ShapeError(f"Receivers {span}: there are {num_receivers}, counted from 0.")
    if len(senders_E) and int(senders_E.min()) < 0:
        raise ShapeError(f"Sender {int(senders_E.min())}: senders are counted from 0.")
    order_E = senders_E.argsort(stable=True)
    order_E = order_E[receivers_E[order_E].argsort(stable=True)]
    receivers_E, senders_E = receivers_E[order_E], senders_E[order_E]
    twice = (receivers_E[1:] == receivers_E[:-1]) & (senders_E[1:] == senders_E[:-1])
    if bool(twice.any()):
        at = int(twice.nonzero()[0])
        raise ShapeError(
            f"Receiver {int(receivers_E[at])} hears sender {int(senders_E[at])} twice. "
            "Give each pair once, with its weights added up."
        )
    offsets = torch.zeros(num_receivers + 1, dtype=torch.int64, device=receivers_E.device)
    offsets[1:] = receivers_E.bincount(minlength=num_receivers).cumsum(0)
    return Csr(offsets, senders_E.long(), values_E[order_E].double())


def csr_from_dense(weights_RN: Tensor) -> Csr:
    """The matrix that holds the entries of `weights_RN` that are not zero."""
    receivers_E, senders_E = weights_RN.nonzero(as_tuple=True)
    return csr_from_pairs(receivers_E, senders_E, weights_RN[receivers_E, senders_E], len(weights_RN))


def csr_copying(sources_R: Tensor) -> Csr:
    """One-hot rows: receiver i takes sender `sources_R[i]` as it is."""
    offsets = torch.arange(len(sources_R) + 1, device=sources_R.device)
    return Csr(offsets, sources_R.long(), torch.ones_like(sources_R, dtype=torch.float64))


def csr_to_dense(weights: Csr, num_senders: int) -> Tensor:
    """The same matrix with its zeros, float64 `[R, N]`; for few peers only."""
    dense_RN = weights.values.new_zeros(len(weights.offsets) - 1, num_senders)
    dense_RN[csr_receivers(weights), weights.columns] = weights.values
    return dense_RN


def csr_degrees(weights: Csr) -> Tensor:
    """How many senders each receiver hears, itself included where it keeps a part: int64 `[R]`."""
    return weights.offsets.diff()


def csr_receivers(weights: Csr) -> Tensor:
    """The receiver of every entry, int64 `[E]`."""
    degrees_R = csr_degrees(weights)
    return torch.arange(len(degrees_R), device=degrees_R.device).repeat_interleave(degrees_R)


def csr_row_sums(weights: Csr) -> Tensor:
    """What the weights of each receiver add up to, float64 `[R]`."""
    sums_R = weights.values.new_zeros(len(weights.offsets) - 1)
    return sums_R.index_add_(0, csr_receivers(weights), weights.values)


def csr_take(weights: Csr, ids_S: Tensor) -> Csr:
    """The rows of the receivers `ids_S`, in that order."""
    degrees_S = csr_degrees(weights)[ids_S]
    offsets = torch.zeros(len(ids_S) + 1, dtype=torch.int64, device=degrees_S.device)
    offsets[1:] = degrees_S.cumsum(0)
    within_E = torch.arange(int(offsets[-1]), device=degrees_S.device)
    entries_E = within_E + (weights.offsets[:-1][ids_S] - offsets[:-1]).repeat_interleave(degrees_S)
    return Csr(offsets, weights.columns[entries_E], weights.values[entries_E])
