"""Pulling from peers by hand: answers, timeouts, links that are shared."""

from __future__ import annotations

import numpy as np

from raypfl.clock import Speeds, pull_seconds, unanswered

LATENCY = np.array([0.0, 1.0, 2.0])
BANDWIDTH = np.array([100.0, 10.0, 50.0])
SPEEDS = Speeds(np.ones(3), LATENCY, BANDWIDTH, np.zeros(3))
# 0 hears 1 and 2, 1 hears 0, 2 hears nobody.
RECEIVERS, SOURCES = np.array([0, 0, 1]), np.array([1, 2, 0])
FAILED = np.zeros(3, dtype=bool)


def silent(timeout: float | None, failed: np.ndarray = FAILED) -> np.ndarray:
    return unanswered(RECEIVERS, SOURCES, latency=LATENCY, failed=failed, timeout=timeout)


def pulled(sent: list[float], timeout: float | None = None, failed: np.ndarray = FAILED) -> list[float]:
    lost = silent(timeout, failed)
    seconds = pull_seconds(
        RECEIVERS, SOURCES, np.where(lost, 0, sent), speeds=SPEEDS, silent=lost, timeout=timeout
    )
    return list(seconds)


def test_an_answer_passes_both_links_twice() -> None:
    # From 1 to 0 it takes 2 (0 + 1) = 2 s, from 2 to 0 4 s.
    assert silent(None).tolist() == [False, False, False]
    assert silent(4.0).tolist() == [False, False, False]
    assert silent(3.9).tolist() == [False, True, False]
    assert silent(1.0).tolist() == [True, True, True]


def test_who_has_failed_does_not_answer() -> None:
    assert silent(None, np.array([False, True, False])).tolist() == [True, False, False]


def test_pulling_ends_with_the_slowest_answer_and_the_slowest_link() -> None:
    # To 0: answers after 4 s; 100 bytes at 10 a second from 1 are slower than 200 at 100 into 0.
    # To 1: answers after 2 s; 30 bytes at 10 a second into 1.
    assert pulled([100.0, 100.0, 30.0]) == [14.0, 5.0, 0.0]
    # 1000 at 50 a second from 2: 20 s. Into 0 1010 at 100: 10.1 s.
    assert pulled([10.0, 1000.0, 0.0]) == [24.0, 0.0, 0.0]


def test_what_a_receiver_gets_shares_its_link() -> None:
    quick = Speeds(np.ones(3), np.zeros(3), np.array([10.0, 1000.0, 1000.0]), np.zeros(3))
    seconds = pull_seconds(
        RECEIVERS, SOURCES, np.array([50.0, 50.0, 0.0]), speeds=quick, silent=np.zeros(3, bool), timeout=None
    )
    assert seconds.tolist() == [10.0, 0.0, 0.0]


def test_who_waits_in_vain_waits_for_the_timeout() -> None:
    assert pulled([10.0, 10.0, 10.0], timeout=3.5) == [3.5, 3.0, 0.0]
    # What does come may take longer than that.
    assert pulled([100.0, 10.0, 10.0], timeout=3.5) == [12.0, 3.0, 0.0]
    # Without a timeout it is known at once who has failed.
    assert pulled([10.0, 10.0, 10.0], failed=np.array([False, True, True])) == [0.0, 3.0, 0.0]
