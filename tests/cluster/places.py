"""Run on a node of a two-node cluster with one CPU each and a GPU on the head: who went where, as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raypfl.engine.placement import Placement, connected
from raypfl.engine.seats import Seats
from raypfl.errors import PlacementError

ONE = Placement(2, host_cpus=0.5, host_gpus=0, server_cpus=0, server_gpus=0)
ASKED = {
    "packed": replace(ONE, hosts="pack"),
    "spread": replace(ONE, hosts="spread"),
    "apart": replace(ONE, server="apart"),
    "beside and spread": replace(ONE, hosts="spread", server="beside"),
    "halves of a GPU": replace(ONE, host_gpus=0.5, hosts="spread", server="apart"),
}


def where() -> tuple[str, str]:
    """The node of this process, and its GPUs."""
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


@ray.remote
class Actor:
    """Light: it needs nothing but Ray."""

    def where(self) -> tuple[str, str]:
        return where()

    def touch(self, data: np.ndarray) -> float:
        return float(data[0])


def start(placement: Placement, seats: Seats) -> list[Any]:
    host = {"num_cpus": placement.host_cpus, "num_gpus": placement.host_gpus}
    hosts = [Actor.options(**host, **seats.host(number)).remote() for number in range(placement.num_hosts)]
    return [Actor.options(num_cpus=placement.server_cpus, **seats.server(0)).remote(), *hosts]


def wait_until(known: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until Ray knows something that it hears of late."""
    end = time.monotonic() + seconds
    while not known():
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.1)


def all_free(nodes: list[str]) -> bool:
    """Whether Ray has taken back what was given back: hosts are packed and spread over what is free."""
    return ray.available_resources().get("CPU", 0) == len(nodes)


def copies(data: ray.ObjectRef) -> int:
    return len(ray.experimental.get_object_locations([data])[data]["node_ids"])


def places(placement: Placement, nodes: list[str]) -> list[Any]:
    """The nodes of the server and the hosts, and the GPUs they were given."""
    seats = Seats(placement)
    seats.take(60)
    actors = start(placement, seats)
    found = ray.get([actor.where.remote() for actor in actors], timeout=60)
    for actor in actors:
        ray.kill(actor)
    seats.give_back()
    wait_until(lambda: all_free(nodes))
    return [[nodes.index(node) for node, _ in found], [gpus for _, gpus in found]]


@ray.remote(num_cpus=0.25)
class Trial:
    """In the first bundle of a group that somebody else made, as a trial of Ray Tune is."""

    def run(self, address: str) -> Any:
        own, _ = where()
        asked = replace(ONE, host_cpus=0.25, server="apart", hosts="spread")
        with connected(address) as bundles:
            seats = Seats(asked)
            seats.take(60)
            found = ray.get([actor.where.remote() for actor in start(asked, seats)], timeout=60)
        return [[bundle.cpus for bundle in bundles], seats.reserved, [node == own for node, _ in found]]


def main() -> None:
    ray.init(log_to_driver=False, logging_level="error")
    alive = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
    nodes = [node["NodeID"] for node in alive]
    told: dict[str, Any] = {name: places(placement, nodes) for name, placement in ASKED.items()}
    try:
        Seats(replace(ONE, num_hosts=9, hosts="spread")).take(1)
    except PlacementError as error:
        told["too many"] = str(error)

    data = ray.put(np.ones(10**6))
    there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes for _ in range(2)]
    readers = [Actor.options(num_cpus=0, scheduling_strategy=node).remote() for node in there]
    ray.get([reader.touch.remote(data) for reader in readers], timeout=60)
    wait_until(lambda: copies(data) == len(nodes))

    # All of one node: what leaves the group finds room on the other only.
    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 0.25}, {"CPU": 0.25}], "STRICT_PACK")
    inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    trial = Trial.options(scheduling_strategy=inside).remote()
    told["trial"] = ray.get(trial.run.remote("auto"), timeout=120)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
