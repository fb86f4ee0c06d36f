"""A Ray cluster of several nodes on this machine: raylets with object stores and workers of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import stumbling

STORE_BYTES = 80 << 20
"""Of each node's object store: hardly more than the least that Ray accepts."""
NODE_CPUS = 7
"""Of a node beside the head: more than that has, so a host that asks for all of them is alone on one."""


class Nodes:
    """A cluster on this machine, to which nodes are added and of which they are killed.

    Args:
        folder: in which its actors are asked to stumble.
        settings: of Ray, for all nodes.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        # Here, since tests are collected also where Ray is not needed.
        from ray.cluster_utils import Cluster

        self.folder = folder
        self._ray: Any = Cluster()
        system = {"prestart_worker_first_driver": False, **(settings or {})}
        self.add(num_cpus=6, include_dashboard=False, _system_config=system)

    @property
    def address(self) -> str:
        return str(self._ray.address)

    def add(self, **options: Any) -> Any:
        """Start one more node: a raylet with an object store and workers of its own."""
        with pytest.MonkeyPatch.context() as patch:
            # Actors have the environment that their node was started in.
            for name, value in stumbling.environment(self.folder).items():
                patch.setenv(name, value)
            return self._ray.add_node(object_store_memory=STORE_BYTES, **options)

    def beside_the_head(self, count: int) -> None:
        """Have so many other nodes, of `NODE_CPUS` each."""
        while len(self._ray.worker_nodes) < count:
            self.add(num_cpus=NODE_CPUS)

    def kill(self, node: Any) -> None:
        """Kill all processes of a node, as if its plug were pulled."""
        workers = [pid for pid in running() if raylet(node) in ancestors(pid)]
        self._ray.remove_node(node, allow_graceful=False)
        # Else they live on for a moment, until they notice.
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def of(self, pid: int) -> Any:
        """The node that a worker process belongs to."""
        (node,) = [node for node in self._ray.list_all_nodes() if raylet(node) in ancestors(pid)]
        return node

    def close(self) -> None:
        self._ray.shutdown()


def raylet(node: Any) -> int:
    (running,) = node.all_processes["raylet"]
    return int(running.process.pid)


def running() -> list[int]:
    return [int(found.name) for found in Path("/proc").iterdir() if found.name.isdecimal()]


def ancestors(pid: int) -> Iterator[int]:
    # A process may end while it is looked at.
    with suppress(FileNotFoundError, ProcessLookupError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid
