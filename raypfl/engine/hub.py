"""The hub: it samples participants, prepares what they receive, and aggregates. Knows nothing of Ray."""

# S participants of a round.

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.columns import Held, NoSums, Shard, holding
from raypfl.algebra.phases import Phase
from raypfl.algebra.threads import on_threads
from raypfl.engine.columns import chunks, compact, cut, widened, widths
from raypfl.engine.host import Upload, Work
from raypfl.engine.messages import stack, take, trim
from raypfl.engine.own_pace import OwnPace
from raypfl.engine.pace import Due, InTurn, Together
from raypfl.engine.phases import PhaseClock, Spent
from raypfl.engine.tables import columns_of, entries_of
from raypfl.engine.threads import ThreadPool
from raypfl.engine.timing import Stay, Timing
from raypfl.engine.world import World
from raypfl.errors import ClientError
from raypfl.methods import Message, Plan
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
    pairs: list[dict[str, Any]]
    """Who collaborates with whom in this step, by column, a block a matrix."""
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


class _Widths(NamedTuple):
    """Columns of all servers together."""

    summed: int
    """Of the rows that are summed over: the widest that the server keeps."""
    sent: dict[str, int]
    """Of what is sent to participants, by field."""


WHOLE = Shard()
"""All columns in one place."""


