"""Runs on two nodes of which one can spill nothing, and has its object store filled between two rounds.

Prints as JSON how each run ended. A program of its own: whether Ray spills is a setting of a whole cluster.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import ray
from failures import Notes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_nodes import NODE_CPUS, STORE_BYTES, Nodes
from small_runs import drive, small_world

from raypfl.engine.placement import Placement
from raypfl.engine.ray import FULL, Crew, RayEngine, share
from raypfl.errors import PlacementError

NO_DISK = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0}
"""Nothing is spilled, and every disk counts as full."""

PIECE_BYTES = 4 << 20
LEAST_BYTES = 128 << 10

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
        for size in (PIECE_BYTES, LEAST_BYTES, LEAST_BYTES):
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


def stopped(run: Path, server: Any, node: Any) -> str:
    """What a run says that ends in round 4, the only host on `node` and the server beside or apart."""
    world, pool = small_world(MODEL, "faults.budget=0")
    ballast = ballast_on(node)

    def fill() -> None:
        assert STORE_BYTES // 2 < ray.get(ballast.take_all.remote()) < STORE_BYTES

    placement = Placement(1, host_cpus=NODE_CPUS, host_gpus=0, server_cpus=0, server_gpus=0, server=server)
    with closing(Crew(placement)) as crew:
        crew.complete()
        try:
            drive(world, RayEngine(world, share(pool), crew), run, Notes({3: fill}))
        except PlacementError as error:
            return str(error)
        finally:
            ray.kill(ballast)
    return "nothing"


def main(folder: Path) -> None:
    with closing(Nodes(folder, NO_DISK)) as nodes:
        node = nodes.add(num_cpus=NODE_CPUS)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        told = {server: stopped(folder / server, server, node) for server in ("beside", "apart")}
        ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
