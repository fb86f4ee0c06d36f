"""The hub: it samples participants, prepares what they receive, and aggregates. Knows nothing of Ray."""

# S participants of a round.

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypfl.engine.host import Upload, Work, columns_of
from raypfl.engine.messages import stack, take, trim
from raypfl.engine.world import World
from raypfl.records import checkpoints
from raypfl.records.manifest import Part


class Opening(NamedTuple):
    """What the driver gets to know of a round's plan."""

    participants: int
    uploads: int
    """How many of them upload."""
    traffic: dict[str, Any]
    """Messages to participants, by column."""
    diagnostics: dict[str, float]
    """What the method says about its step, by name."""
    seconds: float


class Hub:
    """Owns the server's state of one run.

    Args:
        world: the run.
        dealt: the client ids that live on each host.
    """

    def __init__(self, world: World, dealt: Sequence[Tensor], device: torch.device) -> None:
        self.world, self.dealt, self.device = world, dealt, device
        self.net, self.method = world.network(device), world.method()
        self.clients = world.clients(device)
        self.restore(None)

    def restore(self, checkpoint: Path | None) -> None:
        """Go back to a checkpoint, or to the state before the first round."""
        if checkpoint is None:
            self.hub = self.method.init_hub(self.net, self.clients)
        else:
            rows = checkpoints.read_hub(checkpoint, self.method.hub_type)
            self.hub = type(rows)(*(field.to(self.device) for field in rows))

    def save(self, building: Path) -> Part:
        """Write the server's part of a checkpoint."""
        return checkpoints.write_part(building, checkpoints.HUB, self.hub)

    def open(
        self, round: int, *, train: bool, evaluate_pre: bool, evaluate_post: bool
    ) -> tuple[Opening, list[Work]]:
        """Plan a round and prepare one piece of work a host."""
        begin = time.perf_counter()
        method = self.method
        self.plan = method.plan(self.net, self.hub, self.clients, round, self._sample)
        down = method.download(self.net, self.hub, self.plan)
        work = []
        ids, uploads = self.plan.ids.cpu(), self.plan.uploads.cpu()
        for own in self.dealt:
            here = torch.isin(ids, own).nonzero()[:, 0]
            part = trim(take(down, here.to(self.device), method.shared), method.pools)
            work.append(Work(round, ids[here], uploads[here], part, train, evaluate_pre, evaluate_post))
        messages = method.sent_down(self.net, self.plan, down) if train else []
        seconds = time.perf_counter() - begin
        wanted = train and self.world.config.evaluation.diagnostics
        diagnostics = method.diagnose(self.net, self.hub, self.plan, down) if wanted else {}
        sending = int(uploads.sum())
        return Opening(len(ids), sending, columns_of(messages), diagnostics, seconds), work

    def close(self, uploads: Sequence[Upload]) -> float:
        """Aggregate the round that was opened last; returns the seconds it took."""
        begin = time.perf_counter()
        plan = self.plan.of_senders()
        if not len(plan.ids):
            return time.perf_counter() - begin
        up = stack([(upload.ids, upload.up) for upload in uploads], plan.ids)
        self.hub = self.method.aggregate(self.net, self.hub, up, plan)
        return time.perf_counter() - begin

    def _sample(self, round: int) -> Tensor:
        return self.world.sample(round).to(self.device)
