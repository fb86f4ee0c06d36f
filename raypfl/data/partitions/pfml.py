"""The partitions of PFML (ACML 2021), after pFedMe's scripts: class pairs, CIFAR-10, natural clients.

All merge the official splits and keep 75 % of each client's samples, rounded down, for training.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from raypfl.data.partitions.base import Count, Dealt, Draw, Fraction, Partition, largest_remainder, whole
from raypfl.data.partitions.classes import ClassRows
from raypfl.data.pool import Pool
from raypfl.errors import PartitionError
from raypfl.rng import key, numpy_generator


class Pairs(Dealt):
    """Client i holds the class pair i mod 5 of (0,1), (2,3), (4,5), (6,7), (8,9) (PFML on MNIST)."""

    name: Literal["pairs"] = "pairs"
    num_clients: Count = 20
    shares: Literal["equal", "pfedme"] = "equal"
    """How the clients of a pair share each of its classes; `pfedme`: random, see `uneven_shares`."""
    test_fraction: Fraction = 0.25
    round_test: ClassVar[Literal["down", "up"]] = "up"

    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """See `Dealt.deal`."""
        num_pairs, odd = divmod(pool.num_classes, 2)
        if odd:
            raise PartitionError(f"pairs needs an even number of classes, the data have {pool.num_classes}.")
        generator = numpy_generator(key(seed, "partition"))
        clients: list[list[np.ndarray]] = [[] for _ in range(self.num_clients)]
        for label, rows in enumerate(ClassRows.of(pool, "merged").shuffled(generator).rows):
            sharers = range(label // 2, self.num_clients, num_pairs)
            if not sharers:
                continue
            if self.shares == "equal":
                counts = largest_remainder(np.ones(len(sharers)), len(rows))
            else:
                counts = uneven_shares(len(rows), len(sharers), generator, label)
            for client, piece in zip(sharers, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
                clients[client].append(piece)
        return [np.concatenate(client) for client in clients]


class PfmlCifar10(Partition):
    """Three classes a client, i, i+1 and i+2 mod 10, of log-normal sizes (pFedMe's CIFAR-10, 20 clients).

    Every (client, class) first gets 10 samples. Then, in the same order, it asks for 2 (int(p) + U{300..600})
    more, p log-normal and normalised per class to its size minus 20, and gets all of them if the class still
    has more than that, else none. The script seeds `random` and NumPy with 1; here the draws come from the
    partition's key, so the sizes are not the script's. `Federation.table` shows them.
    """

    name: Literal["pfml_cifar10"] = "pfml_cifar10"
    num_clients: Literal[20] = 20
    test_fraction: Fraction = 0.25

    FIRST: ClassVar[int] = 10
    CLASSES_PER_CLIENT: ClassVar[int] = 3

    def draw(self, pool: Pool, seed: int) -> list[Draw]:
        """See `Partition.draw`; training and test are stratified by class."""
        if pool.num_classes != 10:
            raise PartitionError(f"pfml_cifar10 deals 10 classes, the data have {pool.num_classes}.")
        classes = ClassRows.of(pool, "merged")
        counts = self.counts(classes.sizes, numpy_generator(key(seed, "partition")))
        ends = counts.cumsum(axis=0)
        return [
            self._split(
                [
                    rows[end - count : end]
                    for rows, end, count in zip(classes.rows, ends[i], counts[i], strict=True)
                ],
                seed,
                i,
            )
            for i in range(self.num_clients)
        ]

    def counts(self, sizes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Samples of each client and class, int64 [20, 10]; `sizes` are the classes', int64 [10]."""
        pairs = [
            (i, j, (i + j) % 10) for i in range(self.num_clients) for j in range(self.CLASSES_PER_CLIENT)
        ]
        counts = np.zeros((self.num_clients, 10), np.int64)
        for client, _, label in pairs:
            counts[client, label] = self.FIRST
        used = counts.sum(axis=0)
        if (short := sizes < used).any():
            label = int(np.argmax(short))
            raise PartitionError(
                f"class {label} has {sizes[label]} samples, its clients need {used[label]}. Use a larger "
                "data set."
            )
        portions = generator.lognormal(0.0, 2.0, (10, self.num_clients, self.CLASSES_PER_CLIENT))
        portions *= ((sizes - self.num_clients) / portions.sum(axis=(1, 2)))[:, None, None]
        for client, j, label in pairs:
            extra = 2 * (int(portions[label, client // 2, j]) + int(generator.integers(300, 601)))
            if used[label] + extra < sizes[label]:
                counts[client, label] += extra
                used[label] += extra
        return counts

    def _split(self, by_class: list[np.ndarray], seed: int, client: int) -> Draw:
        generator = numpy_generator(key(seed, "partition test", client=client))
        sizes = np.array([len(rows) for rows in by_class])
        num_train = largest_remainder(sizes, whole((1 - self.test_fraction) * sizes.sum()))
        shuffled = [generator.permutation(rows) for rows in by_class]
        return Draw(
            train=np.concatenate([rows[:n] for rows, n in zip(shuffled, num_train, strict=True)]),
            test=np.concatenate([rows[n:] for rows, n in zip(shuffled, num_train, strict=True)]),
        )


class Natural(Dealt):
    """The data set's own clients, such as those of synthetic(alpha, beta)."""

    name: Literal["natural"] = "natural"
    num_clients: Count = 100
    """The first so many of the data set's clients."""
    test_fraction: Fraction = 0.25
    round_test: ClassVar[Literal["down", "up"]] = "up"

    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """See `Dealt.deal`."""
        if pool.owner is None:
            raise PartitionError(
                f"{pool.name} has no natural clients. Use another partition, or data.name=synthetic, which "
                "has them."
            )
        owners = int(pool.owner.max()) + 1
        if self.num_clients > owners:
            raise PartitionError(
                f"{pool.name} has {owners} natural clients, partition.num_clients = {self.num_clients}. "
                "Lower it, or raise data.num_clients."
            )
        return [np.flatnonzero(pool.owner == client) for client in range(self.num_clients)]


def uneven_shares(samples: int, sharers: int, generator: np.random.Generator, label: int) -> np.ndarray:
    """Random sizes of pFedMe: all but the last take U{rest // (q+1), ..., rest // 2 - 1} of the rest in turn.

    Args:
        samples: of the class.
        sharers: q, the clients that share it.
        generator: the partition's.
        label: the class, for the message.

    Returns:
        int64 [q], summing to `samples`.

    Raises:
        PartitionError: the class is so small that the range is empty.
    """
    shares = np.zeros(sharers, np.int64)
    rest = samples
    for sharer in range(sharers - 1):
        low, high = rest // (sharers + 1), rest // 2
        if low >= high:
            raise PartitionError(
                f"class {label} has {samples} samples, too few for random shares of {sharers} clients "
                f"({rest} left for {sharers - sharer}). Use partition.shares=equal, or lower "
                "partition.num_clients."
            )
        shares[sharer] = generator.integers(low, high)
        rest -= shares[sharer]
    shares[-1] = rest
    return shares
