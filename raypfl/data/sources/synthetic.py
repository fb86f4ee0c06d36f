"""Synthetic(alpha, beta) of Li et al. (FedProx, arXiv 1812.06127), as pFedMe generates it.

Client i's model and inputs are drawn around u_i ~ N(0, alpha) and B_i ~ N(0, beta), both standard deviations,
so alpha is how much models differ between clients and beta how much inputs do. The FedProx release has 30
users and sizes without the factor 5.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from raypfl.config import StrictModel
from raypfl.data.pool import Pool, fingerprint
from raypfl.rng import key

NUM_FEATURES = 60
NUM_CLASSES = 10

Deviation = Annotated[float, Field(ge=0, le=1e3)]


class SyntheticConfig(StrictModel):
    """Synthetic features, [60], 10 classes, with natural clients (`partition.name: natural`)."""

    name: Literal["synthetic"] = "synthetic"
    alpha: Deviation = 0.5
    """Standard deviation of the clients' models."""
    beta: Deviation = 0.5
    """Standard deviation of the clients' inputs."""
    num_clients: Annotated[int, Field(ge=1, le=100_000)] = 100
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = 0
    """Of NumPy's legacy generator; 0: the published data set, null: another one for every run seed."""

    def load(self, seed: int) -> Pool:
        """Generate all clients, client after client; every row counts as training split.

        The order of draws is the release's, and only NumPy's legacy generator has its stream: the one place
        where randomness does not come from a key. The stream is local, nothing global is seeded.
        """
        legacy = np.random.RandomState(key(seed, "synthetic") % 2**32 if self.seed is None else self.seed)
        clients = self.num_clients
        sizes = 5 * (legacy.lognormal(4, 2, clients).astype(np.int64) + 50)
        model_means = legacy.normal(0, self.alpha, clients)
        input_shifts = legacy.normal(0, self.beta, clients)
        covariance = np.diag(np.arange(1, NUM_FEATURES + 1) ** -1.2)
        input_means = [legacy.normal(shift, 1, NUM_FEATURES) for shift in input_shifts]

        x = np.empty((sizes.sum(), NUM_FEATURES), np.float32)
        y = np.empty(len(x), np.int64)
        ends = np.cumsum(sizes)
        for start, end, model_mean, input_mean in zip(
            ends - sizes, ends, model_means, input_means, strict=True
        ):
            weight = legacy.normal(model_mean, 1, (NUM_FEATURES, NUM_CLASSES))
            bias = legacy.normal(model_mean, 1, NUM_CLASSES)
            inputs = legacy.multivariate_normal(input_mean, covariance, end - start)
            x[start:end] = inputs
            y[start:end] = np.argmax(inputs @ weight + bias, axis=1)
        owner = np.repeat(np.arange(clients), sizes)
        return Pool(self.name, x, y, len(x), NUM_CLASSES, owner, fingerprint("synthetic", x, y, owner))
