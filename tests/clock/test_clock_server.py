"""Rounds of a server by hand: arrivals, dead-lines, over-selection, failures."""

from __future__ import annotations

import numpy as np
import pytest

from raypfl.clock import ServerRound, server_round, transfer_seconds

END = np.array([4.0, 1.0, 3.0, 9.0])
NOBODY = np.zeros(4, dtype=bool)


def of(wanted: int = 4, deadline: float | None = None, **changes: np.ndarray) -> ServerRound:
    given = {"uploads": ~NOBODY, "failed": NOBODY, **changes}
    return server_round(END, wanted=wanted, deadline=deadline, **given)


def test_without_limits_the_slowest_ends_the_round() -> None:
    assert of().outcome.tolist() == ["done"] * 4 and of().seconds == 9.0


def test_a_dead_line_leaves_out_who_is_later_and_is_waited_for() -> None:
    found = of(deadline=4.0)
    assert found.outcome.tolist() == ["done", "done", "done", "late"]
    assert found.seconds == 4.0, "on the dot is in time"
    assert of(deadline=3.5).outcome.tolist() == ["late", "done", "done", "late"]
    assert of(deadline=3.5).seconds == 3.5
    assert of(deadline=0.5).outcome.tolist() == ["late"] * 4 and of(deadline=0.5).seconds == 0.5
    assert of(deadline=20.0).seconds == 9.0, "nobody waits when all are in"


def test_of_more_than_are_wanted_the_first_are_taken() -> None:
    found = of(wanted=2)
    assert found.outcome.tolist() == ["surplus", "done", "done", "surplus"]
    assert found.seconds == 3.0
    both = of(wanted=2, deadline=2.0)
    assert both.outcome.tolist() == ["late", "done", "late", "late"] and both.seconds == 2.0


def test_of_those_who_come_together_the_lowest_are_taken() -> None:
    found = server_round(np.ones(3), uploads=~NOBODY[:3], failed=NOBODY[:3], wanted=2, deadline=None)
    assert found.outcome.tolist() == ["done", "done", "surplus"]


def test_who_fails_is_noticed_at_once_without_a_dead_line() -> None:
    fails = np.array([False, False, False, True])
    found = of(failed=fails)
    assert found.outcome.tolist() == ["done", "done", "done", "failed"] and found.seconds == 4.0
    assert of(failed=fails, deadline=7.0).seconds == 7.0, "the server cannot know that nobody comes"
    assert of(failed=fails, wanted=3, deadline=7.0).seconds == 4.0
    assert of(failed=~NOBODY).seconds == 0.0


def test_who_only_trains_is_not_waited_for() -> None:
    senders = np.array([True, True, True, False])
    found = of(uploads=senders, deadline=5.0)
    assert found.outcome.tolist() == ["done"] * 4 and found.seconds == 4.0
    assert of(uploads=NOBODY).seconds == 9.0


def test_transfer() -> None:
    seconds = transfer_seconds(
        np.array([0, 100, 100]), np.array([1.0, 1.0, 2.0]), np.array([50.0, 50.0, np.inf])
    )
    assert seconds.tolist() == pytest.approx([0.0, 3.0, 2.0])
