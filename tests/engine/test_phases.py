"""What the server's seconds are spent on: by a clock of the test's own, and in rounds on both engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from small_runs import small_world

from raypfl.algebra import mix, pairwise_distances, weighted_mean
from raypfl.algebra.phases import WATCHER, phase
from raypfl.engine.contract import Engine
from raypfl.engine.local import LocalEngine
from raypfl.engine.phases import PhaseClock, Spent, beside, together
from raypfl.errors import ShapeError

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every look at the wall's clock is a second after the one before, at the processor's ten."""
    wall, processor = count(), count(step=10)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(wall)))
    monkeypatch.setattr(time, "process_time", lambda: float(next(processor)))
    yield


def test_time_in_an_inner_phase_is_not_that_of_the_outer_one(ticking: None) -> None:
    clock = PhaseClock(CPU, on=True)
    with clock.running():  # looks: begin 0, enter 1, enter 2, leave 3, leave 4, end 5
        clock.enter("qp")
        clock.enter("distances")
        clock.leave()
        clock.leave()
    assert clock.take() == {"other": Spent(2, 20), "qp": Spent(2, 20), "distances": Spent(1, 10)}
    assert clock.take() == {}


def test_an_error_ends_its_phase_and_nobody_listens_afterwards(ticking: None) -> None:
    @phase("mixing")
    def fails() -> None:
        raise ShapeError("wrong")

    clock = PhaseClock(CPU, on=True)
    with pytest.raises(ShapeError), clock.running():
        fails()
    assert WATCHER.get() is None
    assert clock.take() == {"other": Spent(2, 20), "mixing": Spent(1, 10)}
    mix(torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 2))
    assert clock.take() == {}


def test_functions_of_the_algebra_say_what_they_are(ticking: None) -> None:
    rows = torch.eye(3)
    clock = PhaseClock(CPU, on=True)
    with clock.running():
        pairwise_distances(rows)
        weighted_mean(torch.ones(3), rows)
    assert set(clock.take()) == {"distances", "mixing", "other"}


def test_a_clock_that_is_off_does_not_listen() -> None:
    clock = PhaseClock(CPU, on=False)
    with clock.running():
        assert WATCHER.get() is None
    assert clock.take() == {}


def test_phases_of_several_pieces_of_work_are_added() -> None:
    parts: list[dict[Any, Spent]] = [{"qp": Spent(1, 2)}, {"qp": Spent(3, 4), "other": Spent(5, 6)}]
    assert together(parts) == {"qp": Spent(4, 6), "other": Spent(5, 6)}


def test_of_servers_that_work_at_the_same_time_the_slowest_is_waited_for() -> None:
    parts: list[dict[Any, Spent]] = [
        {"mixing": Spent(1, 2), "other": Spent(2, 4)},
        {"mixing": Spent(3, 8), "other": Spent(1, 16)},
    ]
    assert beside(parts) == {"mixing": Spent(3, 10), "other": Spent(1, 20)}
    assert beside([{}, {}]) == {}


def second_round(engine: Engine) -> Any:
    engine.round(1, evaluate_pre=False, evaluate_post=False)
    return engine.round(2, evaluate_pre=False, evaluate_post=False)


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("diversifed", {"distances", "mixing"}),
        ("fedavg", {"mixing"}),
        ("fedpac", {"qp", "mixing"}),
        ("ua_pdfl", {"distances", "mixing"}),
        ("local", set()),
    ],
)
def test_a_round_is_split_into_what_its_method_does(method: str, own: set[str]) -> None:
    world, pool = small_world(method=method)
    report = second_round(LocalEngine(world._replace(phases=True), pool))
    assert set(report.server_phases) - {"sampling", "messages", "other"} == own
    assert {"sampling", "messages", "other"} <= set(report.server_phases)
    total = sum(spent.seconds for spent in report.server_phases.values())
    assert 0.0 < total <= report.server_seconds


def test_every_server_of_several_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of both, phase by phase, with those before a sum was asked for and of the adding."""
    world, pool = small_world("server.sharding=2", "model={name: mlp, hidden: [300]}", method="diversifed")
    engine = LocalEngine(world._replace(phases=True), pool)
    engine.round(1, evaluate_pre=False, evaluate_post=False)
    wall = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(wall)))
    looks: list[int] = []
    running = PhaseClock.running

    def counted(clock: PhaseClock) -> Any:
        looks.append(1)
        return running(clock)

    monkeypatch.setattr(PhaseClock, "running", counted)
    report = engine.round(2, evaluate_pre=False, evaluate_post=False)
    # Two servers open and close; they come to sums, which the first adds, and open again.
    assert len(looks) > 4
    assert {"distances", "mixing", "sampling", "messages", "other"} == set(report.server_phases or ())
    total = sum(spent.seconds for spent in (report.server_phases or {}).values())
    # Between two looks at the clock is a second; outside of phases there are two a piece of work.
    assert report.server_seconds == total + 2 * len(looks)


def test_nothing_is_measured_unless_asked_for() -> None:
    world, pool = small_world(method="diversifed")
    assert second_round(LocalEngine(world, pool)).server_phases is None


@pytest.mark.slow
def test_the_server_of_a_cluster_says_the_same(crew: Any) -> None:
    from raypfl.engine.ray import RayEngine, share

    world, pool = small_world(method="diversifed")
    report = second_round(RayEngine(world._replace(phases=True), share(pool), crew))
    assert set(report.server_phases) == {"distances", "mixing", "sampling", "messages", "other"}
