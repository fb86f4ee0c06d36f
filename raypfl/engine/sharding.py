"""Several servers as one: each holds a part of the columns of all rows, and they do the same steps.

Every server runs the method's own code on its columns. Where that code needs a sum over all columns (a
distance), every server stops at the same point with what its sections contribute; the contributions are
added in the order of the sections, and all begin the step again with the sum (`algebra.columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from raypfl.algebra.columns import Shard, SumAsked, add
from raypfl.engine.columns import cut, join
from raypfl.engine.host import Upload, Work
from raypfl.engine.hub import Closing, Hub, Opening
from raypfl.engine.phases import beside, together
from raypfl.engine.world import World, server_threads
from raypfl.records.manifest import Part
from raypfl.records.storage import Place

Told = TypeVar("Told", Opening, Closing)


def add_parts(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what the sections of all servers contribute, from the first to the last.

    Args:
        parts: of each server in turn, `[sections, ...]`.
    """
    return add(section.clone() for part in parts for section in part)


def join_work(parts: Sequence[Work], columns: frozenset[str]) -> Work:
    """One host's work from what each server prepared of it."""
    return parts[0]._replace(down=join([part.down for part in parts], columns))


def cut_uploads(uploads: Sequence[Upload], columns: frozenset[str], shard: Shard) -> list[Upload]:
    """What one server gets of uploads."""
    return [upload._replace(up=cut(upload.up, columns, shard)) for upload in uploads]


class ShardedHub:
    """The servers of a run in one process; does what `Hub` does."""

    def __init__(self, world: World, dealt: Sequence[Tensor], device: torch.device) -> None:
        count, threads = world.config.server.sharding, server_threads(world.config, device)
        self.shards = [Hub(world, dealt, device, Shard(index, count), threads) for index in range(count)]
        first = self.shards[0]
        self.world, self.net, self.method, self.clients = world, first.net, first.method, first.clients
        self.timing = None

    @property
    def hub(self) -> Any:
        """The state of all servers, put together."""
        return join([shard.hub for shard in self.shards], self.method.columns)

    def open(self, round: int, **due: Any) -> tuple[Opening, list[Work]]:
        """See `Hub.open`."""
        sums: list[Tensor] = []
        while True:
            found = [opened_or_asked(shard, sums, round=round, **due) for shard in self.shards]
            asked = [part for part in found if isinstance(part, Tensor)]
            if not asked:
                break
            assert len(asked) == len(found), "servers did not come to the same point"
            with self.shards[0].working():
                sums.append(add_parts(asked))
        opened = [part for part in found if not isinstance(part, Tensor)]
        work = [
            join_work(parts, self.method.columns) for parts in zip(*(work for _, work in opened), strict=True)
        ]
        return _one_after_another([own for own, _ in opened]), work

    def close(self, uploads: Sequence[Upload]) -> Closing:
        """See `Hub.close`."""
        columns = self.method.columns
        return _one_after_another(
            [shard.close(cut_uploads(uploads, columns, shard.shard)) for shard in self.shards]
        )

    def save(self, building: Place) -> list[Part]:
        """See `Hub.save`."""
        return [part for shard in self.shards for part in shard.save(building)]

    def restore(self, checkpoint: Place | None) -> None:
        """See `Hub.restore`."""
        for shard in self.shards:
            shard.restore(checkpoint)


def _one_after_another(told: Sequence[Told]) -> Told:
    """What one server would say, of all of them in one process."""
    seconds, phases = sum(own.seconds for own in told), together(own.phases for own in told)
    return told[0]._replace(seconds=seconds, phases=phases)


def side_by_side(told: Sequence[Told]) -> Told:
    """What one server would say, of several that work at the same time."""
    seconds, phases = max(own.seconds for own in told), beside([own.phases for own in told])
    return told[0]._replace(seconds=seconds, phases=phases)


def opened_or_asked(hub: Hub, sums: Sequence[Tensor], **due: Any) -> tuple[Opening, list[Work]] | Tensor:
    """What a server prepares for a step, or what it contributes to a sum that it needs for that.

    Args:
        hub: the server.
        sums: see `Hub.open`.
        due: its other arguments.
    """
    try:
        return hub.open(**due, sums=sums)
    except SumAsked as question:
        return question.parts


def hub_of(world: World, dealt: Sequence[Tensor], device: torch.device) -> Hub | ShardedHub:
    """The server of a run, or all of them, in one process."""
    if world.config.server.sharding > 1:
        return ShardedHub(world, dealt, device)
    return Hub(world, dealt, device, threads=server_threads(world.config, device))
