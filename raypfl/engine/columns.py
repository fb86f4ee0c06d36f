"""State and messages by columns: what a part of them is, and how parts are put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from raypfl.algebra.columns import Chunk, Shard, column_blocks
from raypfl.engine.messages import RowsT

CHUNK_ENTRIES = 2**26
"""Entries of uploads that are stacked at once, where a method works column by column: 256 MiB of float32."""


def cut(message: RowsT, columns: frozenset[str], part: Shard | Chunk) -> RowsT:
    """A part of those fields that are cut by columns, as views; the others whole."""
    return _map(message, columns, lambda field: field[..., part.of(field.shape[-1])])


def compact(message: RowsT, columns: frozenset[str]) -> RowsT:
    """The same, with fields that are cut by columns in memory of their own.

    Rows that are one and the same in memory stay so.
    """
    return _map(message, columns, _compact)


def join(parts: Sequence[RowsT], columns: frozenset[str]) -> RowsT:
    """All parts together again, in their order."""
    first, *others = parts
    if not others:
        return first
    names: tuple[str, ...] = first._fields  # type: ignore[attr-defined]
    fields = zip(*parts, strict=True)
    return type(first)(
        *(
            torch.cat(several, -1) if name in columns else several[0]
            for name, several in zip(names, fields, strict=True)
        )
    )


def widths(message: tuple[Tensor, ...], columns: frozenset[str]) -> dict[str, int]:
    """Columns of each field that is cut by columns."""
    names: tuple[str, ...] = message._fields  # type: ignore[attr-defined]
    return {name: field.shape[-1] for name, field in zip(names, message, strict=True) if name in columns}


def widened(message: RowsT, widths: dict[str, int]) -> RowsT:
    """A message of the same shape as the whole one, without its numbers, in no memory."""
    return message._replace(  # type: ignore[attr-defined,no-any-return]
        **{
            name: (field := getattr(message, name)).new_empty(1).expand(*field.shape[:-1], width)
            for name, width in widths.items()
        }
    )


def chunks(
    hub: tuple[Tensor, ...], up: tuple[Tensor, ...], rows: int, columns: frozenset[str]
) -> list[Chunk]:
    """The parts that a server's state and uploads are best worked off in, so that none is large.

    Args:
        hub: the state.
        up: one of the uploads.
        rows: of all uploads.
        columns: fields that are cut by columns; without any there is one part.
    """
    entries = max(sum(field.numel() for field in hub), rows * sum(prod(field.shape[1:]) for field in up))
    widest = max(widths(up, columns).values(), default=0)
    count = max(1, min(-(-entries // CHUNK_ENTRIES), len(list(column_blocks(widest)))))
    return [Chunk(Shard(index, count)) for index in range(count)]


def _map(message: RowsT, columns: frozenset[str], change: Callable[[Tensor], Tensor]) -> RowsT:
    names: tuple[str, ...] = message._fields  # type: ignore[attr-defined]
    return type(message)(
        *(change(field) if name in columns else field for name, field in zip(names, message, strict=True))
    )


def _compact(field: Tensor) -> Tensor:
    same = len(field) > 1 and field.stride(0) == 0
    return field[:1].clone().expand_as(field) if same else field.clone()
