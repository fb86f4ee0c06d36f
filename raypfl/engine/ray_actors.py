"""The two kinds of actors of a run on Ray, each around what does the work and knows nothing of Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from raypfl.algebra.columns import Shard
from raypfl.engine.dealing import ids_of
from raypfl.engine.heap import keep_freed_memory
from raypfl.engine.host import AtWork, ClientHost, Work
from raypfl.engine.hub import Closing, Hub
from raypfl.engine.messages import decode, encode
from raypfl.engine.ray_mail import Outbox, received
from raypfl.engine.sharding import add_parts, join_work, opened_or_asked
from raypfl.engine.world import (
    World,
    as_tensor,
    server_device,
    server_threads,
    settle_arithmetic,
    training_device,
)
from raypfl.records.manifest import Part
from raypfl.records.storage import Place


class HostActor:
    """A client host as an actor; serves one run after another."""

    host: ClientHost
    GROUPS: ClassVar[dict[str, int]] = {"watch": 1}
    """A thread that answers while the host works."""

    def begin(self, world: World, blocks: Sequence[int], x: np.ndarray, y: np.ndarray) -> None:
        """Become a host of this run, at the state before its first round."""
        # The rows of the run before go first: those of two runs may not fit.
        vars(self).pop("host", None)
        settle_arithmetic(world.config.engine.threads)
        keep_freed_memory()
        self.device = training_device(world.config)
        self.host = ClientHost(world, blocks, x, y, self.device)

    def work(self, *parts: Work) -> tuple[Any, ...]:
        """Of what each server prepared; returns what each gets of the uploads, and the report."""
        columns = self.host.method.columns
        work = join_work([own._replace(down=decode(own.down, self.device)) for own in parts], columns)
        outbox = Outbox(columns, len(parts))
        _, report = self.host.work(work, outbox.put)
        return *outbox.mail, report

    def save(self, building: Place, name: str) -> list[Part]:
        """See `ClientHost.save`."""
        return self.host.save(building, name)

    def restore(self, checkpoint: Place | None) -> None:
        """Go back to a checkpoint, or to the start."""
        self.host.restore(checkpoint)

    def ready(self) -> int:
        """The process id, once the actor has started."""
        return os.getpid()

    def at_work(self) -> tuple[AtWork, float] | None:
        """What it is doing, and for how many seconds; to be called in the group `watch`."""
        work = self.host.at_work
        return None if work is None else (work, time.monotonic() - work.since)


class HubActor:
    """The hub as an actor; serves one run after another."""

    hub: Hub
    GROUPS: ClassVar[dict[str, int]] = {}

    def begin(self, world: World, dealt: Sequence[Sequence[int]], shard: Shard) -> None:
        """Become the hub of this run, or one of several, at the state before its first round."""
        vars(self).pop("hub", None)
        settle_arithmetic(world.config.engine.threads)
        keep_freed_memory()
        self.device = server_device(world.config)
        threads = server_threads(world.config, self.device, len(dealt))
        self.hub = Hub(world, [ids_of(world, blocks) for blocks in dealt], self.device, shard, threads)

    def open(self, due: Mapping[str, Any], *sums: np.ndarray) -> tuple[Any, ...]:
        """The opening and each host's work; or, where a sum is asked for, None, and what is here of it."""
        found = opened_or_asked(self.hub, [as_tensor(total).to(self.device) for total in sums], **due)
        if isinstance(found, Tensor):
            return None, found.cpu().numpy(), *(None for _ in self.hub.dealt[1:])
        opening, work = found
        return opening, *(own._replace(down=encode(own.down)) for own in work)

    def add(self, *parts: np.ndarray) -> np.ndarray:
        """A sum of what all hubs contribute."""
        with self.hub.working():
            total: np.ndarray = add_parts([as_tensor(part) for part in parts]).numpy()
        return total

    def close(self, *uploads: Sequence[Any]) -> Closing:
        """Take in every host's mail."""
        return self.hub.close(
            [
                upload._replace(up=decode(upload.up, self.device))
                for mail in uploads
                for upload in received(mail)
            ]
        )

    def save(self, building: Place) -> list[Part]:
        """See `Hub.save`."""
        return self.hub.save(building)

    def restore(self, checkpoint: Place | None) -> None:
        """Go back to a checkpoint, or to the start."""
        self.hub.restore(checkpoint)

    def ready(self) -> int:
        """The process id, once the actor has started."""
        return os.getpid()
