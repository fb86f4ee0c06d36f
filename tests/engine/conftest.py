"""One Ray cluster, and one crew of actors on it, for all tests: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ray_nodes import NODE_CPUS, Nodes

if TYPE_CHECKING:
    from raypfl.engine.ray import Crew


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Ray with a head of six CPUs, by name only; this process is connected to it."""
    import ray

    started = Nodes(tmp_path_factory.mktemp("stumble"))
    ray.init(address=started.address, log_to_driver=False, logging_level="error")
    yield started
    ray.shutdown()
    started.close()


@pytest.fixture(scope="session")
def cluster(nodes: Nodes) -> Path:
    """A cluster is there; the folder in which its actors are asked to stumble."""
    return nodes.folder


@pytest.fixture
def on_two_nodes(nodes: Nodes) -> Iterator[Crew]:
    """A host on each of two nodes that they have for themselves, and a hub on any."""
    from raypfl.engine.placement import Placement
    from raypfl.engine.ray import Crew

    try:
        nodes.beside_the_head(2)
    except Exception as error:
        pytest.skip(f"needs several Ray nodes on this machine, which do not start: {error}")
    with closing(Crew(Placement(2, host_cpus=NODE_CPUS, host_gpus=0, server_cpus=0, server_gpus=0))) as crew:
        crew.complete()
        pids = crew.processes()
        assert nodes.of(pids["host-0"]) is not nodes.of(pids["host-1"])
        yield crew


@pytest.fixture(scope="session")
def crew(cluster: Path) -> Iterator[Crew]:
    """Two hosts with one CPU each, and a hub that asks for none."""
    from raypfl.engine.placement import Placement
    from raypfl.engine.ray import Crew

    with closing(Crew(Placement(2, host_cpus=1, host_gpus=0, server_cpus=0, server_gpus=0))) as crew:
        crew.complete()
        yield crew
