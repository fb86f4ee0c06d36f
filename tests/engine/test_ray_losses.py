"""Actors and nodes that are killed in the middle of a round leave no trace in the results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import stumbling
from failures import Notes, break_down, repair
from ray.exceptions import ObjectStoreFullError
from ray_nodes import NODE_CPUS, Nodes
from saboteur import Moment, Saboteur, kill_host, kill_hub
from small_runs import (
    STEPS_A_ROUND,
    STOPPING,
    assert_same_run,
    begun,
    drive,
    small_world,
    wait_until_ended,
)

import raypfl
from raypfl.engine import ray as ray_engine
from raypfl.engine.contract import HostsLost
from raypfl.engine.local import LocalEngine
from raypfl.engine.ray import Crew, RayEngine, share
from raypfl.records import storage
from raypfl.result import Result

pytestmark = pytest.mark.slow

Note = Callable[[str, object], None]
"""Pytest's `record_property`: what is said so appears in a JUnit report."""


def test_a_killed_host_and_a_killed_hub_leave_no_trace(
    on_two_nodes: Crew, cluster: Path, tmp_path: Path, record_property: Note
) -> None:
    world, pool = small_world()
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    saboteur = Saboteur(on_two_nodes, cluster, {4: kill_host, 6: kill_hub})
    before = on_two_nodes.processes()
    engine = RayEngine(world, share(pool), on_two_nodes)
    disturbed = drive(world, engine, tmp_path / "disturbed", saboteur)
    saboteur.join()
    after = on_two_nodes.processes()
    first, second = saboteur.notes
    assert first.startswith("An actor was lost in round 4; replaced, and back to round 2.")
    assert second.startswith("An actor was lost in round 6; replaced, and back to round 4.")
    assert before["hub"] != after["hub"]
    assert len({before["host-0"], before["host-1"]} & {after["host-0"], after["host-1"]}) == 1
    assert_same_run(disturbed, undisturbed)
    record_property("seconds: host, hub", saboteur.recovered)


def test_killed_nodes_leave_no_trace(
    on_two_nodes: Crew, nodes: Nodes, tmp_path: Path, record_property: Note
) -> None:
    """The first is replaced on a third; of the second the clients move to the host that is left."""
    nodes.add(num_cpus=NODE_CPUS)
    world, pool = small_world()
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")

    def pull_the_plug(moment: Moment) -> None:
        moment.survivors_are_done()
        nodes.kill(nodes.of(stumbling.pid_of(moment.claim)))

    saboteur = Saboteur(on_two_nodes, nodes.folder, {4: pull_the_plug, 6: pull_the_plug})
    engine = RayEngine(world, share(pool), on_two_nodes)
    disturbed = drive(world, engine, tmp_path / "disturbed", saboteur)
    saboteur.join()
    # A replacement may be sent to the dead node before Ray knows that it is dead: one more loss.
    assert {note.partition(";")[0] for note in saboteur.notes} == {
        "An actor was lost in round 4",
        "An actor was lost in round 6",
    }
    assert len(on_two_nodes.hosts) == 1
    assert_same_run(disturbed, undisturbed)
    record_property("seconds: node replaced, node gone", saboteur.recovered)


@pytest.mark.parametrize("policy", ["restart", "drop_clients"])
def test_a_client_that_hangs(
    policy: str, on_two_nodes: Crew, cluster: Path, tmp_path: Path, record_property: Note
) -> None:
    world, pool = small_world(f"faults.policy={policy}", "engine.name=ray", "faults.deadline=6")
    saboteur = Saboteur(on_two_nodes, cluster, {4: until_it_is_ended})
    engine = RayEngine(world, share(pool), on_two_nodes)
    disturbed = drive(world, engine, tmp_path / "disturbed", saboteur)
    saboteur.join()
    dropped = Result(disturbed).dropped()
    # On a very busy machine others may hang, too.
    assert any("took too long in round 4" in note and "back to round 2" in note for note in saboteur.notes)
    assert set(dropped["reason"]) == (set() if policy == "restart" else {"hung"})
    assert (4 in set(dropped["round"])) == (policy == "drop_clients")
    away = {
        round: dict(zip(own["client"], own["reason"], strict=True)) for round, own in dropped.groupby("round")
    }
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed", away=away)
    assert_same_run(disturbed, undisturbed)
    record_property("seconds", saboteur.recovered)


