"""The engine on Ray: a hub actor and long-lived client-host actors.

The driver moves references, never tensors: work goes from the hub's store to the hosts, uploads from the
hosts' to the hub. Ray's own restarts and retries are off: a restarted actor would come back silently with
the rows of round 0. A lost actor is replaced here, and everything returns to the last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from torch import Tensor

from raypfl.algebra.columns import Shard
from raypfl.data import Pool
from raypfl.engine.contract import HostsLost, RoundReport
from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.host import ClientHost, Upload, Work
from raypfl.engine.hub import Closing, Hub
from raypfl.engine.messages import decode, encode
from raypfl.engine.placement import Placement
from raypfl.engine.reports import StepReport, round_report
from raypfl.engine.sharding import add_parts, cut_uploads, join_work, opened_or_asked
from raypfl.engine.world import World, as_tensor, server_device, settle_arithmetic, training_device
from raypfl.errors import PlacementError, RaypflError
from raypfl.records.manifest import Part

Actor: TypeAlias = "ActorHandle[Any]"

LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError)
"""What Ray raises when an actor, its node, or a message that only they held is gone."""

OUTBOX_BYTES = 2**26
"""Uploads that a host holds in its own memory before they go to the object store."""

START_SECONDS = 120.0
"""How long actors may take to start before that is an error; a first import of torch takes a few."""


class _Host:
    """A client host as an actor; serves one run after another."""

    host: ClientHost

    def begin(self, world: World, blocks: Sequence[int], x: np.ndarray, y: np.ndarray) -> None:
        """Become a host of this run, at the state before its first round."""
        # The rows of the run before go first: those of two runs may not fit.
        vars(self).pop("host", None)
        settle_arithmetic(world.config.engine.threads)
        self.device = training_device(world.config)
        self.host = ClientHost(world, blocks, x, y, self.device)

    def work(self, *parts: Work) -> tuple[Any, ...]:
        """Of what each server prepared; returns what each gets of the uploads, and the report."""
        columns = self.host.method.columns
        work = join_work([own._replace(down=decode(own.down, self.device)) for own in parts], columns)
        outbox = _Outbox(columns, len(parts))
        _, report = self.host.work(work, outbox.put)
        return *outbox.mail, report

    def save(self, building: Path, name: str) -> list[Part]:
        return self.host.save(building, name)

    def restore(self, checkpoint: Path | None) -> None:
        self.host.restore(checkpoint)

    def ready(self) -> int:
        return os.getpid()


class _Outbox:
    """A host's uploads on their way to the hubs: much goes to the object store while the host works on."""

    def __init__(self, columns: frozenset[str], num_hubs: int) -> None:
        self._columns = columns
        self._shards = [Shard(index, num_hubs) for index in range(num_hubs)]
        self._bytes = 0
        self.mail: list[list[Any]] = [[] for _ in self._shards]
        """For each hub: references to lists of uploads, and last the uploads that are not in the store."""

    def put(self, upload: Upload) -> None:
        for mail, shard in zip(self.mail, self._shards, strict=True):
            mail += [own._replace(up=encode(own.up)) for own in cut_uploads([upload], self._columns, shard)]
        self._bytes += sum(field.nbytes for field in upload.up)
        if self._bytes > OUTBOX_BYTES:
            for mail in self.mail:
                sent = [one for one in mail if isinstance(one, ray.ObjectRef)]
                mail[:] = [*sent, ray.put(mail[len(sent) :])]
            self._bytes = 0


def _received(mail: Sequence[Any]) -> Iterator[Upload]:
    for one in mail:
        yield from ray.get(one) if isinstance(one, ray.ObjectRef) else [one]


