"""Nodes whose object store is full in the middle of a run: it spills, or the run ends and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import stumbling
from failures import Notes
from full_store import MODEL, PIECE_BYTES, ballast_on
from ray_nodes import STORE_BYTES, Nodes
from small_runs import assert_same_run, drive, last_state, small_world

import raypfl
from raypfl.engine.local import LocalEngine
from raypfl.engine.ray import Crew, RayEngine, share

pytestmark = pytest.mark.slow


def test_messages_that_find_no_room_are_spilled_and_come_back(
    on_two_nodes: Crew, nodes: Nodes, tmp_path: Path
) -> None:
    world, pool = small_world(MODEL)
    pids = on_two_nodes.processes()
    ballast = [ballast_on(nodes.of(pids[name])) for name in ("host-0", "host-1")]
    more = STORE_BYTES // PIECE_BYTES + 2

    def fill() -> None:
        ray.get([own.take.remote(more) for own in ballast])

    notes = Notes({3: fill})
    disturbed = drive(world, RayEngine(world, share(pool), on_two_nodes), tmp_path / "disturbed", notes)
    assert notes.texts == []
    assert_same_run(disturbed, drive(world, LocalEngine(world, pool), tmp_path / "undisturbed"))


def test_a_store_that_is_full_ends_the_run_with_what_to_do_and_a_whole_checkpoint(
    cluster: Path, tmp_path: Path
) -> None:
    """The server is beside the host, whose node's store is full, or on the other node."""
    program = Path(__file__).with_name("full_store.py")
    environment = stumbling.environment(tmp_path) | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    world, pool = small_world(MODEL)
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    for server, told in json.loads(done.stdout.splitlines()[-1]).items():
        run = tmp_path / server
        assert "in round 4: A node's object store is full: " in told, told
        assert ". Give nodes more (--object-store-memory" in told
        assert "\\x" not in told, "Ray's own address of a message helps nobody"
        assert f"Last good checkpoint: {run}/checkpoints/round-000002." in told
        assert last_state(run, "fedamp")[0] == 2
        raypfl.resume(run, ["engine.name=local"])
        assert_same_run(run, undisturbed)
