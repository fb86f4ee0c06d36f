"""How much the server holds at its peak, counted storage by storage.

Resident memory of the server's process says little here: Ray's own growth in it is larger than all models
of a small workload. What is counted instead is every torch storage that is alive while the server works:
its state, what it prepares and what it has received. Not counted: what one operation allocates inside
itself, and the copy of sent messages that waits in Ray's store, which is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypfl.bench.workloads import Workload
from raypfl.engine.local import LocalEngine

T = TypeVar("T")


class PeakStorage(TorchDispatchMode):
    """While entered, watches the storages of every operation's results.

    Attributes:
        peak_bytes: the most that was alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def hold(self, values: object) -> None:
        """Count the tensors in these values (nested tuples, lists, dicts) for as long as they are alive."""
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {at: entry for at, entry in self._alive.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(
        self,
        func: Callable[..., T],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> T:
        """Run the operation and count what it returns."""
        out = func(*args, **(kwargs or {}))
        self.hold(out)
        return out


def server_rows(workload: Workload) -> float:
    """Peak bytes of the server over the bytes of one row a client, in a round of settled models.

    The round is one epoch in this process: how long clients train changes nothing for the server.
    """
    short = replace(workload, epochs=1)
    pool = short.pool()
    world = short.world(pool)
    engine = LocalEngine(world, pool)
    try:
        # The first round begins with one row that all clients share.
        engine.round(1, evaluate_pre=False, evaluate_post=False)
        peak = PeakStorage()
        hub = engine.hub
        with peak:
            peak.hold(hub.hub)
            _, work = hub.open(2, train=True, evaluate_pre=False, evaluate_post=False)
        uploads = [
            upload for host, own in zip(engine.hosts, work, strict=True) for upload in host.work(own)[0]
        ]
        # On their way to the hosts, and no longer the server's.
        del work
        with peak:
            peak.hold(uploads)
            hub.close(uploads)
    finally:
        engine.close()
    row = world.network(torch.device("cpu")).draw(0)
    return peak.peak_bytes / (workload.num_clients * row.nbytes)
