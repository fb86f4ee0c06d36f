"""Pieces of a server's work on several threads of a processor.

Pieces are cut, and what they give is put together, in ways that know nothing of threads; so do the bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Found = TypeVar("Found")


class Threads:
    """So many threads for pieces of work, each with as many of torch's own as the process has.

    Args:
        count: how many pieces are worked on at once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(
            count, "pieces", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    def each(self, work: Callable[[Piece], Found], pieces: Sequence[Piece]) -> Iterator[Found]:
        """What `work` gives for each piece, in their order.

        As many wait to be worked on, or to be taken, as are being worked on: no thread waits for the caller,
        and few results are held.
        """
        differentiable = torch.is_grad_enabled()

        def one(piece: Piece) -> Found:
            with torch.set_grad_enabled(differentiable):
                return work(piece)

        coming = iter(pieces)
        under_way: deque[Future[Found]] = deque(
            self._pool.submit(one, piece) for piece in itertools.islice(coming, 2 * self.count)
        )
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(self._pool.submit(one, piece) for piece in itertools.islice(coming, 1))


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
