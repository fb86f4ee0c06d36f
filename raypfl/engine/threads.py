"""Threads for pieces of a server's work; `raypfl.algebra.threads` cuts it and puts it together."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Found = TypeVar("Found")


class ThreadPool:
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