class _Hub:
    """The hub as an actor; serves one run after another."""

    hub: Hub

    def begin(self, world: World, dealt: Sequence[Sequence[int]], shard: Shard) -> None:
        """Become the hub of this run, or one of several, at the state before its first round."""
        vars(self).pop("hub", None)
        settle_arithmetic(world.config.engine.threads)
        self.device = server_device(world.config)
        self.hub = Hub(world, [ids_of(world, blocks) for blocks in dealt], self.device, shard)

    def open(self, due: Mapping[str, Any], *sums: np.ndarray) -> tuple[Any, ...]:
        """The opening and each host's work; or, where a sum is asked for, None, and what is here of it."""
        found = opened_or_asked(self.hub, [as_tensor(total).to(self.device) for total in sums], **due)
        if isinstance(found, Tensor):
            return None, found.cpu().numpy(), *(None for _ in self.hub.dealt[1:])
        opening, work = found
        return opening, *(own._replace(down=encode(own.down)) for own in work)

    def add(self, *parts: np.ndarray) -> np.ndarray:
        """A sum of what all hubs contribute."""
        total: np.ndarray = add_parts([as_tensor(part) for part in parts]).numpy()
        return total

    def close(self, *uploads: Sequence[Any]) -> Closing:
        """Take in every host's mail."""
        return self.hub.close(
            [
                upload._replace(up=decode(upload.up, self.device))
                for mail in uploads
                for upload in _received(mail)
            ]
        )

    def save(self, building: Path) -> list[Part]:
        return self.hub.save(building)

    def restore(self, checkpoint: Path | None) -> None:
        self.hub.restore(checkpoint)

    def ready(self) -> int:
        return os.getpid()


