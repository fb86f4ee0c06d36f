"""How rows are cut by columns: into blocks that are computed at once, and into parts that servers hold.

Whatever is summed over columns is summed by section, and sections are added in their order. Sections follow
from the number of columns alone, and every part that a server holds is made of whole sections; so the bits of
a sum do not depend on how many servers hold the columns. What works column by column needs no more than
that blocks are cut at the same places, since parts begin at whole blocks.
"""

# K models, P parameters.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from raypfl.algebra.threads import each_piece, in_shares

COLUMN_BLOCK = 8192
"""Columns converted to float64 at once; fixed, since the bits of a sum depend on how it is cut."""
CACHED_ENTRIES, CACHED_COLUMNS = 2**17, 1024
"""Blocks of at least so many columns have at most so many entries: 1 MiB of float64, which stay near the core
while a block is converted, centred and multiplied."""
BLOCK_ENTRIES = 2**23
"""Entries of a block of very many rows: 64 MiB of float64. Beyond 8,192 rows, blocks have fewer columns."""
NARROWEST_BLOCK = 256

MOST_SECTIONS = 16
"""Sections that the columns of a row are cut into: so many servers may hold them."""


@dataclass(frozen=True)
class Shard:
    """Which of how many parts of the columns."""

    index: int = 0
    count: int = 1

    def of(self, num_columns: int) -> slice:
        """Its columns of rows with so many: whole sections, possibly none."""
        return self.among(sections(num_columns))

    def among(self, cuts: Sequence[slice]) -> slice:
        """Its share of slices that follow one another."""
        own = cuts[self.index * len(cuts) // self.count : (self.index + 1) * len(cuts) // self.count]
        return slice(own[0].start, own[-1].stop) if own else slice(0, 0)


@dataclass(frozen=True)
class Chunk:
    """Which of how many parts that one server works off after another, without sums over columns."""

    part: Shard

    def of(self, num_columns: int) -> slice:
        """Its columns of rows with so many: whole blocks, possibly none."""
        return self.part.among(list(column_blocks(num_columns)))


def column_blocks(num_columns: int, num_rows: int = 1) -> Iterator[slice]:
    """Slices that cover the columns of a matrix of so many rows."""
    width = COLUMN_BLOCK
    for entries, narrowest in ((CACHED_ENTRIES, CACHED_COLUMNS), (BLOCK_ENTRIES, NARROWEST_BLOCK)):
        while num_rows * width > entries and width > narrowest:
            width //= 2
    for start in range(0, num_columns, width):
        yield slice(start, min(start + width, num_columns))


def double_memory(w_KP: Tensor) -> Tensor:
    """Room for one block of these rows in float64."""
    width = next(column_blocks(w_KP.shape[1], len(w_KP)), slice(0, 0)).stop
    return w_KP.new_empty(len(w_KP) * width, dtype=torch.float64)


def double_blocks(w_KP: Tensor, cuts: Iterable[slice] | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows in float64, with the columns that they are copies of; one after another in one place.

    Args:
        w_KP: the rows.
        cuts: some of their `column_blocks`; all of them if absent.
    """
    num_models, memory = len(w_KP), double_memory(w_KP)
    for columns in column_blocks(w_KP.shape[1], num_models) if cuts is None else cuts:
        width = columns.stop - columns.start
        yield columns, memory[: num_models * width].view(num_models, width).copy_(w_KP[:, columns])


def by_blocks(w_KP: Tensor, work: Callable[[Iterator[tuple[slice, Tensor]]], None]) -> None:
    """`work(double_blocks(...))` until all columns have been worked on, by as many threads as there are.

    Args:
        w_KP: the rows.
        work: what it does with one block must not depend on the blocks before.
    """
    in_shares(lambda cuts: work(double_blocks(w_KP, cuts)), list(column_blocks(w_KP.shape[1], len(w_KP))))


def sections(num_columns: int) -> list[slice]:
    """At most `MOST_SECTIONS` slices of whole blocks, in order; none for no columns."""
    blocks = -(-num_columns // COLUMN_BLOCK)
    width = -(-blocks // MOST_SECTIONS) * COLUMN_BLOCK
    return [slice(start, min(start + width, num_columns)) for start in range(0, num_columns, width or 1)]


def sum_over_columns(num_columns: int, summed: Callable[[slice], Tensor]) -> Tensor:
    """`sum_s f(s)` over the sections s of so many columns, added in their order.

    Args:
        num_columns: of the rows that are at hand.
        summed: `f`, the contribution of some columns: a new tensor of any shape, the same for all.

    Raises:
        SumAsked: other servers hold the other columns (`holding`), and their contributions are not known yet.
    """
    held = _held.get()
    if held is not None:
        return held.sum(num_columns, summed)
    return add(each_piece(summed, sections(num_columns) or [slice(0, 0)]))


def add(parts: Iterable[Tensor]) -> Tensor:
    """What sections contribute, added in the order in which they come; the first is written to."""
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total.add_(part)
    assert total is not None, "no section"
    return total


class SumAsked(Exception):  # noqa: N818 - a question, no error
    """A sum is needed to which other servers contribute.

    Attributes:
        parts: what this server's sections contribute, in their order, `[sections, ...]`.
    """

    def __init__(self, parts: Tensor) -> None:
        super().__init__("a sum over columns that other servers hold")
        self.parts = parts


class Held:
    """What a server knows that holds some of the columns: which, and sums over all of them.

    A step that needs a sum raises `SumAsked`, and is begun again when the sum is known: it draws nothing and
    changes nothing, so it comes to the same point.

    Args:
        shard: which part of the columns is here.
        num_columns: of the rows that are summed over, all servers together.
        known: the sums that the step has asked for so far, in that order.
    """

    def __init__(self, shard: Shard, num_columns: int, known: Sequence[Tensor]) -> None:
        self._here = shard.of(num_columns)
        self._sections = [
            slice(own.start - self._here.start, own.stop - self._here.start)
            for own in sections(num_columns)
            if self._here.start <= own.start < self._here.stop
        ]
        self._known = iter(known)

    def sum(self, num_columns: int, summed: Callable[[slice], Tensor]) -> Tensor:
        """See `sum_over_columns`."""
        expected = self._here.stop - self._here.start
        assert num_columns == expected, f"a sum over {num_columns} columns, where {expected} are summed over"
        total = next(self._known, None)
        if total is None:
            raise SumAsked(torch.stack(list(each_piece(summed, self._sections))))
        # Whoever asks may write to it.
        return total.clone()


class NoSums(Held):
    """While a step works that has to do without: it sees some of the columns at a time."""

    def __init__(self) -> None:
        super().__init__(Shard(), 0, ())

    def sum(self, num_columns: int, summed: Callable[[slice], Tensor]) -> Tensor:
        """Refuse."""
        raise AssertionError("a method that declares `columns` sums over columns when it aggregates")


_held: ContextVar[Held | None] = ContextVar("held", default=None)


@contextmanager
def holding(held: Held) -> Iterator[None]:
    """While entered, sums over columns are those over all servers."""
    token = _held.set(held)
    try:
        yield
    finally:
        _held.reset(token)