class Hub:
    """Owns the server's state of one run.

    Args:
        world: the run.
        dealt: the client ids that live on each host.
        shard: the part of the columns that is held here, where several servers hold them together.
        threads: pieces of its distances and mixing that are worked on at once.
    """

    def __init__(
        self,
        world: World,
        dealt: Sequence[Tensor],
        device: torch.device,
        shard: Shard = WHOLE,
        threads: int = 1,
    ) -> None:
        self.world, self.dealt, self.device = world, dealt, device
        self.net, self.method = world.network(device), world.method()
        self.clients = world.clients(device)
        self.shard, self.columns = shard, self.method.columns
        self.watch = PhaseClock(device, on=world.phases)
        self._threads = ThreadPool(threads) if threads > 1 else None
        clock = world.config.clock
        self.timing = None if clock is None else Timing(world, self.net, self.method, self.clients)
        self.away: frozenset[int] = frozenset()
        self.restore(None)

    def restore(self, checkpoint: Place | None) -> None:
        """Go back to a checkpoint, or to the state before the first round."""
        self.pace = self._new_pace()
        self._storage_is_ours = False
        self._seconds = 0.0
        self.watch.take()
        if checkpoint is None:
            self.hub = self.method.init_hub(self.net, self.clients)
            if self.shard != WHOLE:
                self._whole = self._widths(self.hub)
                self.hub = compact(cut(self.hub, self.columns, self.shard), self.columns)
            return
        with checkpoints.at_hand(checkpoint, of_clients=False) as folder:
            rows = checkpoints.read_hub(folder, self.method.hub_type, self.columns, self.shard)
            self.hub = type(rows)(*(field.to(self.device) for field in rows))
            if self.timing is not None:
                self.pace.load(checkpoints.read_clock(folder))

    def save(self, building: Place) -> list[Part]:
        """Write the server's part of a checkpoint, and that of the clock if there is one."""
        parts = [checkpoints.write_hub(building, self.hub, self.shard)]
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
        sums: Sequence[Tensor] = (),
    ) -> tuple[Opening, list[Work]]:
        """Plan a round, or its next step, and prepare one piece of work a host.

        Args:
            round: counts from 1.
            train: whether hosts are asked to train,
            evaluate_pre: to evaluate what they receive,
            evaluate_post: and what they have trained.
            away: clients that are not selected, and do not take part where nobody is selected.
            sums: over the columns of all servers, that this step has asked for so far.

        Raises:
            ClientError: nobody is left.
            SumAsked: another sum is needed; open it again with that, too.
        """
        self.away = frozenset(away)
        due = Due(train, evaluate_pre, evaluate_post)
        if self.shard == WHOLE:
            return self._open(round, due)
        with holding(Held(self.shard, self._whole.summed, sums)):
            return self._open(round, due)

    def _open(self, round: int, due: Due) -> tuple[Opening, list[Work]]:
        method = self.method
        with self.working():
            step = self.pace.step(round, due)
            self.plan = step.plan
            work = []
            ids, uploads = self.plan.ids.cpu(), self.plan.uploads.cpu()
            for own in self.dealt:
                here = torch.isin(ids, own).nonzero()[:, 0]
                part = trim(take(step.down, here.to(self.device), method.shared), method.pools)
                asked = (*step.due, self.plan.round, step.shown)
                work.append(Work(round, ids[here], uploads[here], part, *asked))
        diagnostics: dict[str, float] = {}
        pairs: list[dict[str, Any]] = []
        if due.train and step.read is not None and self.world.config.evaluation.diagnostics:
            made = self.net, step.read, self.plan, step.down
            diagnostics = method.diagnose(*made)
            if step.due.evaluate_post:
                pairs = [entries_of(name, found) for name, found in method.relations(*made).items()]
        sending = int(uploads.sum())
        traffic = columns_of(step.messages)
        return Opening(len(ids), sending, traffic, diagnostics, pairs, *self._spent(), step.more), work

    def close(self, uploads: Sequence[Upload]) -> Closing:
        """Aggregate the step that was opened last."""
        plan, up = self.plan.of_senders(), None
        with self.working():
            # An evaluation of what was received sends nothing.
            if len(plan.ids) and uploads:
                up = self._aggregate(uploads, plan)
            stays = self.pace.close(plan, up)
        seconds, phases = self._spent()
        return Closing(seconds, stays, phases)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count what is done in it among what this server says next, also if it comes to a sum to ask for."""
        begin = time.perf_counter()
        try:
            with self.watch.running(), on_threads(self._threads):
                yield
        finally:
            self._seconds += time.perf_counter() - begin

    def _spent(self) -> tuple[float, dict[Phase, Spent]]:
        """Seconds of work, and by phase, since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds, self.watch.take()

    def planned(self, round: int) -> Plan:
        """The method's plan of a round, without those who are away."""
        plan = self.method.plan(self.net, self.hub, self.clients, round, self.sample)
        # Some methods also train clients that are not selected.
        return plan.among(self._there(plan.ids)) if self.away else plan

    def messages(self, plan: Plan, down: Any) -> list[Message]:
        """The messages that the real system would send, from one server with all columns."""
        whole = down if self.shard == WHOLE else widened(down, self._whole.sent)
        return self.method.sent_down(self.net, plan, whole)

    def _aggregate(self, uploads: Sequence[Upload], plan: Plan) -> Any:
        """Take in what was uploaded; returns it, unless it was too large to be held at once."""
        method, columns = self.method, self.columns
        alone = columns if self.timing is None else frozenset[str]()
        parts = chunks(self.hub, uploads[0].up, len(plan.ids), alone)
        if len(parts) == 1:
            up = stack([(upload.ids, upload.up) for upload in uploads], plan.ids)
            with holding(NoSums()) if columns else nullcontext():
                self.hub = method.aggregate(self.net, self.hub, up, plan)
            self._storage_is_ours = False
            return up
        # Rows of all clients are written where they stand: beside them there is one chunk, not all again.
        targets = {
            name: getattr(self.hub, name)
            if self._storage_is_ours
            else torch.empty_like(getattr(self.hub, name), memory_format=torch.contiguous_format)
            for name in widths(self.hub, columns)
        }
        for part in parts:
            up = stack([(upload.ids, cut(upload.up, columns, part)) for upload in uploads], plan.ids)
            with holding(NoSums()):
                new = method.aggregate(self.net, cut(self.hub, columns, part), up, plan)
            for name, target in targets.items():
                target[..., part.of(target.shape[-1])] = getattr(new, name)
        self.hub = new._replace(**targets)
        self._storage_is_ours = True
        return None

    def _widths(self, start: Any) -> _Widths:
        """Found by what one client, or none, would be sent before the first round."""
        method, net = self.method, self.net
        plan = method.plan(net, start, self.clients, 1, self.sample)
        one = torch.arange(len(plan.ids), device=self.device) < 1
        down = method.download(net, start, plan.among(one))
        held = widths(start, self.columns)
        return _Widths(max(held.values()), widths(down, self.columns))

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
