"""How state and messages cross a process border: NamedTuples of contiguous NumPy arrays.

A slice of a torch tensor would send the whole storage behind it (a private head with a shared extractor);
a contiguous array is sent as it is and read without a copy. One function does it for every message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.engine.world import as_tensor

RowsT = TypeVar("RowsT", bound=tuple[Any, ...])


def encode(message: RowsT) -> RowsT:
    """The message with arrays in place of tensors, each of exactly its own bytes."""
    return type(message)(*(np.ascontiguousarray(field.detach().cpu().numpy()) for field in message))


def decode(message: RowsT, device: torch.device) -> RowsT:
    """The message with tensors again; they may lie on shared memory and are not to be written."""
    return type(message)(*(as_tensor(field).to(device) for field in message))


@phase("messages")
def take(message: RowsT, rows: Tensor, shared: frozenset[str] = frozenset()) -> RowsT:
    """Some rows of every field but those that all rows share."""
    names: tuple[str, ...] = message._fields  # type: ignore[attr-defined]
    return type(message)(
        *(field if name in shared else field[rows] for name, field in zip(names, message, strict=True))
    )


@phase("messages")
def trim(message: RowsT, pools: Mapping[str, str]) -> RowsT:
    """The message with only those rows of its pools that somebody receives; nothing is copied if all are.

    Args:
        message: a NamedTuple with these fields, among others.
        pools: shared fields `[1, U, ...]`, each with the field of row numbers `[S, q]`, -1 for none.
    """
    new = {}
    for pool, places in pools.items():
        rows, index = getattr(message, pool), getattr(message, places)
        used = index[index >= 0].unique()
        if len(used) < rows.shape[1]:
            new[pool] = rows[:, used]
            new[places] = torch.where(index >= 0, torch.searchsorted(used, index), -1)
    return message._replace(**new) if new else message  # type: ignore[attr-defined]


def put(message: RowsT, rows: Tensor, new: RowsT) -> RowsT:
    """The message with some rows replaced, all fields; nothing is copied where all are, in order."""
    if not message or torch.equal(rows, torch.arange(len(message[0]), device=rows.device)):
        return new
    return type(message)(*(field.index_copy(0, rows, part) for field, part in zip(message, new, strict=True)))


@phase("messages")
def stack(parts: Sequence[tuple[Tensor, RowsT]], ids: Tensor) -> RowsT:
    """One message from parts with ids, rows in the order of `ids`, in whatever order the parts came.

    Args:
        parts: disjoint ids `[k]` and a message with k rows.
        ids: all of them, ascending.
    """
    first = parts[0][1]
    if not first:
        return first
    out = type(first)(*(field.new_empty(len(ids), *field.shape[1:]) for field in first))
    for own, part in parts:
        rows = torch.searchsorted(ids, own.to(ids.device))
        for whole, field in zip(out, part, strict=True):
            whole[rows] = field
    return out
