"""Confidence intervals of a mean difference that is paired by client and by seed."""

# S seeds, N clients.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean with its confidence interval; NaN bounds where there is too little to tell."""

    mean: float
    low: float
    high: float
    freedom: float
    """Degrees of freedom of Student's t that the bounds are made with."""

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside; False where there are no bounds."""
        return self.low > 0 or self.high < 0


def paired_interval(differences: Sequence[np.ndarray], *, crossed: bool, level: float = LEVEL) -> Interval:
    """The mean of differences over clients and seeds, every seed counting the same.

    With one seed the clients are the sample. With several, where each seed has drawn its own clients (nested)
    the means of the seeds are the sample: they vary by clients, too. Where the same clients are in every seed
    (crossed), `d_si = mean + seed_s + client_i + rest_si`, all random, and the variance of the mean is
    `(MS_seeds + MS_clients - MS_rest) / (S N)` with Satterthwaite's degrees of freedom; a component that
    comes out negative counts as zero.

    Args:
        differences: of each seed, `[N]`; in the same order of clients if `crossed`.
        crossed: whether client i is the same one, with the same samples, in every seed.
        level: of confidence.
    """
    means_S = np.array([own.mean() for own in differences])
    mean = float(means_S.mean())
    if len(differences) == 1:
        clients = differences[0]
        variance, freedom = _of_mean(clients), float(len(clients) - 1)
    elif not crossed:
        variance, freedom = _of_mean(means_S), float(len(means_S) - 1)
    else:
        variance, freedom = _of_crossed(np.stack(differences))
    if freedom < 1:
        return Interval(mean, np.nan, np.nan, freedom)
    half = float(t.ppf((1 + level) / 2, freedom) * np.sqrt(variance))
    return Interval(mean, mean - half, mean + half, freedom)


def _of_mean(values: np.ndarray) -> float:
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else np.nan


def _of_crossed(d_SN: np.ndarray) -> tuple[float, float]:
    """Variance of the mean of a two-way table without repetitions, and its degrees of freedom."""
    seeds, clients = d_SN.shape
    if clients == 1:
        return _of_mean(d_SN[:, 0]), float(seeds - 1)
    rest_SN = d_SN - d_SN.mean(1, keepdims=True) - d_SN.mean(0) + d_SN.mean()
    ms_seeds = clients * d_SN.mean(1).var(ddof=1)
    ms_clients = seeds * d_SN.mean(0).var(ddof=1)
    ms_rest = float((rest_SN**2).sum()) / ((seeds - 1) * (clients - 1))
    cells = seeds * clients
    if ms_seeds <= ms_rest:
        return float(max(ms_clients, ms_rest) / cells), float(clients - 1)
    if ms_clients <= ms_rest:
        return float(ms_seeds / cells), float(seeds - 1)
    total = ms_seeds + ms_clients - ms_rest
    spread = (
        ms_seeds**2 / (seeds - 1) + ms_clients**2 / (clients - 1) + ms_rest**2 / ((seeds - 1) * (clients - 1))
    )
    return float(total / cells), float(total**2 / spread)
