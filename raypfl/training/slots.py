"""Where a module's tensors live in a row, and the module with tensors of a row in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """One tensor of a module."""

    owner: nn.Module
    name: str
    shape: torch.Size
    size: int


def parameter_slots(module: nn.Module) -> list[Slot]:
    """Of all parameters, in the module's order."""
    return [
        Slot(owner, name, tensor.shape, tensor.numel())
        for owner in module.modules()
        for name, tensor in owner._parameters.items()
        if tensor is not None
    ]


def buffer_slots(module: nn.Module) -> list[Slot]:
    """Of floating-point buffers; integer ones (batch counters) are constants of the simulation."""
    return [
        Slot(owner, name, tensor.shape, tensor.numel())
        for owner in module.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None and tensor.is_floating_point()
    ]


def split(rows: Tensor, slots: Sequence[Slot]) -> tuple[Tensor, ...]:
    """The columns of each slot, `[K, size]`: views."""
    return rows.split([slot.size for slot in slots], dim=1) if slots else ()


@contextmanager
def bound(slots: Sequence[Slot], pieces: Sequence[Tensor], table: str = "_parameters") -> Iterator[None]:
    """Put flat tensors into a module's own slots, and take them out again.

    Writing the slots is what `torch.func.functional_call` does at 0.05 to 0.1 ms a call, too much beside a
    step of a small network.
    """
    tables = [getattr(slot.owner, table) for slot in slots]
    before = [held[slot.name] for held, slot in zip(tables, slots, strict=True)]
    try:
        for held, slot, piece in zip(tables, slots, pieces, strict=True):
            held[slot.name] = piece.view(slot.shape)
        yield
    finally:
        for held, slot, tensor in zip(tables, slots, before, strict=True):
            held[slot.name] = tensor
