"""One round's clients in a few numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ClientStatistics(NamedTuple):
    """Over the clients that have samples in the split; accuracies in [0, 1]; NaN where there is none."""

    clients: int  # how many clients these numbers are over
    accuracy_mean: float  # uniform: every client counts the same
    accuracy_weighted: float  # by samples: every sample counts the same
    accuracy_sd: float  # over clients, divisor `clients` (ddof 0): the clients are the population
    accuracy_worst_decile: float  # mean of the worst 10 % of clients, rounded down, at least one
    loss_mean: float  # uniform


EMPTY = ClientStatistics(0, *[float("nan")] * 5)


def client_statistics(accuracy: np.ndarray, loss: np.ndarray, samples: np.ndarray) -> ClientStatistics:
    """Summarise clients, arrays [clients] each. The sums run in the order given, so sort by client first."""
    present = samples > 0
    if not present.any():
        return EMPTY
    accuracy, loss, samples = accuracy[present], loss[present], samples[present]
    worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
    return ClientStatistics(
        clients=len(accuracy),
        accuracy_mean=float(accuracy.mean()),
        accuracy_weighted=float(accuracy @ samples / samples.sum()),
        accuracy_sd=float(accuracy.std()),
        accuracy_worst_decile=float(worst.mean()),
        loss_mean=float(loss.mean()),
    )
