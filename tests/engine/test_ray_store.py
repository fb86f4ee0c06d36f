"""Nodes whose object store is full in the middle of a run: it spills, or the run ends and says why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from failures import Notes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_nodes import STORE_BYTES, Nodes
from small_runs import assert_same_run, drive, last_state, small_world

import raypfl
from raypfl.engine.local import LocalEngine
from raypfl.engine.placement import Placement
from raypfl.engine.ray import FULL, Crew, RayEngine, share
from raypfl.errors import PlacementError

pytestmark = pytest.mark.slow

PIECE_BYTES = 4 << 20
LEAST_BYTES = 128 << 10
MOST_CPUS = 9
"""Of a node that a host has to itself by asking for all of them: no other has so many."""

NO_DISK = {"RAY_local_fs_capacity_threshold": "0.0"}
"""Ray takes every disk for full, so that nothing is spilled."""

MODEL = "model={name: mlp, hidden: [300]}"
"""Messages of 360 kB: Ray keeps smaller ones than 100 kB out of its store."""


@ray.remote(num_cpus=0)
class Ballast:
    """Holds pieces of its node's object store."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def take(self, pieces: int) -> None:
        for _ in range(pieces):
            self.held.append(ray.put(np.ones(PIECE_BYTES, np.uint8)))

    def take_all(self) -> int:
        """Smaller and smaller pieces until nothing is left, also of what Ray frees late; their bytes."""
        taken = 0
        for size in (PIECE_BYTES, PIECE_BYTES >> 3, LEAST_BYTES, LEAST_BYTES, LEAST_BYTES):
            try:
                while True:
                    self.held.append(ray.put(np.ones(size, np.uint8)))
                    taken += size
            except FULL:
                time.sleep(0.5)
        return taken


def ballast_on(node: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return Ballast.options(scheduling_strategy=there).remote()


@pytest.fixture
def without_disk(nodes: Nodes) -> Iterator[Any]:
    """A node that cannot spill."""
    node = nodes.add(NO_DISK, num_cpus=MOST_CPUS)
    yield node
    nodes.kill(node)


def test_messages_that_find_no_room_are_spilled_and_come_back(
    on_two_nodes: Crew, nodes: Nodes, tmp_path: Path
) -> None:
    world, pool = small_world(MODEL)
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    pids = on_two_nodes.processes()
    ballast = [ballast_on(nodes.of(pids[name])) for name in ("host-0", "host-1")]
    more = STORE_BYTES // PIECE_BYTES + 2

    def fill() -> None:
        ray.get([own.take.remote(more) for own in ballast])

    engine = RayEngine(world, share(pool), on_two_nodes)
    notes = Notes({3: fill})
    disturbed = drive(world, engine, tmp_path / "disturbed", notes)
    assert notes.texts == []
    assert_same_run(disturbed, undisturbed)


@pytest.mark.parametrize("server", ["beside", "apart"])
def test_a_store_that_is_full_ends_the_run_with_what_to_do_and_a_whole_checkpoint(
    server: Any, nodes: Nodes, without_disk: Any, tmp_path: Path
) -> None:
    world, pool = small_world(MODEL, "faults.budget=0")
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    ballast = ballast_on(without_disk)

    def fill() -> None:
        assert STORE_BYTES // 2 < ray.get(ballast.take_all.remote()) < STORE_BYTES

    run = tmp_path / "run"
    placement = Placement(1, host_cpus=MOST_CPUS, host_gpus=0, server_cpus=0, server_gpus=0, server=server)
    with closing(Crew(placement)) as crew:
        crew.complete()
        assert nodes.of(crew.processes()["host-0"]) is without_disk
        engine = RayEngine(world, share(pool), crew)
        with pytest.raises(PlacementError) as stopped:
            drive(world, engine, run, Notes({3: fill}))
    told = str(stopped.value)
    assert "in round 4: A node's object store is full: " in told and "--object-store-memory" in told
    assert f"Last good checkpoint: {run}/checkpoints/round-000002." in told
    assert last_state(run, "fedamp")[0] == 2
    raypfl.resume(run, ["engine.name=local"])
    assert_same_run(run, undisturbed)
