"""The engine on Ray: a hub actor and long-lived client-host actors.

The driver moves references, never tensors: work goes from the hub's store to the hosts, uploads from the
hosts' to the hub. Ray's own restarts and retries are off: a restarted actor would come back silently with
the rows of round 0. A lost actor is replaced here, and everything returns to the last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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

from raypfl.data import Pool
from raypfl.engine.contract import HostsLost, RoundReport
from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.host import ClientHost, Upload, Work
from raypfl.engine.hub import Closing, Hub
from raypfl.engine.messages import decode, encode
from raypfl.engine.placement import Placement
from raypfl.engine.reports import StepReport, round_report
from raypfl.engine.seats import Seats
from raypfl.engine.world import World, server_device, settle_arithmetic, training_device
from raypfl.errors import PlacementError, RaypflError
from raypfl.records.manifest import Part

Actor: TypeAlias = "ActorHandle[Any]"

LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError)
"""What Ray raises when an actor, its node, or a message that only they held is gone."""

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

    def work(self, work: Work) -> tuple[Any, Any]:
        uploads, report = self.host.work(work._replace(down=decode(work.down, self.device)))
        return [upload._replace(up=encode(upload.up)) for upload in uploads], report

    def save(self, building: Path, name: str) -> Part:
        return self.host.save(building, name)

    def restore(self, checkpoint: Path | None) -> None:
        self.host.restore(checkpoint)

    def ready(self) -> int:
        return os.getpid()


class _Hub:
    """The hub as an actor; serves one run after another."""

    hub: Hub

    def begin(self, world: World, dealt: Sequence[Sequence[int]]) -> None:
        """Become the hub of this run, at the state before its first round."""
        vars(self).pop("hub", None)
        settle_arithmetic(world.config.engine.threads)
        self.device = server_device(world.config)
        self.hub = Hub(world, [ids_of(world, blocks) for blocks in dealt], self.device)

    def open(self, round: int, train: bool, evaluate_pre: bool, evaluate_post: bool) -> tuple[Any, ...]:
        opening, work = self.hub.open(
            round, train=train, evaluate_pre=evaluate_pre, evaluate_post=evaluate_post
        )
        return opening, *(own._replace(down=encode(own.down)) for own in work)

    def close(self, *uploads: Sequence[Upload]) -> Closing:
        return self.hub.close(
            [upload._replace(up=decode(upload.up, self.device)) for own in uploads for upload in own]
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
        self._seats = Seats(placement)
        self._hub: Actor | None = None
        self._hosts: list[Actor | None] = [None] * placement.num_hosts

    @property
    def hub(self) -> Actor:
        """The hub; only after `complete`."""
        assert self._hub is not None
        return self._hub

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
        if self._seats.reserved and not all(map(_alive, self._actors())):
            # A node may be gone with its seats, and seats stay where they were taken.
            self.close()
        self._seats.take(START_SECONDS)
        if self._hub is None or not _alive(self._hub):
            self._hub = _start(_Hub, placement.server_cpus, placement.server_gpus, self._seats.server())
        for number, host in enumerate(self._hosts):
            if host is None or not _alive(host):
                self._hosts[number] = _start(
                    _Host, placement.host_cpus, placement.host_gpus, self._seats.host(number)
                )
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
        names = ["hub", *(f"host-{number}" for number in range(len(self._hosts)))]
        return dict(zip(names, ray.get([actor.ready.remote() for actor in self._actors()]), strict=True))

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors():
            ray.kill(actor)
        self._hub, self._hosts = None, [None] * len(self._hosts)
        self._seats.give_back()

    def _actors(self) -> list[Actor]:
        return [actor for actor in (self._hub, *self._hosts) if actor is not None]


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
            opening, *work = self._open(round, True, evaluate_pre, evaluate_post)
            done = [
                host.work.options(num_returns=2).remote(own)
                for host, own in zip(self._crew.hosts, work, strict=True)
            ]
            uploads = [own for own, _ in done]
            closing = self._crew.hub.close.remote(*uploads)
            # Hosts first: an error of a client is the one to show, not its echo at the hub.
            *reports, opened, closed = _results(
                [*(report for _, report in done), opening, closing], unread=[*work, *uploads]
            )
            steps.append(StepReport(opened, reports, closed))
        return round_report(steps, clock=self._world.config.clock is not None, over_hosts=max)

    def evaluate(self, round: int) -> RoundReport:
        opening, *work = self._open(round + 1, False, True, False)
        done = [
            host.work.options(num_returns=2).remote(own)
            for host, own in zip(self._crew.hosts, work, strict=True)
        ]
        *reports, opened = _results(
            [*(report for _, report in done), opening], unread=[*work, *(uploads for uploads, _ in done)]
        )
        records = [block for report in reports for block in report.clients]
        evaluating = max(report.evaluation_seconds for report in reports)
        working = max(report.seconds for report in reports)
        return RoundReport(records, [], {}, 0, opened.seconds, evaluating, working)

    def save(self, building: Path) -> Sequence[Part]:
        where = building.absolute()
        hosts = enumerate(self._crew.hosts)
        parts = [host.save.remote(where, f"state-{number:03d}") for number, host in hosts]
        hub, *saved = _results([self._crew.hub.save.remote(where), *parts])
        return [*hub, *saved]

    def restore(self, checkpoint: Path | None) -> None:
        self._begin()
        if checkpoint is not None:
            actors = (self._crew.hub, *self._crew.hosts)
            _results([actor.restore.remote(checkpoint.absolute()) for actor in actors])

    def close(self) -> None:
        """The actors belong to the crew, and wait for its next run."""

    def _begin(self) -> None:
        self._crew.complete()
        begun = [self._crew.hub.begin.remote(self._world, self._dealt)]
        for host, blocks in zip(self._crew.hosts, self._dealt, strict=True):
            begun.append(host.begin.remote(self._world, blocks, *self._pool))
        _results(begun)

    def _open(self, round: int, train: bool, evaluate_pre: bool, evaluate_post: bool) -> list[Any]:
        refs: list[Any] = self._crew.hub.open.options(num_returns=1 + len(self._dealt)).remote(
            round, train, evaluate_pre, evaluate_post
        )
        return refs


def share(pool: Pool) -> tuple[Any, Any]:
    """Put the data set into the object store, once for all hosts of a node."""
    return ray.put(pool.x), ray.put(pool.y)


def stored(pool: Pool, shared: tuple[Any, Any]) -> Pool:
    """The data set, read where `share` put it."""
    x, y = ray.get(list(shared))
    return pool._replace(x=x, y=y)


def _start(kind: type, cpus: float, gpus: float, seat: dict[str, Any]) -> Actor:
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


def _claim(calls: Sequence[Any]) -> None:
    """Ask for results that nobody waits for: Ray prints every error that nobody has asked for."""
    for call in calls:
        call.future()
