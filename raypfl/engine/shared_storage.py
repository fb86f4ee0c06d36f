"""Whether all nodes of a cluster have the same folder under the path where a run is to be kept."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors
from raypfl.records.storage import place

ANSWER_SECONDS = 60.0
"""How long a node may take to look; it may have to start a process for it."""

LOOK_SECONDS = 5.0
"""How long a network file system may take to show a new file."""


def check_seen_by_all(storage: str) -> None:
    """Write a file where the run is to be kept, and have every node look for it; nothing of it stays.

    Does nothing on one node, nor for a place that is on no machine's own file system. A path that is not
    there yet is checked by the folder that it would be made in.

    Raises:
        StorageError: names the nodes that do not see it.
    """
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in found if node["Alive"]}
    folder = place(storage)
    if len(nodes) < 2 or not isinstance(folder, Path):
        return
    while not folder.exists():
        folder = folder.parent
    probe = folder / f".raypfl-{secrets.token_hex(8)}"
    with storage_errors(probe):
        probe.touch()
    try:
        look: Any = ray.remote(_is_there)
        answers = {
            look.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(str(probe), LOOK_SECONDS): address
            for node, address in nodes.items()
        }  # fmt: skip
        done, late = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_SECONDS)
        blind = [answers[answer] for answer in done if not ray.get(answer)]
    finally:
        probe.unlink()
    if blind:
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise StorageError(
            f"storage_path = {storage}: what {here} writes there is not seen on {', '.join(sorted(blind))}. "
            "Every node writes its part of a checkpoint, so name a folder that all of them share, such "
            "as one on NFS."
        )
    if late:
        silent = ", ".join(sorted(answers[answer] for answer in late))
        raise StorageError(
            f"storage_path = {storage}: {silent} did not look for it within {ANSWER_SECONDS:g} s. See "
            "`ray status`; a node that has no room for one more process cannot take part."
        )


def _is_there(path: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (there := Path(path).exists()) and time.monotonic() < end:
        time.sleep(0.2)
    return there