class Crew:
    """The actors of a placement. They outlive a run: starting them (a process, torch) takes seconds."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
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

    def complete(self) -> None:
        """Start the actors that are not alive, and wait until every one answers.

        Raises:
            PlacementError: some do not start. `close` ends the others.
        """
        placement = self.placement
        # Several hubs are there because one node has no room for them.
        seat = {"scheduling_strategy": "SPREAD"} if len(self._hubs) > 1 else {}
        for number, hub in enumerate(self._hubs):
            if hub is None or not _alive(hub):
                self._hubs[number] = _start(_Hub, placement.server_cpus, placement.server_gpus, seat)
        for number, host in enumerate(self._hosts):
            if host is None or not _alive(host):
                self._hosts[number] = _start(_Host, placement.host_cpus, placement.host_gpus, {})
        waiting = [actor.ready.remote() for actor in self._actors()]
        ready, late = ray.wait(waiting, num_returns=len(waiting), timeout=START_SECONDS)
        if late:
            raise PlacementError(
                f"{len(late)} of {len(waiting)} actors did not start within {START_SECONDS:g} s. The run "
                f"asks for {placement.request()}; free are {_free()}. Another job may hold the "
                "rest: wait for it, or lower engine.num_actors or resources.num_cpus_per_actor."
            )
        try:
            ray.get(ready)
        except LOST as error:
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
        self._dealt = deal(world, crew.placement.num_hosts)
        self._begin()

    def round(self, round: int, *, evaluate_pre: bool, evaluate_post: bool) -> RoundReport:
        steps: list[StepReport] = []
        while not steps or steps[-1].opening.more:
            opening, work = self._open(
                round=round, train=True, evaluate_pre=evaluate_pre, evaluate_post=evaluate_post
            )
            uploads, reporting = self._work(work)
            closing = [
                hub.close.remote(*own)
                for hub, own in zip(self._crew.hubs, zip(*uploads, strict=True), strict=True)
            ]
            # Hosts first: an error of a client is the one to show, not its echo at the hub.
            found = _results([*reporting, opening, *closing], unread=_flat(work, uploads))
            reports, (opened, *closed) = found[: len(reporting)], found[len(reporting) :]
            steps.append(StepReport(opened, reports, _slowest(closed)))
        return round_report(steps, clock=self._world.config.clock is not None, over_hosts=max)

    def evaluate(self, round: int) -> RoundReport:
        opening, work = self._open(round=round + 1, train=False, evaluate_pre=True, evaluate_post=False)
        uploads, reporting = self._work(work)
        *reports, opened = _results([*reporting, opening], unread=_flat(work, uploads))
        records = [block for report in reports for block in report.clients]
        evaluating = max(report.evaluation_seconds for report in reports)
        working = max(report.seconds for report in reports)
        return RoundReport(records, [], {}, 0, opened.seconds, evaluating, working)

    def save(self, building: Path) -> Sequence[Part]:
        where = building.absolute()
        hosts = enumerate(self._crew.hosts)
        parts = [host.save.remote(where, f"state-{number:03d}") for number, host in hosts]
        hubs = [hub.save.remote(where) for hub in self._crew.hubs]
        return [part for own in _results([*hubs, *parts]) for part in own]

    def restore(self, checkpoint: Path | None) -> None:
        self._begin()
        if checkpoint is not None:
            actors = (*self._crew.hubs, *self._crew.hosts)
            _results([actor.restore.remote(checkpoint.absolute()) for actor in actors])

    def close(self) -> None:
        """The actors belong to the crew, and wait for its next run."""

    def _begin(self) -> None:
        self._crew.complete()
        hubs, world = self._crew.hubs, ray.put(self._world)
        begun = [
            hub.begin.remote(world, self._dealt, Shard(index, len(hubs))) for index, hub in enumerate(hubs)
        ]
        for host, blocks in zip(self._crew.hosts, self._dealt, strict=True):
            begun.append(host.begin.remote(world, blocks, *self._pool))
        _results(begun)

    def _open(self, **due: Any) -> tuple[Any, list[tuple[Any, ...]]]:
        """References to what a step opens with, and by host to its work from every hub."""
        hubs, sums = self._crew.hubs, list[Any]()
        while True:
            opened = [hub.open.options(num_returns=1 + len(self._dealt)).remote(due, *sums) for hub in hubs]
            (opening, *_), *_ = opened
            work = list(zip(*(own[1:] for own in opened), strict=True))
            # One hub has all columns, and asks nothing.
            if len(hubs) == 1 or _results([own[0] for own in opened], unread=_flat(work))[0] is not None:
                return opening, work
            sums.append(hubs[0].add.remote(*work[0]))

    def _work(self, work: Sequence[tuple[Any, ...]]) -> tuple[list[list[Any]], list[Any]]:
        """References by host to what every hub gets of its uploads, and to its report."""
        done = [
            host.work.options(num_returns=len(own) + 1).remote(*own)
            for host, own in zip(self._crew.hosts, work, strict=True)
        ]
        return [own[:-1] for own in done], [own[-1] for own in done]


def share(pool: Pool) -> tuple[Any, Any]:
    """Put the data set into the object store, once for all hosts of a node."""
    return ray.put(pool.x), ray.put(pool.y)


def stored(pool: Pool, shared: tuple[Any, Any]) -> Pool:
    """The data set, read where `share` put it."""
    x, y = ray.get(list(shared))
    return pool._replace(x=x, y=y)


def _start(kind: type, cpus: float, gpus: float, seat: Mapping[str, Any]) -> Actor:
    remote: Any = ray.remote(kind)
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


def _results(calls: Sequence[Any], unread: Sequence[Any] = ()) -> list[Any]:
    """What calls returned, or the first error among them in that order.

    Args:
        calls: references.
        unread: references that came with them and are not for the driver.

    Raises:
        HostsLost: an actor died. Every other error is the one that was raised there.
    """
    try:
        results: list[Any] = ray.get(list(calls))
        return results
    except RayTaskError as error:
        _claim([*calls, *unread])
        if isinstance(error.cause, LOST):
            raise HostsLost(str(error.cause)) from None
        if isinstance(error.cause, RaypflError):
            raise error.cause from None
        raise
    except LOST as error:
        _claim([*calls, *unread])
        raise HostsLost(str(error)) from None


def _flat(*references: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for by_host in references for own in by_host for one in own]


def _slowest(closed: Sequence[Closing]) -> Closing:
    """Of the hubs of one run, which close a step at the same time."""
    return closed[0]._replace(seconds=max(own.seconds for own in closed))


def _claim(calls: Sequence[Any]) -> None:
    """Ask for results that nobody waits for: Ray prints every error that nobody has asked for."""
    for call in calls:
        call.future()
