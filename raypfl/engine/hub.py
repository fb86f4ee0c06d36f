"""The hub: it samples participants, prepares what they receive, and aggregates. Knows nothing of Ray."""

# S participants of a round.

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.phases import Phase
from raypfl.engine.host import Upload, Work, columns_of
from raypfl.engine.messages import stack, take, trim
from raypfl.engine.own_pace import OwnPace
from raypfl.engine.pace import Due, InTurn, Together
from raypfl.engine.phases import PhaseClock, Spent
from raypfl.engine.timing import Stay, Timing
from raypfl.engine.world import World
from raypfl.errors import ClientError
from raypfl.methods import Plan
from raypfl.records import checkpoints
from raypfl.records.manifest import Part
from raypfl.records.storage import Place


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
    phases: dict[Phase, Spent]
    """What the seconds were spent on; empty unless `World.phases`."""
    more: bool = False
    """Whether the round has another step after this one."""


class Closing(NamedTuple):
    """What the driver gets to know when a step's uploads are in."""

    seconds: float
    stays: list[Stay]
    """How long it took in virtual time, and for whom."""
    phases: dict[Phase, Spent]
    """What the seconds were spent on; empty unless `World.phases`."""


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
        self.watch = PhaseClock(device, on=world.phases)
        clock = world.config.clock
        self.timing = None if clock is None else Timing(world, self.net, self.method, self.clients)
        self.away: frozenset[int] = frozenset()
        self.restore(None)

    def restore(self, checkpoint: Place | None) -> None:
        """Go back to a checkpoint, or to the state before the first round."""
        self.pace = self._new_pace()
        if checkpoint is None:
            self.hub = self.method.init_hub(self.net, self.clients)
            return
        with checkpoints.at_hand(checkpoint, of_clients=False) as folder:
            rows = checkpoints.read_hub(folder, self.method.hub_type)
            self.hub = type(rows)(*(field.to(self.device) for field in rows))
            if self.timing is not None:
                self.pace.load(checkpoints.read_clock(folder))

    def save(self, building: Place) -> list[Part]:
        """Write the server's part of a checkpoint, and that of the clock if there is one."""
        parts = [checkpoints.write_part(building, checkpoints.HUB, self.hub)]
        if self.timing is not None:
            parts.append(checkpoints.write_clock(building, self.pace.state()))
        return parts

    def open(
        self,
        round: int,
        *,
        train: bool,
        evaluate_pre: bool,
        evaluate_post: bool,
        away: Collection[int] = (),
    ) -> tuple[Opening, list[Work]]:
        """Plan a round, or its next step, and prepare one piece of work a host.

        Clients that are `away` are not selected, and do not take part where nobody is selected.

        Raises:
            ClientError: nobody is left.
        """
        begin = time.perf_counter()
        method = self.method
        self.away = frozenset(away)
        with self.watch.running():
            step = self.pace.step(round, Due(train, evaluate_pre, evaluate_post))
            self.plan = step.plan
            work = []
            ids, uploads = self.plan.ids.cpu(), self.plan.uploads.cpu()
            for own in self.dealt:
                here = torch.isin(ids, own).nonzero()[:, 0]
                part = trim(take(step.down, here.to(self.device), method.shared), method.pools)
                asked = (*step.due, self.plan.round, step.shown)
                work.append(Work(round, ids[here], uploads[here], part, *asked))
        seconds = time.perf_counter() - begin
        wanted = train and step.read is not None and self.world.config.evaluation.diagnostics
        diagnostics = method.diagnose(self.net, step.read, self.plan, step.down) if wanted else {}
        sending = int(uploads.sum())
        traffic, phases = columns_of(step.messages), self.watch.take()
        return Opening(len(ids), sending, traffic, diagnostics, seconds, phases, step.more), work

    def close(self, uploads: Sequence[Upload]) -> Closing:
        """Aggregate the step that was opened last."""
        begin = time.perf_counter()
        plan, up = self.plan.of_senders(), None
        with self.watch.running():
            # An evaluation of what was received sends nothing.
            if len(plan.ids) and uploads:
                up = stack([(upload.ids, upload.up) for upload in uploads], plan.ids)
                self.hub = self.method.aggregate(self.net, self.hub, up, plan)
            stays = self.pace.close(plan, up)
        return Closing(time.perf_counter() - begin, stays, self.watch.take())

    def planned(self, round: int) -> Plan:
        """The method's plan of a round, without those who are away."""
        plan = self.method.plan(self.net, self.hub, self.clients, round, self.sample)
        # Some methods also train clients that are not selected.
        return plan.among(self._there(plan.ids)) if self.away else plan

    def sample(self, round: int) -> Tensor:
        """The clients that are selected in a round.

        Raises:
            ClientError: all of them are away.
        """
        selected = self.world.sample(round).to(self.device)
        if not self.away:
            return selected
        selected = selected[self._there(selected)]
        if not len(selected) and not self.method.without_server:
            raise ClientError(
                f"round {round} has no participants left: client(s) {sorted(self.away)} were left out of it. "
                "Repair what makes them fail, or give them a longer faults.deadline."
            )
        return selected

    def _there(self, ids: Tensor) -> Tensor:
        return ~torch.isin(ids, torch.tensor(sorted(self.away), device=self.device))

    def _new_pace(self) -> Together:
        clock = self.world.config.clock
        if clock is not None and clock.mode == "async":
            return OwnPace(self)
        return Together(self) if clock is None or clock.order == "jacobi" else InTurn(self)
