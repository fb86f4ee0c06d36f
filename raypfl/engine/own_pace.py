"""Peers that go at their own pace: no round, no barrier, each with iterations of its own.

A peer begins an iteration by hearing what others have published by then; the model that it makes of it is
held here while it trains, and trained when its time is over, which is when its result is published. So a
model is never seen before its time, and nothing depends on which of two peers a host works off first.

For the driver, a round is as many ends of iterations as there are peers: in `rounds` of them, each peer does
`rounds` iterations. Records of a round show what every peer has then; keys and the decay of the learning rate
go by the peer's own count.
"""

# N peers.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from raypfl.clock import Schedule, Turn
from raypfl.engine.messages import take
from raypfl.engine.pace import Due, Step, Together
from raypfl.engine.timing import Stay, Timing
from raypfl.errors import CheckpointError
from raypfl.methods import Message, Plan
from raypfl.topology import graph_of

if TYPE_CHECKING:
    from raypfl.engine.hub import Hub


class Held(NamedTuple):
    """An iteration that has begun."""

    plan: Plan
    """Of this peer alone, with the edges of those whom it heard."""
    down: Any


class OwnPace(Together):
    """A step an iteration, in the order in which they end."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        timing, config = hub.timing, hub.world.config
        assert timing is not None
        self.timing: Timing = timing
        self.schedule = Schedule(timing.speeds.offset, iterations=config.rounds, period=timing.clock.period)
        self.held: dict[int, Held] = {}
        self._steps: Iterator[Step] | None = None
        self._sent: list[Message] = []
        self._stays: list[Stay] = []

    def step(self, round: int, due: Due) -> Step:
        """See `Together.step`; the next iteration that ends."""
        if not due.train:
            return super().step(round, due)
        if self._steps is None:
            self._steps = self._round(round, due)
        step = next(self._steps)
        if not step.more:
            self._steps = None
        sent, self._sent = self._sent, []
        return step._replace(messages=sent)

    def close(self, plan: Plan, up: Any) -> list[Stay]:
        """See `Together.close`; the iterations that have begun since."""
        stays, self._stays = self._stays, []
        return stays

    def state(self) -> dict[str, Tensor]:
        """See `Together.state`; at the end of a round."""
        found = {name: torch.from_numpy(getattr(self.schedule, name)) for name in Schedule.FIELDS}
        found["iterations"] = torch.tensor([self.schedule.iterations])
        for client, held in self.held.items():
            assert held.plan.graph is not None
            found[f"sources_{client}"] = held.plan.graph.sources
            found |= {f"down_{client}_{name}": field for name, field in held.down._asdict().items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See `Together.load`.

        Raises:
            CheckpointError: the run has another number of rounds now.
        """
        then, now = int(state["iterations"]), self.schedule.iterations
        if then != now:
            raise CheckpointError(
                f"with clock.mode = async a run keeps its number of rounds, {then}: peers that were done "
                f"stood still. Resume with rounds={then}, or start a new run with rounds={now}."
            )
        for name in Schedule.FIELDS:
            setattr(self.schedule, name, state[name].numpy().copy())
        kind = type(self._nobody(1).down)
        self.held = {}
        for client in range(self.hub.world.num_clients):
            if f"sources_{client}" in state:
                plan = self._own_plan(
                    client, int(self.schedule.iteration[client]), state[f"sources_{client}"]
                )
                fields = (state[f"down_{client}_{name}"].to(self.hub.device) for name in kind._fields)
                self.held[client] = Held(plan, kind(*fields))

    def _round(self, round: int, due: Due) -> Iterator[Step]:
        """The steps of one round; each is closed before the next is asked for."""
        while (turn := self.schedule.next()) is not None and turn.begins:
            self._begin(turn)
        everyone = torch.arange(self.hub.world.num_clients)
        if due.evaluate_pre:
            asked = Due(train=False, evaluate_pre=True, evaluate_post=False)
            for client, held in sorted(self.held.items()):
                yield Step(held.plan, held.down, [], asked, shown=everyone[[client]], more=True)
            rest = [client for client in everyone.tolist() if client not in self.held]
            yield self._nobody(round)._replace(due=asked, shown=everyone[rest], more=True)
        after = Due(train=True, evaluate_pre=False, evaluate_post=due.evaluate_post)
        trained: set[int] = set()
        ended = 0
        while ended < len(everyone) and (turn := self.schedule.next()) is not None:
            if turn.begins:
                self._begin(turn)
                continue
            ended += 1
            begun = self.held.pop(turn.client, None)
            if begun is not None:
                yield Step(begun.plan, begun.down, [], after, shown=everyone[[turn.client]], more=True)
                trained.add(turn.client)
            self.schedule.end(turn.client, published=begun is not None)
        rest = [client for client in everyone.tolist() if client not in trained]
        yield self._nobody(round)._replace(due=after, shown=everyone[rest])

    def _begin(self, turn: Turn) -> None:
        """What a peer hears now, and how long it will take."""
        hub, timing, schedule, client = self.hub, self.timing, self.schedule, turn.client
        iteration = int(schedule.iteration[client])
        plan = hub.method.plan(hub.net, hub.hub, hub.clients, iteration, lambda _: hub.clients.ids)
        heard = timing.answered(plan.among(plan.ids == client), schedule.failed)
        own = heard.plan
        assert own.graph is not None
        seconds = float(timing.speeds.compute[client])
        if not len(own.ids):
            schedule.begin(client, seconds, failed=True)
            self._stays.append(Stay(client, iteration, turn.time, turn.time + seconds, "failed"))
            return
        down = hub.method.download(hub.net, hub.hub, own)
        sent = [message for message in hub.method.sent_down(hub.net, own, down) if message.dst == client]
        seconds += float(timing.pulls(heard, sent)[client])
        sources = own.graph.sources_of(client)
        behind = schedule.staleness(client, sources.numpy())
        mean, most = (float(behind.mean()), int(behind.max())) if len(behind) else (0.0, 0)
        self._stays.append(
            Stay(client, iteration, turn.time, turn.time + seconds, "done", len(sources), mean, most)
        )
        self._sent += sent
        self.held[client] = Held(self._own_plan(client, iteration, sources), down)
        schedule.begin(client, seconds, failed=False)

    def _own_plan(self, client: int, iteration: int, sources: Tensor) -> Plan:
        clients = self.hub.clients
        graph = graph_of(len(clients.ids), torch.full_like(sources, client), sources)
        own = clients.ids[[client]]
        return Plan(iteration, own, clients.sizes[own], graph=graph, all_sizes=clients.sizes)

    def _nobody(self, round: int) -> Step:
        """A step of nobody, with what everybody could fetch now."""
        hub = self.hub
        plan = hub.method.plan(hub.net, hub.hub, hub.clients, round, lambda _: hub.clients.ids)
        plan = plan.among(torch.zeros_like(plan.ids, dtype=torch.bool))
        down = hub.method.download(hub.net, hub.hub, plan)
        shared = take(down, plan.ids, hub.method.shared)
        return Step(plan, shared, [], Due(False, False, False))
