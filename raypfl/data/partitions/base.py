"""What partitions share: the options of all of them, and the two ways of dealing that most follow.

A `Partition` is its own configuration. `draw` gives every client's training and test rows; `Drawn`
partitions draw each client's from the official splits, alone, so samples may be shared by clients and
client i does not depend on how many others there are; `Dealt` partitions give each client a list, which
is then shuffled and split into training and test.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from raypfl.config import StrictModel
from raypfl.data.partitions.classes import ClassRows
from raypfl.data.pool import Pool
from raypfl.rng import key, numpy_generator

Count = Annotated[int, Field(ge=1, le=10_000_000)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Concentration = Annotated[float, Field(ge=1e-6, le=1e9)]
"""Of a Dirichlet distribution; the range in which its draws are finite and sum to one."""

_TOLERANCE = 1e-9


class Draw(NamedTuple):
    """One client's rows of the pool before a validation split is taken off, int64."""

    train: np.ndarray
    test: np.ndarray


class Partition(StrictModel, ABC):
    """Options of every partition."""

    name: str
    num_clients: Count
    seed: int | None = None
    """Overrides the run's seed, to keep one partition over several runs."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of each client's training samples held out for validation, at least one sample if not 0."""

    @abstractmethod
    def draw(self, pool: Pool, seed: int) -> list[Draw]:
        """Rows of every client.

        Raises:
            PartitionError: it cannot be drawn from this pool.
        """


class Drawn(Partition):
    """Every client draws its samples from the official splits, independently of the others."""

    when_short: Literal["error", "replace"] = "error"
    """A class has fewer samples than one client needs: refuse, or draw that class with replacement."""
    asked: ClassVar[tuple[str, str]] = ("train_size", "test_size")
    """The options that say how many training and test samples a client needs."""

    @abstractmethod
    def label_counts(
        self, generator: np.random.Generator, client: int, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many training and test samples of each class the client has, int64 [C] each."""

    def draw(self, pool: Pool, seed: int) -> list[Draw]:
        """See `Partition.draw`."""
        train, test = ClassRows.of(pool, "train"), ClassRows.of(pool, "test")
        draws = []
        for client in range(self.num_clients):
            generator = numpy_generator(key(seed, "partition", client=client))
            counts = self.label_counts(generator, client, pool.num_classes)
            replace = self.when_short == "replace"
            draws.append(
                Draw(
                    train.sample(counts[0], generator, client, replace, self.asked[0]),
                    test.sample(counts[1], generator, client, replace, self.asked[1]),
                )
            )
        return draws


class Independent(Drawn):
    """The same with equally many samples for every client."""

    train_size: Count = 500
    """Training samples of each client, from the official training split."""
    test_size: Count = 100
    """Test samples of each client, from the official test split."""


class Dealt(Partition):
    """Every client is dealt a list of rows, which is shuffled and split into training and test."""

    test_fraction: Fraction
    """Part of each client's samples that becomes its test split."""
    round_test: ClassVar[Literal["down", "up"]] = "down"
    """Which way the test split's size is rounded; `up` where a paper rounds the training split down."""

    @abstractmethod
    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """Each client's rows; `PartitionError` as in `draw`."""

    def draw(self, pool: Pool, seed: int) -> list[Draw]:
        """See `Partition.draw`."""
        return [self._split(rows, seed, client) for client, rows in enumerate(self.deal(pool, seed))]

    def _split(self, rows: np.ndarray, seed: int, client: int) -> Draw:
        shuffled = numpy_generator(key(seed, "partition test", client=client)).permutation(rows)
        num_test = self.num_test(len(rows))
        return Draw(train=shuffled[num_test:], test=shuffled[:num_test])

    def num_test(self, samples: int) -> int:
        """Test samples of a client with this many."""
        if self.round_test == "up":
            return samples - whole((1 - self.test_fraction) * samples)
        return whole(self.test_fraction * samples)


def whole(amount: float) -> int:
    """Rounded down, except that 6.999999999 is the 7 that was meant."""
    return math.floor(amount + _TOLERANCE)


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Integers that sum to `total`, within one of the proportional quotas; ties go to the first.

    Args:
        shares: non-negative, not all zero, [C].
        total: what to divide.

    Returns:
        int64 [C].
    """
    quotas: np.ndarray = shares / shares.sum() * total
    counts: np.ndarray = np.floor(quotas).astype(np.int64)
    counts[np.argsort(counts - quotas, kind="stable")[: total - counts.sum()]] += 1
    return counts
