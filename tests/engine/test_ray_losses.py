"""Actors that are killed in the middle of a round leave no trace in the results."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import stumbling
from small_runs import STEPS_A_ROUND, STOPPING, assert_same_run, begun, drive, small_world, wait_until_ended

import raypfl
from raypfl.console import Console
from raypfl.engine.contract import HostsLost
from raypfl.engine.local import LocalEngine
from raypfl.engine.ray import Crew, RayEngine, share

pytestmark = pytest.mark.slow


class Saboteur(Console):
    """After a round, makes a client block in the next one and meanwhile kills an actor; keeps the notes.

    Args:
        victims: by round, `host` (the one with the blocked client, once the other has finished) or `hub`.
    """

    def __init__(self, crew: Crew, folder: Path, victims: dict[int, str]) -> None:
        self.crew, self.folder, self.victims = crew, folder, dict(victims)
        self.notes: list[str] = []
        self.threads: list[threading.Thread] = []

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        victim = self.victims.pop(round + 1, None)
        if victim is not None:
            strike: Callable[[dict[str, int]], None] = self.kill_host if victim == "host" else self.kill_hub
            stumbling.ask(self.folder, "block")
            self.threads.append(threading.Thread(target=strike, args=(self.crew.processes(),)))
            self.threads[-1].start()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def kill_host(self, pids: dict[str, int]) -> None:
        claim = stumbling.claimed(self.folder)
        blocked = [pids["host-0"], pids["host-1"]].index(stumbling.pid_of(claim))
        # Calls of an actor are worked off in turn: this one answers when the survivor's round is done.
        ray.get(self.crew.hosts[1 - blocked].ready.remote())
        os.kill(stumbling.pid_of(claim), signal.SIGKILL)
        claim.unlink()

    def kill_hub(self, pids: dict[str, int]) -> None:
        claim = stumbling.claimed(self.folder)
        os.kill(pids["hub"], signal.SIGKILL)
        claim.unlink()


def test_a_killed_host_and_a_killed_hub_leave_no_trace(crew: Crew, cluster: Path, tmp_path: Path) -> None:
    world, pool = small_world()
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    saboteur = Saboteur(crew, cluster, {4: "host", 6: "hub"})
    before = crew.processes()
    disturbed = drive(world, RayEngine(world, share(pool), crew), tmp_path / "disturbed", saboteur)
    for thread in saboteur.threads:
        thread.join()
    after = crew.processes()
    first, second = saboteur.notes
    assert first.startswith("An actor was lost in round 4; replaced, and back to round 2.")
    assert second.startswith("An actor was lost in round 6; replaced, and back to round 4.")
    assert before["hub"] != after["hub"]
    assert len({before["host-0"], before["host-1"]} & {after["host-0"], after["host-1"]}) == 1
    assert_same_run(disturbed, undisturbed)


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
