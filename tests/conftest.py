"""What all tests share: one torch thread, real data where there is some, no GPU tests without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray_nodes import Nodes

REPOSITORY = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)
# What tests write into configuration files; subprocesses have it, too.
os.environ["RAYPFL_ALLOW_IMPORTS"] = "stumbling"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        joins = {"cluster", "nodes"} & set(getattr(item, "fixturenames", ()))
        if joins or item.path.parent.name == "bench" or item.path.name == "test_local_cluster.py":
            # One worker has the cluster, and what else starts actors: two at once would share two cores.
            item.add_marker(pytest.mark.xdist_group("ray"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with MNIST/raw, FashionMNIST/raw, cifar10/*.npz and cifar100/*.npz."""
    named = os.environ.get("RAYPFL_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs real data: {folder} is not there; set RAYPFL_DATA to a folder that has them")
    return folder


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