def until_it_is_ended(moment: Moment) -> None:
    wait_until_ended(stumbling.pid_of(moment.claim))


def test_a_client_that_raises_is_left_out(
    on_two_nodes: Crew, cluster: Path, tmp_path: Path, record_property: Note
) -> None:
    world, pool = small_world("faults.policy=drop_clients")
    saboteur = Saboteur(on_two_nodes, cluster, {4: None})
    engine = RayEngine(world, share(pool), on_two_nodes)
    disturbed = drive(world, engine, tmp_path / "disturbed", saboteur)
    saboteur.join()
    (note,) = saboteur.notes
    assert (
        "raised (RuntimeError: the model stumbled) in round 4; left out of it, and back to round 2." in note
    )
    dropped = Result(disturbed).dropped()
    assert list(dropped["round"]) == [4] and list(dropped["reason"]) == ["raised"]
    away = {4: dict(zip(dropped["client"], dropped["reason"], strict=True))}
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed", away=away)
    assert_same_run(disturbed, undisturbed)
    record_property("seconds", saboteur.recovered)


def test_a_store_that_cannot_spill_is_a_loss_that_says_so(cluster: Path) -> None:
    @ray.remote(max_retries=0)
    def full() -> None:
        raise ObjectStoreFullError("no room for 80 MB.")

    with pytest.raises(HostsLost, match=r"object store is full: .*no room for 80 MB.*--object-store-memory"):
        ray_engine._results([full.remote()])


def test_storage_that_fails_for_a_while_at_hosts_and_driver(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On storage without renaming hosts send their parts; the checkpoint of round 4 fails at all of them."""
    monkeypatch.setattr(storage, "PAUSES_SECONDS", ())
    world, pool = small_world("evaluation.every=1")
    run = tmp_path / "bucket" / "run"
    after = {3: lambda: break_down(run), 5: lambda: repair(run)}
    notes = Notes(after)
    there = storage.Remote(f"local://{run}")
    drive(world, RayEngine(world, share(pool), crew), there, notes)
    assert [note.partition(" ")[0] for note in notes.texts] == ["cannot", "Storage"]
    assert_same_run(there, drive(world, LocalEngine(world, pool), tmp_path / "undisturbed"))


def test_an_actor_that_dies_between_rounds_is_noticed_by_the_next(crew: Crew) -> None:
    world, pool = small_world()
    engine = RayEngine(world, share(pool), crew)
    os.kill(crew.processes()["host-1"], signal.SIGKILL)
    with pytest.raises(HostsLost):
        engine.round(1, evaluate_pre=False, evaluate_post=False)
    engine.restore(None)
    assert engine.round(1, evaluate_pre=False, evaluate_post=False).participants == world.num_clients


def test_ctrl_c_in_a_terminal_reaches_no_actor(tmp_path: Path) -> None:
    """A terminal signals the whole process group, and Ray's processes are in it."""
    options = ["engine.name=ray", "engine.num_actors=2", "resources.num_cpus_per_actor=0.5"]
    with begun(tmp_path, *options, after=STEPS_A_ROUND + 1) as (process, path, claim):
        os.killpg(process.pid, signal.SIGINT)
        claim.unlink()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert STOPPING in err and "Traceback" not in err
    assert f"raypfl resume {path}" in out and "lost" not in out
    wait_until_ended(stumbling.pid_of(claim))
    world, pool = small_world()
    raypfl.resume(path, ["engine.name=local", "engine.num_actors=null"])
    assert_same_run(path, drive(world, LocalEngine(world, pool), tmp_path / "undisturbed"))
