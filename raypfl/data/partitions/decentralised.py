"""IID, shards and fixed numbers of classes, as UA-PDFL (arXiv 2412.11674) has them.

All deal the official training split and keep floor(20 %) of each client's list for test, so test and training
distributions of a client are equal; the official test split is not used.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from raypfl.data.partitions.base import Count, Dealt, Fraction
from raypfl.data.partitions.classes import ClassRows, rows_of
from raypfl.data.pool import Pool
from raypfl.errors import PartitionError
from raypfl.rng import key, numpy_generator


class Iid(Dealt):
    """A random equal split: floor(samples / clients) each."""

    name: Literal["iid"] = "iid"
    num_clients: Count = 30
    test_fraction: Fraction = 0.2

    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """See `Dealt.deal`."""
        rows = numpy_generator(key(seed, "partition")).permutation(rows_of(pool, "train"))
        size = len(rows) // self.num_clients
        return [rows[client * size : (client + 1) * size] for client in range(self.num_clients)]


class Shards(Dealt):
    """Sort by label, cut into equal contiguous shards, give each client some at random (FedAvg's paper)."""

    name: Literal["shards"] = "shards"
    num_clients: Count = 30
    shards_per_client: Count = 2
    test_fraction: Fraction = 0.2

    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """See `Dealt.deal`."""
        by_label = np.concatenate(ClassRows.of(pool, "train").rows)
        shards = np.array_split(by_label, self.num_clients * self.shards_per_client)
        dealt = numpy_generator(key(seed, "partition")).permutation(len(shards))
        return [np.concatenate([shards[s] for s in hand]) for hand in dealt.reshape(self.num_clients, -1)]


class FixedClasses(Dealt):
    """Every client draws some classes and floor(samples / clients / classes) samples of each.

    Clients draw independently, so a sample may be at several of them, and in the test split of one and the
    training split of another. The authors' code draws with replacement, which puts copies of one image into
    both splits of the same client; this does not.
    """

    name: Literal["fixclass"] = "fixclass"
    num_clients: Count = 30
    classes_per_client: Count = 2
    test_fraction: Fraction = 0.2

    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """See `Dealt.deal`."""
        classes = ClassRows.of(pool, "train")
        if self.classes_per_client > pool.num_classes:
            raise PartitionError(
                f"every client needs {self.classes_per_client} classes, the data have {pool.num_classes}. "
                "Lower partition.classes_per_client."
            )
        each = pool.num_train // self.num_clients // self.classes_per_client
        return [self._hand(classes, each, seed, client) for client in range(self.num_clients)]

    def _hand(self, classes: ClassRows, each: int, seed: int, client: int) -> np.ndarray:
        generator = numpy_generator(key(seed, "partition", client=client))
        hand = []
        for label in generator.choice(len(classes.rows), self.classes_per_client, replace=False):
            rows = classes.rows[label]
            if each > len(rows):
                raise PartitionError(
                    f"class {label} has {len(rows)} train samples, client {client} needs {each}. "
                    "Raise partition.num_clients or partition.classes_per_client."
                )
            hand.append(generator.choice(rows, each, replace=False))
        return np.concatenate(hand)
