"""The Ray engine gives the local engine's bits, keeps tensors out of the driver, and says what went wrong."""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
import stumbling
from small_runs import CONFIG, assert_same_run, drive, small_world, wait_until_ended

import raypfl
from raypfl.engine import ray as ray_engine
from raypfl.engine.local import LocalEngine
from raypfl.engine.placement import Placement
from raypfl.engine.ray import Crew, RayEngine, share
from raypfl.errors import ClientError, ConfigError, DivergedError, PlacementError
from raypfl.methods import METHODS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def half_cores(cluster: Path) -> Iterator[Crew]:
    """Three hosts with half a CPU each, and a hub with half a CPU too."""
    with closing(Crew(Placement(3, host_cpus=0.5, host_gpus=0, server_cpus=0.5, server_gpus=0))) as crew:
        crew.complete()
        yield crew


@pytest.mark.parametrize("method", METHODS)
def test_three_hosts_equal_one_process(method: str, half_cores: Crew, tmp_path: Path) -> None:
    world, pool = small_world("rounds=3", "resources.num_cpus_per_actor=0.5", method=method)
    here = drive(world, LocalEngine(world, pool), tmp_path / "local")
    there = drive(world, RayEngine(world, share(pool), half_cores), tmp_path / "ray")
    assert_same_run(there, here, method)


@pytest.mark.parametrize("method", METHODS)
def test_partial_participation_equals_one_process(method: str, crew: Crew, tmp_path: Path) -> None:
    world, pool = small_world("rounds=4", "participation.fraction=0.5", method=method)
    here = drive(world, LocalEngine(world, pool), tmp_path / "local")
    there = drive(world, RayEngine(world, share(pool), crew), tmp_path / "ray")
    assert_same_run(there, here, method)


@pytest.mark.parametrize(
    ("method", "clock"),
    [
        ("fedavg", "{compute: {name: given, values: [1, 1, 9, 1]}, deadline: 3, over_selection: 2}"),
        ("ua_pdfl", "{order: gs_random, drop_out: 0.2, timeout: 3}"),
        ("ua_pdfl", "{mode: async, compute: {name: lognormal, median: 1}, bandwidth: 2e3}"),
    ],
)
def test_under_a_clock_two_hosts_equal_one_process(
    method: str, clock: str, crew: Crew, tmp_path: Path
) -> None:
    half = "participation.fraction=0.5" if method == "fedavg" else "participation.fraction=1.0"
    world, pool = small_world("rounds=3", half, f"clock={clock}", method=method)
    here = drive(world, LocalEngine(world, pool), tmp_path / "local")
    there = drive(world, RayEngine(world, share(pool), crew), tmp_path / "ray")
    assert_same_run(there, here, method)
    times = [raypfl.Result(path).clock().drop(columns="run") for path in (here, there)]
    assert len(times[0]) and times[0].equals(times[1])


def test_the_driver_gets_numbers_and_never_rows(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    world, pool = small_world()
    engine = RayEngine(world, share(pool), crew)
    got: list[Any] = []
    real = ray.get

    def get(*arguments: Any, **options: Any) -> Any:
        got.append(real(*arguments, **options))
        return got[-1]

    def put(*_: Any, **__: Any) -> None:
        raise AssertionError("the driver put something into the store during a round")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "put", put)
    engine.round(1, evaluate_pre=True, evaluate_post=True)
    # One model is 8 * 64 + 8 + 10 * 8 + 10 = 610 floats; what came is client records and a table of messages.
    assert longest_array(got) == 4, "no array is longer than the number of clients"
    assert got and b"torch" not in pickle.dumps(got)


def longest_array(found: Any) -> int:
    """Elements of the largest array anywhere in nested containers."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list | tuple):
        return max(map(longest_array, found), default=0)
    return getattr(found, "size", 1)


def test_runs_follow_one_another_on_the_same_actors_and_leave_none_behind(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crews: list[dict[str, int]] = []
    begin = RayEngine._begin

    def noting(engine: RayEngine) -> None:
        begin(engine)
        crews.append(engine._crew.processes())

    monkeypatch.setattr(RayEngine, "_begin", noting)
    config = {**CONFIG, "name": "run", "storage_path": str(tmp_path), "rounds": 1}
    overrides = ["method=[{name: fedavg}, {name: local}]", "engine.name=ray", "engine.num_actors=1"]
    result = raypfl.run(config, overrides)
    assert {summary["method"] for summary in result.summary.values()} == {"fedavg", "local"}
    assert len(crews) == 2 and crews[0] == crews[1]
    assert ray.is_initialized(), "a cluster that the caller connected to stays connected"
    for pid in crews[0].values():
        wait_until_ended(pid)


def test_a_failing_client_shows_its_traceback_once(
    crew: Crew, cluster: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, pool = small_world()
    engine = RayEngine(world, share(pool), crew)
    stumbling.ask(cluster, "raise")
    with pytest.raises(ClientError) as failed:
        engine.round(1, evaluate_pre=False, evaluate_post=False)
    for claim in cluster.glob("claimed-*"):
        claim.unlink()
    message = str(failed.value)
    start = r"method fedamp, phase local update, client\(s\) \[\d\], round 1:\n"
    assert re.match(start, message)
    assert message.count("Traceback (most recent call last)") == 1
    assert message.endswith("RuntimeError: the model stumbled\n")
    assert failed.value.__cause__ is None and failed.value.__suppress_context__
    # Ray logs an error that nobody asked for when its last reference goes; the traceback's frames hold one.
    del failed
    gc.collect()
    engine.restore(None)
    assert not [told for told in caplog.messages if "stumbled" in told], "no echo of it from the hub"


def test_a_diverging_client_is_named_as_without_ray(crew: Crew) -> None:
    world, pool = small_world("training.optimizer.lr=1e30")
    with pytest.raises(DivergedError) as here:
        LocalEngine(world, pool).round(1, evaluate_pre=False, evaluate_post=False)
    with pytest.raises(DivergedError) as there:
        RayEngine(world, share(pool), crew).round(1, evaluate_pre=False, evaluate_post=False)
    assert "client(s) [0]" in str(here.value)
    assert re.match(r"round 1: the model of client\(s\) \[\d\] is no longer finite", str(there.value))


def test_actors_that_find_no_place_are_not_waited_for_for_ever(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "START_SECONDS", 0.5)
    wanted = Placement(1, host_cpus=1000, host_gpus=0, server_cpus=0, server_gpus=0)
    with (
        closing(Crew(wanted)) as other,
        pytest.raises(
            PlacementError, match=r"[12] of 2 actors did not start within 0.5 s. .* 1 client hosts"
        ),
    ):
        other.complete()


def test_what_a_host_cannot_build_is_said_as_without_ray(crew: Crew) -> None:
    world, pool = small_world()
    model = world.config.model.model_copy(update={"name": "stumbling:Absent"})
    world = world._replace(config=world.config.model_copy(update={"model": model}))
    with pytest.raises(ConfigError, match="module 'stumbling' has no 'Absent'"):
        RayEngine(world, share(pool), crew)
