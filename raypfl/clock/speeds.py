"""What each client's device and link are like, drawn once a run from keys; and who fails in a round."""

# N clients.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raypfl.clock.config import Given, Law, LogNormal, VirtualClock
from raypfl.rng import key, numpy_generator


class Speeds(NamedTuple):
    """Of all clients, float64 `[N]`."""

    compute: np.ndarray
    """Seconds of a local update."""
    latency: np.ndarray
    """Seconds that the client adds to a message."""
    bandwidth: np.ndarray
    """Bytes a second, inf where that takes no time."""
    offset: np.ndarray
    """When it begins its first iteration."""


def speeds_of(clock: VirtualClock, passes: np.ndarray, sizes: np.ndarray, seed: int) -> Speeds:
    """The speeds of a run's clients.

    Args:
        clock: the options.
        passes: how often a local update goes over a client's samples `[N]`.
        sizes: training samples `[N]`.
        seed: the run's.
    """
    num = len(sizes)
    compute = _drawn(clock.compute, "compute", num, seed) * passes
    free = np.full(num, np.inf)
    return Speeds(
        compute * sizes if clock.unit == "sample" else compute,
        _drawn(clock.latency, "latency", num, seed),
        free if clock.bandwidth is None else _drawn(clock.bandwidth, "bandwidth", num, seed),
        _drawn(clock.offset, "offset", num, seed),
    )


def drops_out(clock: VirtualClock, seed: int, round: int, ids: np.ndarray) -> np.ndarray:
    """Which of some clients fail in a round, bool; who fails also does at a higher probability."""
    if clock.drop_out == 0:
        return np.zeros(len(ids), dtype=bool)
    drawn = [numpy_generator(key(seed, "drop out", round, client)).random() for client in ids.tolist()]
    return np.array(drawn) < clock.drop_out


def random_order(seed: int, round: int, ids: np.ndarray) -> np.ndarray:
    """Some clients in a new order every round."""
    return numpy_generator(key(seed, "order", round)).permutation(ids)


def transfer_seconds(sent: np.ndarray, latency: np.ndarray, bandwidth: np.ndarray) -> np.ndarray:
    """How long messages of so many bytes take; where there is none, no time."""
    return np.where(sent > 0, latency + sent / bandwidth, 0.0)


def _drawn(quantity: float | Law, name: str, num_clients: int, seed: int) -> np.ndarray:
    """Float64 `[N]`."""
    if isinstance(quantity, float):
        return np.full(num_clients, quantity)
    if isinstance(quantity, Given):
        return np.array(quantity.values)
    generators = (numpy_generator(key(seed, f"speed {name}", 0, client)) for client in range(num_clients))
    if isinstance(quantity, LogNormal):
        z = np.array([generator.normal() for generator in generators])
        spread: np.ndarray = quantity.median * np.exp(quantity.sigma * z)
        return spread
    u = np.array([generator.random() for generator in generators])
    return np.where(u < quantity.share, quantity.other, quantity.value)
