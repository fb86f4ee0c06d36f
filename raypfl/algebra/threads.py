"""Pieces of a server's work on several threads of a processor.

Pieces are cut, and what they give is put together, in ways that know nothing of threads; so do the bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

Piece = TypeVar("Piece")
Found = TypeVar("Found")


class Threads(Protocol):
    """So many threads for pieces of work; the engine has them (`raypfl.engine.threads`)."""

    @property
    def count(self) -> int:
        """How many pieces are worked on at once."""

    def each(self, work: Callable[[Piece], Found], pieces: Sequence[Piece]) -> Iterator[Found]:
        """What `work` gives for each piece, in their order."""


_threads: ContextVar[Threads | None] = ContextVar("threads", default=None)


@contextmanager
def on_threads(threads: Threads | None) -> Iterator[None]:
    """While entered, pieces are worked on by these threads."""
    token = _threads.set(threads)
    try:
        yield
    finally:
        _threads.reset(token)


def each_piece(work: Callable[[Piece], Found], pieces: Sequence[Piece]) -> Iterator[Found]:
    """What `work` gives for each piece, in their order."""
    threads = _threads.get()
    if threads is None or len(pieces) < 2:
        return map(work, pieces)
    return threads.each(work, pieces)


def in_shares(work: Callable[[Sequence[Piece]], None], pieces: Sequence[Piece]) -> None:
    """`work` of all pieces, which do not depend on each other: one run of them for each thread."""
    deque(each_piece(work, shares(pieces)), maxlen=0)


def shares(pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
    """Pieces as runs of about the same length, as many as there are threads."""
    threads = _threads.get()
    count = min(1 if threads is None else threads.count, len(pieces))
    cuts = [len(pieces) * number // count for number in range(count + 1)] if count else []
    return [pieces[start:stop] for start, stop in itertools.pairwise(cuts)]
