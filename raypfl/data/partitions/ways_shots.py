"""The n-way k-shot partition of FedProto (AAAI 2022, arXiv 2105.00243), after the authors' code."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import Self

from raypfl.data.partitions.base import Count, Drawn
from raypfl.errors import PartitionError


class WaysShots(Drawn):
    """Clients differ in how many classes they have and in how many samples of each.

    Of C classes, client i has n_i, uniform from max(2, ways - spread) to min(C - 1, ways + spread), and of
    each k_i training samples, uniform from shots - spread + 1 to shots + spread - 1 (at most one less
    in their code for MNIST). There, samples are consecutive within a class, and neighbours share them; here
    each client draws its own.
    """

    name: Literal["ways_shots"] = "ways_shots"
    num_clients: Count = 20
    ways: Annotated[int, Field(ge=2)] = 3
    """Classes of a client on average; the authors' script has 5 for MNIST and 4 for CIFAR-10."""
    shots: Count = 100
    """Training samples of a class on average."""
    spread: Annotated[int, Field(ge=1)] = 2
    """How far both vary."""
    test_shots: Count = 15
    """Test samples of a class, from the official test split."""
    asked = ("shots", "test_shots")

    @model_validator(mode="after")
    def _has_shots(self) -> Self:
        if self.shots < self.spread:
            raise ValueError(
                f"shots = {self.shots} and spread = {self.spread} leave clients without samples. "
                f"Use spread <= {self.shots}."
            )
        return self

    def label_counts(
        self, generator: np.random.Generator, client: int, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Drawn.label_counts`."""
        fewest, end = max(2, self.ways - self.spread), min(num_classes, self.ways + self.spread + 1)
        if fewest >= end:
            raise PartitionError(
                f"clients have {fewest} classes at least, but fewer than all {num_classes} of the data. "
                "Lower partition.ways."
            )
        chosen = np.zeros(num_classes, np.int64)
        chosen[generator.choice(num_classes, generator.integers(fewest, end), replace=False)] = 1
        shots = generator.integers(self.shots - self.spread + 1, self.shots + self.spread)
        return chosen * shots, chosen * self.test_shots
