"""Peers that pull from others: who does not answer in time, and how long the pulling takes."""

# N peers, E edges from a source to a receiver that pulls from it.

from __future__ import annotations

import numpy as np

from raypfl.clock.speeds import Speeds, transfer_seconds


def answer_seconds(receivers: np.ndarray, sources: np.ndarray, latency: np.ndarray) -> np.ndarray:
    """When a first answer arrives, float64 `[E]`: the request and the answer pass both links."""
    seconds: np.ndarray = 2 * (latency[receivers] + latency[sources])
    return seconds


def unanswered(
    receivers: np.ndarray,
    sources: np.ndarray,
    *,
    latency: np.ndarray,
    failed: np.ndarray,
    timeout: float | None,
) -> np.ndarray:
    """Which edges carry nothing, bool `[E]`: the source has failed, or answers after the timeout."""
    silent: np.ndarray = failed[sources]
    if timeout is None:
        return silent
    return silent | (answer_seconds(receivers, sources, latency) > timeout)


def pull_seconds(
    receivers: np.ndarray,
    sources: np.ndarray,
    sent: np.ndarray,
    *,
    speeds: Speeds,
    silent: np.ndarray,
    timeout: float | None,
) -> np.ndarray:
    """How long each peer's pulling takes, float64 `[N]`; 0 where it pulls from nobody.

    All requests leave at once. Each source sends over its own link as if it sent to nobody else, and what a
    receiver gets shares its link: it has everything after the slowest answer and the slower of both ends. Who
    waits in vain for somebody waits for the timeout.

    Args:
        receivers: of each edge, those that carry nothing included, int64 `[E]`.
        sources: of each edge, int64 `[E]`.
        sent: bytes on each `[E]`.
        speeds: of all peers.
        silent: `unanswered` `[E]`.
        timeout: seconds, or None.
    """
    num = len(speeds.latency)
    answering = (sent > 0) & ~silent
    to, of, load = receivers[answering], sources[answering], sent[answering]
    slowest = np.zeros(num)
    np.maximum.at(slowest, to, answer_seconds(to, of, speeds.latency))
    sending = np.zeros(num)
    np.maximum.at(sending, to, load / speeds.bandwidth[of])
    total = np.zeros(num)
    np.add.at(total, to, load)
    receiving = transfer_seconds(total, np.zeros(num), speeds.bandwidth)
    seconds: np.ndarray = slowest + np.maximum(sending, receiving)
    if timeout is not None:
        np.maximum.at(seconds, receivers[silent], timeout)
    return seconds
