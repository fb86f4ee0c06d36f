"""FedPAC's partition (ICLR 2023): s percent over all classes, the rest over a dominant group of classes.

Client i belongs to group i mod (number of groups). The authors take samples in stored order from a pointer
per class that starts at 2000 (CIFAR train) or 500 (CIFAR test) and wraps. Here each class is shuffled with a
key and dealt from its start, so clients are disjoint; where a class does not suffice, `wrap` deals it again
from its start.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from raypfl.data.partitions.base import Count, Draw, Partition
from raypfl.data.partitions.classes import ClassRows, Split
from raypfl.data.pool import Pool
from raypfl.errors import PartitionError
from raypfl.rng import key, numpy_generator

Group = tuple[Annotated[int, Field(ge=0)], ...]

PUBLISHED_GROUPS: dict[int, tuple[Group, ...]] = {
    10: ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)),
    62: (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62))),
}
"""By the number of classes: CIFAR-10, CINIC-10, Fashion-MNIST; EMNIST (digits, capitals, small letters)."""


class FedPac(Partition):
    """Uniform part plus dominant classes, disjoint between clients."""

    name: Literal["fedpac"] = "fedpac"
    num_clients: Count = 20
    train_size: Count = 600
    """The paper's code: 600, EMNIST 1,000."""
    test_size: Count = 300
    """The paper's code: 300 (CIFAR-10, CINIC-10), 600 (Fashion-MNIST, EMNIST)."""
    uniform_percent: Annotated[int, Field(ge=0, le=100)] = 20
    """s: the part of a client's samples that is spread over all classes."""
    groups: Annotated[tuple[Group, ...], Field(min_length=1)] | None = None
    """Dominant classes of each group; null: the paper's for 10 or 62 classes."""
    wrap: bool = False
    """Deal a class again from its start when it is exhausted, so that clients share samples."""

    @field_validator("groups")
    @classmethod
    def _has_distinct_classes(cls, groups: tuple[Group, ...] | None) -> tuple[Group, ...] | None:
        for group in groups or ():
            if not group or len(set(group)) < len(group):
                raise ValueError(f"groups: {list(group)} must name at least one class and none twice.")
        return groups

    def draw(self, pool: Pool, seed: int) -> list[Draw]:
        """See `Partition.draw`."""
        groups = self._groups(pool.num_classes)
        generator = numpy_generator(key(seed, "partition"))
        train = self._deal(ClassRows.of(pool, "train").shuffled(generator), self.train_size, groups)
        test = self._deal(ClassRows.of(pool, "test").shuffled(generator), self.test_size, groups)
        return [Draw(*rows) for rows in zip(train, test, strict=True)]

    def _groups(self, num_classes: int) -> tuple[Group, ...]:
        groups = PUBLISHED_GROUPS.get(num_classes) if self.groups is None else self.groups
        if groups is None:
            raise PartitionError(
                f"fedpac has published groups for 10 and 62 classes, the data have {num_classes}. Set "
                "partition.groups, for example [[0, 1, 2], [2, 3, 4]]."
            )
        if (largest := max(map(max, groups))) >= num_classes:
            raise PartitionError(
                f"partition.groups names class {largest}, the data have classes 0..{num_classes - 1}."
            )
        return groups

    def _deal(self, classes: ClassRows, size: int, groups: tuple[Group, ...]) -> list[np.ndarray]:
        dealt = np.zeros(len(classes.rows), np.int64)
        clients = []
        for client in range(self.num_clients):
            counts = group_counts(size, self.uniform_percent, groups[client % len(groups)], len(classes.rows))
            short = counts > (classes.sizes if self.wrap else classes.sizes - dealt)
            if short.any():
                raise self._shortage(classes, int(np.argmax(short)), dealt, counts, client)
            clients.append(
                np.concatenate(
                    [
                        rows[(start + np.arange(count)) % max(len(rows), 1)]
                        for rows, start, count in zip(classes.rows, dealt, counts, strict=True)
                    ]
                )
            )
            dealt += counts
        return clients

    def _shortage(
        self, classes: ClassRows, label: int, dealt: np.ndarray, counts: np.ndarray, client: int
    ) -> PartitionError:
        split: Split = classes.split
        left = f" and {classes.sizes[label] - dealt[label]} of them left" if not self.wrap else ""
        advice = "" if self.wrap else ", or set partition.wrap=true to let clients share samples"
        return PartitionError(
            f"class {label} has {classes.sizes[label]} {split} samples{left}, client {client} needs "
            f"{counts[label]}. Lower partition.num_clients or partition.{split}_size{advice}."
        )


def group_counts(size: int, uniform_percent: int, dominant: Group, num_classes: int) -> np.ndarray:
    """Samples of each class, int64 [C]: the last class takes the remainder of either part."""
    counts = np.zeros(num_classes, np.int64)
    uniform = size * uniform_percent // 100
    for part, labels in ((uniform, range(num_classes)), (size - uniform, dominant)):
        counts[list(labels)] += part // len(labels)
        counts[labels[-1]] += part % len(labels)
    return counts
