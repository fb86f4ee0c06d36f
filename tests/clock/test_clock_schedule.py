"""Whose turn comes when, by hand."""

from __future__ import annotations

import numpy as np

from raypfl.clock import Schedule


def played(
    offset: list[float], compute: list[float], *, iterations: int, period: float = 0.0
) -> list[tuple[float, str]]:
    """What happens when: `b0` client 0 begins, `e0` it ends."""
    schedule = Schedule(np.array(offset), iterations=iterations, period=period)
    events = []
    while (turn := schedule.next()) is not None:
        events.append((turn.time, f"{'b' if turn.begins else 'e'}{turn.client}"))
        if turn.begins:
            schedule.begin(turn.client, compute[turn.client], failed=False)
        else:
            schedule.end(turn.client, published=True)
    return events


def test_equally_fast_all_end_before_any_begins_again() -> None:
    names = [name for _, name in played([0, 0], [1, 1], iterations=2)]
    assert names == ["b0", "b1", "e0", "e1", "b0", "b1", "e0", "e1"]


def test_a_fast_one_goes_ahead_and_stops_after_its_iterations() -> None:
    assert played([0, 0], [1, 2.5], iterations=2) == [
        (0, "b0"),
        (0, "b1"),
        (1, "e0"),
        (1, "b0"),
        (2, "e0"),
        (2.5, "e1"),
        (2.5, "b1"),
        (5, "e1"),
    ]


def test_a_period_makes_those_wait_who_are_early() -> None:
    assert played([0, 1], [1, 1], iterations=2, period=2) == [
        (0, "b0"),
        (1, "e0"),
        (1, "b1"),
        (2, "e1"),
        (2, "b0"),
        (3, "e0"),
        (3, "b1"),
        (4, "e1"),
    ]
    assert [time for time, _ in played([0], [3], iterations=3, period=2)] == [0, 3, 3, 6, 6, 9]


def test_versions_and_staleness() -> None:
    schedule = Schedule(np.zeros(3), iterations=5, period=0)
    for client, seconds in enumerate((1.0, 9.0, 9.0)):
        schedule.begin(client, seconds, failed=client == 2)
    others = np.array([1, 2])
    for _ in range(2):
        schedule.end(0, published=True)
        schedule.begin(0, 1.0, failed=False)
    assert schedule.version.tolist() == [2, 0, 0]
    assert schedule.staleness(0, others).tolist() == [2, 2]
    assert schedule.staleness(1, np.array([0])).tolist() == [-2], "who is slow hears what is ahead of it"
    assert schedule.failed.tolist() == [False, False, True]
    schedule.end(2, published=False)
    assert schedule.version[2] == 0 and not schedule.failed[2] and schedule.iteration[2] == 2
