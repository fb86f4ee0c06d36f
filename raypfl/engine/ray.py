"""The engine on Ray: a hub actor and long-lived client-host actors.

The driver moves references, never tensors: work goes from the hub's store to the hosts, uploads from the
hosts' to the hub. Ray's own restarts and retries are off: a restarted actor would come back silently with
the rows of round 0. A lost actor is replaced here, and everything returns to the last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from raypfl.algebra.columns import Shard
from raypfl.data import Pool
from raypfl.engine.contract import HostsLost, RoundReport
from raypfl.engine.dealing import deal
from raypfl.engine.host import without
from raypfl.engine.placement import Placement, fewer, nodes_alive
from raypfl.engine.ray_actors import HostActor, HubActor
from raypfl.engine.reports import StepReport, round_report
from raypfl.engine.seats import Seats
from raypfl.engine.sharding import side_by_side
from raypfl.engine.world import World
from raypfl.errors import ClientError, PlacementError, RaypflError
from raypfl.records.manifest import Part
from raypfl.records.storage import Place, place

Actor: TypeAlias = "ActorHandle[Any]"

FULL = (ObjectStoreFullError, OutOfDiskError)
"""What Ray raises when a message fits neither a node's object store nor the disk that it spills to."""

LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError, *FULL)
"""What Ray raises when an actor, its node, or a message that only they held is gone."""

ANSWER_SECONDS = 10.0
"""How long a host may take to say what it is doing; longer where the deadline is."""

LOOK_SECONDS = 2.0
"""How often it is looked whether late actors still have a node to start on."""

SEAT_SECONDS = 20.0
"""How long places may take to be free after a loss, before there are fewer."""

START_SECONDS = 120.0
"""How long actors may take to start before that is an error; a first import of torch takes a few."""


