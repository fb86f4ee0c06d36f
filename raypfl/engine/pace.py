"""In which steps a round is done: all participants at once, or one after another.

A step is what a hub prepares, hosts work off and the hub takes in again. Without a clock, and with one
whose rounds have a barrier, a round is one step of all participants. Peers at their own pace are in
`engine.own_pace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.clock import ServerRound, random_order
from raypfl.engine.messages import take
from raypfl.engine.timing import EVERYONE, Heard, Stay, Timing
from raypfl.methods import Message, Plan

if TYPE_CHECKING:
    from raypfl.engine.hub import Hub


class Due(NamedTuple):
    """What is asked of a step."""

    train: bool
    evaluate_pre: bool
    evaluate_post: bool


class Step(NamedTuple):
    """What a hub prepares."""

    plan: Plan
    """Of those who take part in this step."""
    down: Any
    """What they receive, rows in the order of `plan.ids`."""
    messages: list[Message]
    due: Due
    read: Any = None
    """The hub's state that `down` was made of, where the method may be asked about it."""
    shown: Tensor | None = None
    """The clients that this step may evaluate, ascending; None: all."""
    more: bool = False
    """Whether the round has another step after this one."""


class Together:
    """One step a round, for all who take part."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.now = 0.0

    def step(self, round: int, due: Due) -> Step:
        """The next step of a round."""
        hub = self.hub
        method, timing = hub.method, hub.timing
        plan = self._planned(round)
        self._selected, self._verdict = plan, None
        down = method.download(hub.net, hub.hub, plan)
        decides = timing is not None and timing.decides and not method.without_server
        self._messages = sent_down(hub, plan, down) if due.train or decides else []
        if decides:
            assert timing is not None
            self._verdict = timing.server(plan, self._messages)
            here = torch.from_numpy(self._verdict.taken.astype(bool)).to(plan.ids.device)
            plan = plan.among(here)
            down = take(down, here.nonzero()[:, 0], method.shared)
        return Step(plan, down, self._messages if due.train else [], due, hub.hub)

    def close(self, plan: Plan, up: Any) -> list[Stay]:
        """The time that the step took; called with what came in, once the hub has it.

        Args:
            plan: of those who uploaded.
            up: what they did; None if there are none.
        """
        timing, begin = self.hub.timing, self.now
        if timing is None:
            return []
        if self.hub.method.without_server:
            stays = self._stays_of_peers(timing, self._heard, self._messages)
            self.now = max((stay.end for stay in stays), default=begin)
        else:
            verdict = self._verdict or self._measured(timing, plan, up)
            stays = [
                Stay(client, plan.round, begin, begin + end, outcome)
                for client, end, outcome in zip(
                    self._selected.ids.tolist(), verdict.end.tolist(), verdict.outcome.tolist(), strict=True
                )
            ]
            self.now = begin + verdict.seconds
        return [*stays, Stay(EVERYONE, plan.round, begin, self.now, "done")]

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name."""
        return {"now": torch.tensor([self.now], dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        self.now = float(state["now"])

    @phase("sampling")
    def _planned(self, round: int) -> Plan:
        """The round's plan; of peers, without those who fail and what is not answered in time."""
        hub = self.hub
        plan = hub.planned(round)
        if hub.timing is None or not hub.method.without_server:
            return plan
        self._asking = plan.ids.cpu().numpy()
        self._heard = hub.timing.answered(plan)
        return self._heard.plan

    def _measured(self, timing: Timing, plan: Plan, up: Any) -> ServerRound:
        sent = np.zeros(len(timing.speeds.compute))
        if up is not None:
            for message in self.hub.method.sent_up(self.hub.net, plan.ids, up):
                sent[message.src] += message.bytes
        return timing.server(self._selected, self._messages, sent)

    def _stays_of_peers(self, timing: Timing, heard: Heard, messages: Sequence[Message]) -> list[Stay]:
        plan = heard.plan
        assert plan.graph is not None
        seconds = timing.pulls(heard, messages) + timing.speeds.compute
        there, degree = set(plan.ids.tolist()), plan.graph.degree
        return [
            Stay(client, plan.round, self.now, self.now + float(seconds[client]), "done", int(degree[client]))
            if client in there
            else Stay(client, plan.round, self.now, self.now, "failed")
            for client in self._asking.tolist()
        ]


class InTurn(Together):
    """Gauss-Seidel: the participants of a round one after another, each of whom hears the newest models.

    The plan is that of the round's start; so are the fields that a method names in `snapshot`.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._queue: list[int] = []
        self._plan: Plan | None = None

    def step(self, round: int, due: Due) -> Step:
        """See `Together.step`; the next participant."""
        hub, method = self.hub, self.hub.method
        if not due.train:
            return super().step(round, due)
        first = self._plan is None
        if self._plan is None:
            self._plan = self._planned(round)
            self._start, self._began = hub.hub, self.now
            ids = self._plan.ids.cpu().numpy()
            random = self.hub.world.config.clock.order == "gs_random"  # type: ignore[union-attr]
            self._queue = (random_order(hub.world.config.seed, round, ids) if random else ids).tolist()
            if not self._queue:
                return super().step(round, due)
        client = self._queue.pop(0)
        own = self._plan.among(self._plan.ids == client)
        read = hub.hub._replace(**{name: getattr(self._start, name) for name in method.snapshot})
        down = method.download(hub.net, read, own)
        self._messages = [message for message in sent_down(hub, own, down) if message.dst == client]
        away = torch.ones(hub.world.num_clients, dtype=torch.bool)
        away[self._plan.ids.cpu()] = False
        shown = torch.cat((away.nonzero()[:, 0], own.ids.cpu())).sort().values if first else own.ids.cpu()
        return Step(own, down, self._messages, due, read, shown, more=bool(self._queue))

    def close(self, plan: Plan, up: Any) -> list[Stay]:
        """See `Together.close`; a round's last step also says what the round took."""
        timing = self.hub.timing
        assert timing is not None and self._plan is not None
        client = set(plan.ids.tolist())
        stays = [
            stay
            for stay in self._stays_of_peers(timing, self._heard, self._messages)
            if stay.client in client or (stay.outcome == "failed" and not self._queue)
        ]
        self.now = max((stay.end for stay in stays), default=self.now)
        if not self._queue:
            self._plan = None
            stays.append(Stay(EVERYONE, plan.round, self._began, self.now, "done"))
        return stays


@phase("messages")
def sent_down(hub: Hub, plan: Plan, down: Any) -> list[Message]:
    """The messages that `down` stands for."""
    return hub.method.sent_down(hub.net, plan, down)
