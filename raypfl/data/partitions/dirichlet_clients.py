"""Dirichlet over clients, one draw a class, with a cap that keeps clients from growing far above the average.

dirichlet_clients  UA-PDFL (arXiv 2412.11674): the official training split, at least 15 samples a client,
                   floor(20 %) of them to test
dirichlet_merged   FedTC (CMC 2023) with PFL-Non-IID's generator: training and test split merged, at least
                   min(40, half the average) samples, floor(75 %) to training
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np

from raypfl.data.partitions.base import Concentration, Count, Dealt, Fraction
from raypfl.data.partitions.classes import ClassRows, Split
from raypfl.data.pool import Pool
from raypfl.errors import PartitionError
from raypfl.rng import key, numpy_generator

_ATTEMPTS = 1000


class _CappedDirichlet(Dealt):
    """The generator of both."""

    alpha: Concentration = 0.5
    """Small: every class is at few clients."""
    split: ClassVar[Split]

    @abstractmethod
    def smallest(self, samples: int) -> float:
        """The least number of samples a client may end with."""

    def deal(self, pool: Pool, seed: int) -> list[np.ndarray]:
        """See `Dealt.deal`."""
        classes = ClassRows.of(pool, self.split)
        generator = numpy_generator(key(seed, "partition"))
        needed = self.smallest(int(classes.sizes.sum()))
        best = -1
        for _ in range(_ATTEMPTS):
            clients = deal_capped(classes, self.num_clients, self.alpha, generator)
            fewest = min(map(len, clients))
            if fewest >= needed:
                return clients
            best = max(best, fewest)
        raise PartitionError(
            f"{_ATTEMPTS} draws of {self.name} with alpha = {self.alpha:g} over {self.num_clients} clients "
            f"({classes.sizes.sum()} {self.split} samples) left some client with too few: at best {best} "
            f"samples, needed {needed:g}. Raise partition.alpha, or lower partition.num_clients."
        )


class DirichletClients(_CappedDirichlet):
    """Dirichlet over clients a class, size cap, official training split (UA-PDFL)."""

    name: Literal["dirichlet_clients"] = "dirichlet_clients"
    num_clients: Count = 30
    min_size: Count = 15
    """Every client has at least so many samples; else the whole draw is repeated."""
    test_fraction: Fraction = 0.2
    split: ClassVar[Split] = "train"

    def smallest(self, samples: int) -> float:
        """See `_CappedDirichlet.smallest`."""
        return self.min_size


class DirichletMerged(_CappedDirichlet):
    """Dirichlet over clients a class, size cap, both official splits merged (FedTC)."""

    name: Literal["dirichlet_merged"] = "dirichlet_merged"
    num_clients: Count = 10
    test_fraction: Fraction = 0.25
    split: ClassVar[Split] = "merged"
    round_test: ClassVar[Literal["down", "up"]] = "up"

    def smallest(self, samples: int) -> float:
        """Ten samples, the generator's batch, must be left for test; or half the average, if that is less."""
        return min(10 / self.test_fraction, samples / self.num_clients / 2)


def deal_capped(
    classes: ClassRows, num_clients: int, alpha: float, generator: np.random.Generator
) -> list[np.ndarray]:
    """Deal every class by a Dirichlet draw over the clients that hold less than the average.

    The cap is tested before a class is dealt, so a client may end above it. All samples are dealt.
    """
    average = classes.sizes.sum() / num_clients
    held = np.zeros(num_clients, np.int64)
    clients: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for rows in classes.rows:
        rows = generator.permutation(rows)
        shares = _shares(held < average, alpha, generator)
        pieces = np.split(rows, (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64))
        for client, piece in zip(clients, pieces, strict=True):
            client.append(piece)
        held += [len(piece) for piece in pieces]
    return [np.concatenate(client) for client in clients]


def _shares(open_clients: np.ndarray, alpha: float, generator: np.random.Generator) -> np.ndarray:
    """A Dirichlet draw, zero for closed clients; again where all open ones underflow (tiny alpha)."""
    for _ in range(_ATTEMPTS):
        shares = generator.dirichlet(np.full(len(open_clients), alpha)) * open_clients
        if shares.sum() > 0:
            return np.asarray(shares / shares.sum())
    raise PartitionError(
        f"{_ATTEMPTS} Dirichlet draws with alpha = {alpha:g} over {len(open_clients)} clients gave no share "
        f"to any of the {int(open_clients.sum())} clients that hold less than the average. Raise "
        "partition.alpha."
    )