class Crew:
    """The actors of a placement. They outlive a run: starting them (a process, torch) takes seconds."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._seats = Seats(placement)
        self._hubs: list[Actor | None] = [None] * placement.num_servers
        self._hosts: list[Actor | None] = [None] * placement.num_hosts

    @property
    def hubs(self) -> list[Actor]:
        """The hub, or several by the columns that they hold; only after `complete`."""
        return [hub for hub in self._hubs if hub is not None]

    @property
    def hosts(self) -> list[Actor]:
        """The hosts, in the order of what is dealt to them; only after `complete`."""
        return [host for host in self._hosts if host is not None]

    def complete(self, *, after_loss: bool = False) -> None:
        """Start the actors that are not alive, and wait until every one answers.

        Args:
            after_loss: nodes may be gone; then there are fewer hosts, if the others have no room for all.

        Raises:
            PlacementError: some do not start. `close` ends the others.
            HostsLost: after a loss, one was sent to a node that is gone, too.
        """
        self._take_seats(after_loss)
        placement = self.placement
        for number, hub in enumerate(self._hubs):
            if hub is None or not _alive(hub):
                seat = self._seats.server(number)
                self._hubs[number] = _start(HubActor, placement.server_cpus, placement.server_gpus, seat)
        for number, host in enumerate(self._hosts):
            if host is None or not _alive(host):
                seat = self._seats.host(number)
                self._hosts[number] = _start(HostActor, placement.host_cpus, placement.host_gpus, seat)
        answers = {actor: actor.ready.remote() for actor in self._actors()}
        end = time.monotonic() + START_SECONDS
        while late := self._late(answers, min(LOOK_SECONDS, end - time.monotonic())):
            if after_loss:
                # A dead node is on the list for some seconds, so one look is not enough.
                self._do_without(late)
                answers = {actor: answers[actor] for actor in self._actors()}
            if time.monotonic() >= end:
                raise PlacementError(
                    f"{len(late)} of {len(answers)} actors did not start within {START_SECONDS:g} s. The run "
                    f"asks for {self.placement.request()}; free are {_free()}. Another job may hold the "
                    "rest: wait for it, or lower engine.num_actors or resources.num_cpus_per_actor."
                )
        try:
            ray.get(list(answers.values()))
        except LOST as error:
            if after_loss:
                # It was sent to a node that is gone and is not yet known to be: one more loss.
                raise HostsLost(str(error)) from None
            raise PlacementError(f"an actor died while it started: {error}") from None

    def processes(self) -> dict[str, int]:
        """Process ids of the actors by name, for those who watch or kill them."""
        others = (f"hub-{number}" for number in range(1, len(self._hubs)))
        names = ["hub", *others, *(f"host-{number}" for number in range(len(self._hosts)))]
        return dict(zip(names, ray.get([actor.ready.remote() for actor in self._actors()]), strict=True))

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors():
            ray.kill(actor)
        self._hubs, self._hosts = [None] * len(self._hubs), [None] * len(self._hosts)
        self._seats.give_back()

    def _take_seats(self, after_loss: bool) -> None:
        if self._seats.reserved and not all(map(_alive, self._actors())):
            # A node may be gone, and places stay where they were taken.
            self.close()
        try:
            self._seats.take(SEAT_SECONDS if after_loss else START_SECONDS)
        except PlacementError:
            if not after_loss:
                raise
            self.placement = fewer(self.placement, nodes_alive())
            self._seats, self._hosts = Seats(self.placement), [None] * self.placement.num_hosts
            self._seats.take(START_SECONDS)

    def _late(self, answers: Mapping[Actor, Any], seconds: float) -> list[Actor]:
        """Those who have not answered when the time is up."""
        done, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=max(0.0, seconds))
        return [actor for actor, answer in answers.items() if answer not in done]

    def _do_without(self, late: Sequence[Actor]) -> None:
        """Give up late hosts that no node has room for any more."""
        self.placement = fewer(self.placement, nodes_alive())
        for host in late:
            if len(self._hosts) > self.placement.num_hosts and host in self._hosts:
                self._hosts.remove(host)
                ray.kill(host)

    def _actors(self) -> list[Actor]:
        return [actor for actor in (*self._hubs, *self._hosts) if actor is not None]


class RayEngine:
    """Runs a world on a Ray cluster that is already connected (`connected`)."""

    def __init__(self, world: World, pool: Any, crew: Crew) -> None:
        """Give the actors their parts of this run.

        Args:
            world: the run.
            pool: references to the data set's inputs and labels in the object store (`share`).
            crew: actors that no other run uses now; whoever made it closes it.
        """
        self._world, self._pool, self._crew = world, pool, crew
        self._begin()

    def round(
        self, round: int, *, evaluate_pre: bool, evaluate_post: bool, away: Collection[int] = ()
    ) -> RoundReport:
        steps: list[StepReport] = []
        while not steps or steps[-1].opening.more:
            openings, work = self._open(
                round=round,
                train=True,
                evaluate_pre=evaluate_pre,
                evaluate_post=evaluate_post,
                away=away,
            )
            uploads, reporting = self._work(work)
            closing = [
                hub.close.remote(*own)
                for hub, own in zip(self._crew.hubs, zip(*uploads, strict=True), strict=True)
            ]
            self._watch(round, reporting, [*openings, *closing, *_flat(work, uploads)])
            # Hosts first: an error of a client is the one to show, not its echo at the hub.
            found = _results([*reporting, *openings, *closing], unread=_flat(work, uploads))
            reports, told = found[: len(reporting)], found[len(reporting) :]
            opened, closed = side_by_side(told[: len(openings)]), side_by_side(told[len(openings) :])
            steps.append(StepReport(opened, reports, closed))
        return round_report(steps, clock=self._world.config.clock is not None, over_hosts=max)

    def evaluate(self, round: int) -> RoundReport:
        openings, work = self._open(round=round + 1, train=False, evaluate_pre=True, evaluate_post=False)
        uploads, reporting = self._work(work)
        self._watch(round, reporting, [*openings, *_flat(work, uploads)])
        found = _results([*reporting, *openings], unread=_flat(work, uploads))
        reports, opened = found[: len(reporting)], side_by_side(found[len(reporting) :])
        records = [block for report in reports for block in report.clients]
        evaluating = max(report.evaluation_seconds for report in reports)
        working = max(report.seconds for report in reports)
        return RoundReport(records, [], {}, 0, opened.seconds, evaluating, working)

    def save(self, building: Place) -> Sequence[Part]:
        where = place(building)
        hosts = enumerate(self._crew.hosts)
        parts = [host.save.remote(where, f"state-{number:03d}") for number, host in hosts]
        hubs = [hub.save.remote(where) for hub in self._crew.hubs]
        return [part for own in _results([*hubs, *parts]) for part in own]

    def restore(self, checkpoint: Place | None) -> None:
        self._begin(after_loss=True)
        if checkpoint is not None:
            actors = (*self._crew.hubs, *self._crew.hosts)
            _results([actor.restore.remote(place(checkpoint)) for actor in actors])

    def close(self) -> None:
        """The actors belong to the crew, and wait for its next run."""

    def _begin(self, *, after_loss: bool = False) -> None:
        self._crew.complete(after_loss=after_loss)
        self._dealt = deal(self._world, len(self._crew.hosts))
        hubs, world = self._crew.hubs, ray.put(self._world)
        begun = [
            hub.begin.remote(world, self._dealt, Shard(index, len(hubs))) for index, hub in enumerate(hubs)
        ]
        for host, blocks in zip(self._crew.hosts, self._dealt, strict=True):
            begun.append(host.begin.remote(world, blocks, *self._pool))
        _results(begun)

    def _open(self, **due: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """References to what a step opens with at every hub, and by host to its work from all of them."""
        hubs, sums = self._crew.hubs, list[Any]()
        while True:
            opened = [hub.open.options(num_returns=1 + len(self._dealt)).remote(due, *sums) for hub in hubs]
            openings = [own[0] for own in opened]
            work = list(zip(*(own[1:] for own in opened), strict=True))
            # One hub has all columns, and asks nothing.
            if len(hubs) == 1 or _results(openings, unread=_flat(work))[0] is not None:
                return openings, work
            sums.append(hubs[0].add.remote(*work[0]))

    def _work(self, work: Sequence[tuple[Any, ...]]) -> tuple[list[list[Any]], list[Any]]:
        """References by host to what every hub gets of its uploads, and to its report."""
        done = [
            host.work.options(num_returns=len(own) + 1).remote(*own)
            for host, own in zip(self._crew.hosts, work, strict=True)
        ]
        return [own[:-1] for own in done], [own[-1] for own in done]

    def _watch(self, round: int, reports: Sequence[Any], others: Sequence[Any]) -> None:
        """Wait until all hosts are done, or one is at the same clients for longer than the deadline.

        Raises:
            ClientError: that host, which is ended, was hanging.
        """
        deadline = self._world.config.faults.deadline
        waiting = {} if deadline is None else dict(zip(reports, self._crew.hosts, strict=True))
        while waiting:
            assert deadline is not None
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(deadline / 4, 1.0))
            for report in done:
                del waiting[report]
            for host in waiting.values():
                hung = _hung(host, deadline, f"method {self._world.config.method.name}, round {round}")
                if hung is not None:
                    # Those that still work, too: another may hang, and what they do is for nothing.
                    for working in waiting.values():
                        ray.kill(working)
                    _claim([*reports, *others])
                    raise hung


def share(pool: Pool) -> tuple[Any, Any]:
    """Put the data set into the object store, once for all hosts of a node.

    Raises:
        PlacementError: it does not fit.
    """
    try:
        return ray.put(pool.x), ray.put(pool.y)
    except FULL as error:
        raise PlacementError(f"the data set, {pool.x.nbytes} bytes: {_lost(error)}") from None


def stored(pool: Pool, shared: tuple[Any, Any]) -> Pool:
    """The data set, read where `share` put it."""
    x, y = ray.get(list(shared))
    return pool._replace(x=x, y=y)


def _start(kind: Any, cpus: float, gpus: float, seat: Mapping[str, Any]) -> Actor:
    made: Any = ray.remote  # its types do not know concurrency_groups
    remote = made(concurrency_groups=kind.GROUPS)(kind)
    actor: Actor = remote.options(
        num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0, **seat
    ).remote()
    return actor


def _free() -> str:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU"


def _alive(actor: Actor) -> bool:
    try:
        ray.get(actor.ready.remote())
    except LOST:
        return False
    return True


def _hung(host: Actor, deadline: float, where: str) -> ClientError | None:
    """What there is to say of a host that takes too long."""
    limit = f"faults.deadline = {deadline:g}"
    try:
        found = ray.get(
            host.at_work.options(concurrency_group="watch").remote(), timeout=max(deadline, ANSWER_SECONDS)
        )
    except LOST:
        # What it was doing ends with that error, too.
        return None
    except GetTimeoutError:
        return ClientError(f"{where}: a client host does not answer ({limit}).", hung=True)
    if found is None or found[1] <= deadline:
        return None
    work, seconds = found
    return ClientError(
        f"{where}, phase {work.phase}, client(s) {list(work.clients)}: "
        f"not done after {seconds:.1f} s ({limit}).",
        without(work.clients, work.phase),
        hung=True,
    )


def _results(calls: Sequence[Any], unread: Sequence[Any] = ()) -> list[Any]:
    """What calls returned, or the first error among them in that order.

    Args:
        calls: references.
        unread: references that came with them and are not for the driver.

    Raises:
        HostsLost: an actor died, or a message is gone or found no room. Every other error is the one that was
            raised there.
    """
    try:
        results: list[Any] = ray.get(list(calls))
        return results
    except RayTaskError as error:
        _claim([*calls, *unread])
        if isinstance(error.cause, LOST):
            raise _lost(error.cause) from None
        if isinstance(error.cause, RaypflError):
            raise error.cause from None
        raise
    except LOST as error:
        _claim([*calls, *unread])
        raise _lost(error) from None


def _lost(error: Exception) -> HostsLost:
    if isinstance(error, FULL):
        said = str(error).strip().partition("\n")[0].rstrip(".")
        if len(error.args) > 1:
            # Of an argument that a node has no room for, Ray raises this with the argument's address.
            said = "a message found no room there, nor on its disk"
        return HostsLost(
            f"A node's object store is full: {said}. Give nodes more (--object-store-memory, or space where "
            "they spill to), or spread the hosts over more nodes."
        )
    return HostsLost(str(error))


def _flat(*references: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for by_host in references for own in by_host for one in own]


def _claim(calls: Sequence[Any]) -> None:
    """Ask for results that nobody waits for: Ray prints every error that nobody has asked for."""
    for call in calls:
        call.future()
