"""Pathological, Dirichlet and practical partitions of DiversiFed (arXiv 2407.15464).

Samplers as in the lab's framework (Fling): every client draws from the global pools, training samples from
the official training split and test samples from the official test split, with the same label distribution.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import Self

from raypfl.data.partitions.base import Concentration, Count, Independent, largest_remainder, whole
from raypfl.errors import PartitionError


class Pathological(Independent):
    """Every client draws a few classes, uniformly, and has equally many samples of each."""

    name: Literal["pathological"] = "pathological"
    num_clients: Count = 40
    classes_per_client: Count = 2

    @model_validator(mode="after")
    def _has_equal_counts(self) -> Self:
        for field, size in (("train_size", self.train_size), ("test_size", self.test_size)):
            if size % self.classes_per_client:
                raise ValueError(
                    f"{field} = {size} is not a multiple of classes_per_client = {self.classes_per_client}, "
                    f"but every class of a client has equally many samples. Use "
                    f"{size - size % self.classes_per_client or size}."
                )
        return self

    def label_counts(
        self, generator: np.random.Generator, client: int, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Independent.label_counts`."""
        if self.classes_per_client > num_classes:
            raise PartitionError(
                f"client {client} needs {self.classes_per_client} classes, the data have {num_classes}. "
                "Lower partition.classes_per_client."
            )
        chosen = np.zeros(num_classes, np.int64)
        chosen[generator.choice(num_classes, self.classes_per_client, replace=False)] = 1
        train, test = (size // self.classes_per_client for size in (self.train_size, self.test_size))
        return chosen * train, chosen * test


class Dirichlet(Independent):
    """Every client draws its class shares from Dirichlet(alpha, ..., alpha)."""

    name: Literal["dirichlet"] = "dirichlet"
    num_clients: Count = 40
    alpha: Concentration = 0.5
    """Small: few classes a client. The paper has 0.1, 0.5, 1.0 (CIFAR-100: 0.01, 0.1, 0.5)."""
    rounding: Literal["largest_remainder", "sequential"] = "largest_remainder"
    """From shares to counts. `sequential` is the lab's, which favours no class but the last one."""

    def label_counts(
        self, generator: np.random.Generator, client: int, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Independent.label_counts`."""
        shares = generator.dirichlet(np.full(num_classes, self.alpha))
        round_counts = sequential if self.rounding == "sequential" else largest_remainder
        return round_counts(shares, self.train_size), round_counts(shares, self.test_size)


class Practical(Independent):
    """Groups of clients share dominant classes; the other classes are a minority in each client.

    The groups are i mod num_groups, which gives 14, 13 and 13 of 40 clients; their dominant classes are
    consecutive and as equal in number as can be ({0,1,2}, {3,4,5}, {6,7,8} of PathMNIST's nine). Within the
    dominant and within the other part every sample's class is uniform.
    """

    name: Literal["practical"] = "practical"
    num_clients: Count = 40
    num_groups: Annotated[int, Field(ge=2)] = 3
    dominant_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8

    def label_counts(
        self, generator: np.random.Generator, client: int, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Independent.label_counts`."""
        if self.num_groups > num_classes:
            raise PartitionError(
                f"{self.num_groups} groups need a dominant class each, the data have {num_classes} classes. "
                "Lower partition.num_groups."
            )
        dominant = np.zeros(num_classes, bool)
        dominant[np.array_split(np.arange(num_classes), self.num_groups)[client % self.num_groups]] = True

        def counts(size: int) -> np.ndarray:
            major = whole(self.dominant_fraction * size)
            majority = generator.multinomial(major, dominant / dominant.sum())
            minority = generator.multinomial(size - major, ~dominant / (~dominant).sum())
            return majority + minority

        return counts(self.train_size), counts(self.test_size)


def sequential(shares: np.ndarray, total: int) -> np.ndarray:
    """Round half up, at most what is still missing; the last class takes the remainder. int64 [C]."""
    counts = np.zeros(len(shares), np.int64)
    for label, share in enumerate(shares[:-1]):
        counts[label] = min(int(share * total + 0.5), total - counts.sum())
    counts[-1] = total - counts.sum()
    return counts
