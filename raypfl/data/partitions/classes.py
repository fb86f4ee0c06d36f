"""Rows of a pool by class, and drawing from them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from raypfl.data.pool import Pool
from raypfl.errors import PartitionError

Split = Literal["train", "test", "merged"]


def rows_of(pool: Pool, split: Split) -> np.ndarray:
    """All rows of an official split, or of both."""
    start = pool.num_train if split == "test" else 0
    return np.arange(start, pool.num_train if split == "train" else len(pool.y))


class ClassRows(NamedTuple):
    """Rows of one split, grouped by class, in the order of the pool."""

    split: Split
    rows: list[np.ndarray]
    """int64, one array a class."""

    @classmethod
    def of(cls, pool: Pool, split: Split) -> ClassRows:
        """Group a split of the pool."""
        rows = rows_of(pool, split)
        y = pool.y[rows]
        order = np.argsort(y, kind="stable")
        return cls(split, np.split(rows[order], np.searchsorted(y[order], np.arange(1, pool.num_classes))))

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each class, int64 [C]."""
        return np.array([len(rows) for rows in self.rows], np.int64)

    def shuffled(self, generator: np.random.Generator) -> ClassRows:
        """The same rows, each class in an order of its own."""
        return ClassRows(self.split, [generator.permutation(rows) for rows in self.rows])

    def sample(
        self, counts: np.ndarray, generator: np.random.Generator, client: int, replace: bool, option: str
    ) -> np.ndarray:
        """Rows for one client, class by class, without replacement.

        Args:
            counts: samples of each class, int64 [C].
            generator: the client's.
            client: its id, for the message.
            replace: draw with replacement from a class that is too small; never from one that is empty.
            option: what asks for that many, for the message.

        Raises:
            PartitionError: a class is too small.
        """
        taken = []
        for label, (rows, count) in enumerate(zip(self.rows, counts.tolist(), strict=True)):
            short = count > len(rows)
            if short and not (replace and len(rows)):
                raise PartitionError(
                    f"class {label} has {len(rows)} {self.split} samples, client {client} needs {count}. "
                    f"Lower partition.{option}, or set partition.when_short=replace to let samples "
                    "repeat within a client (an empty class stays an error)."
                )
            taken.append(generator.choice(rows, count, replace=short) if count else rows[:0])
        return np.concatenate(taken)
