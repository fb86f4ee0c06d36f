"""The engine on Ray: a hub actor and long-lived client-host actors.

The driver moves references, never tensors: work goes from the hub's store to the hosts, uploads from the
hosts' to the hub. Ray's own restarts and retries are off: a restarted actor would come back silently with
the rows of round 0. A lost actor is replaced here, and everything returns to the last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from raypfl.data import Pool
from raypfl.engine import hub as hub_module
from raypfl.engine.contract import HostsLost, RoundReport
from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.host import ClientHost, Upload, Work
from raypfl.engine.messages import decode, encode
from raypfl.engine.placement import Placement
from raypfl.engine.world import World, pick_device
from raypfl.errors import PlacementError, RaypflError
from raypfl.records.manifest import Part

START_SECONDS = 120.0
"""How long actors may take to start before that is an error; a first import of torch takes a few."""


class _Host:
    """A client host as an actor."""

    def __init__(self, world: World, blocks: Sequence[int], x: np.ndarray, y: np.ndarray) -> None:
        torch.set_num_threads(world.config.engine.threads)
        self.device = pick_device(world.config)
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
    """The hub as an actor."""

    def __init__(self, world: World, dealt: Sequence[Sequence[int]]) -> None:
        torch.set_num_threads(world.config.engine.threads)
        self.device = pick_device(world.config)
        self.hub = hub_module.Hub(world, [ids_of(world, blocks) for blocks in dealt], self.device)

    def open(self, round: int, train: bool, evaluate_pre: bool, evaluate_post: bool) -> tuple[Any, ...]:
        opening, work = self.hub.open(
            round, train=train, evaluate_pre=evaluate_pre, evaluate_post=evaluate_post
        )
        return opening, *(own._replace(down=encode(own.down)) for own in work)

    def close(self, *uploads: Sequence[Upload]) -> float:
        return self.hub.close(
            [upload._replace(up=decode(upload.up, self.device)) for own in uploads for upload in own]
        )

    def save(self, building: Path) -> Part:
        return self.hub.save(building)

    def restore(self, checkpoint: Path | None) -> None:
        self.hub.restore(checkpoint)

    def ready(self) -> int:
        return os.getpid()


class RayEngine:
    """Runs a world on a Ray cluster that is already connected (`connected`)."""

    def __init__(self, world: World, pool: Any, placement: Placement) -> None:
        """Start the actors.

        Args:
            world: the run.
            pool: references to the data set's inputs and labels in the object store (`share`).
            placement: how many hosts, and what each asks for; checked against the cluster before.
        """
        self._world, self._pool, self._placement = world, pool, placement
        self._dealt = deal(world, placement.num_hosts)
        self._hub: ActorHandle | None = None
        self._hosts: list[ActorHandle | None] = [None] * placement.num_hosts
        self._start_missing()

    def round(self, round: int, *, evaluate_pre: bool, evaluate_post: bool) -> RoundReport:
        with _losses_noticed():
            opening, *work = self._open(round, True, evaluate_pre, evaluate_post)
            done = [
                host.work.options(num_returns=2).remote(own)
                for host, own in zip(self._hosts, work, strict=True)  # type: ignore[union-attr]
            ]
            closing = self._hub.close.remote(*(uploads for uploads, _ in done))  # type: ignore[union-attr]
            # Hosts first: an error of a client is the one to show, not its echo at the hub.
            reports = ray.get([report for _, report in done])
            opened, closing_seconds = ray.get([opening, closing])
        return RoundReport(
            [block for report in reports for block in report.clients],
            [opened.traffic, *(report.traffic for report in reports)],
            opened.participants,
            opened.seconds + closing_seconds,
            max(report.evaluation_seconds for report in reports),
        )

    def evaluate(self, round: int) -> RoundReport:
        with _losses_noticed():
            opening, *work = self._open(round + 1, False, True, False)
            done = [
                host.work.options(num_returns=2).remote(own)[1]
                for host, own in zip(self._hosts, work, strict=True)  # type: ignore[union-attr]
            ]
            opened, *reports = ray.get([opening, *done])
        records = [block for report in reports for block in report.clients]
        seconds = max(report.evaluation_seconds for report in reports)
        return RoundReport(records, [], 0, opened.seconds, seconds)

    def save(self, building: Path) -> Sequence[Part]:
        with _losses_noticed():
            parts = [
                host.save.remote(building.absolute(), f"state-{number:03d}")  # type: ignore[union-attr]
                for number, host in enumerate(self._hosts)
            ]
            saved: list[Part] = ray.get([self._hub.save.remote(building.absolute()), *parts])  # type: ignore[union-attr]
        return saved

    def restore(self, checkpoint: Path | None) -> None:
        self._start_missing()
        where = None if checkpoint is None else checkpoint.absolute()
        with _losses_noticed():
            ray.get([actor.restore.remote(where) for actor in self._actors()])

    def close(self) -> None:
        for actor in self._actors():
            ray.kill(actor)

    def processes(self) -> dict[str, int]:
        """Process ids of the actors by name, for those who watch or kill them."""
        names = ["hub", *(f"host-{number}" for number in range(len(self._hosts)))]
        return dict(zip(names, ray.get([actor.ready.remote() for actor in self._actors()]), strict=True))

    def _open(self, round: int, train: bool, evaluate_pre: bool, evaluate_post: bool) -> list[Any]:
        assert self._hub is not None
        refs: list[Any] = self._hub.open.options(num_returns=1 + len(self._hosts)).remote(
            round, train, evaluate_pre, evaluate_post
        )
        return refs

    def _actors(self) -> list[ActorHandle]:
        return [actor for actor in (self._hub, *self._hosts) if actor is not None]

    def _start_missing(self) -> None:
        """Start the actors that are not alive, and wait until every one is ready."""
        placement = self._placement
        self._hub, *self._hosts = (
            actor if actor is not None and _alive(actor) else None for actor in (self._hub, *self._hosts)
        )
        common = {"max_restarts": 0, "max_task_retries": 0}
        if self._hub is None:
            hub = ray.remote(_Hub).options(
                num_cpus=placement.server_cpus, num_gpus=placement.server_gpus, **common
            )
            self._hub = hub.remote(self._world, self._dealt)
        x, y = self._pool
        for number, blocks in enumerate(self._dealt):
            if self._hosts[number] is None:
                host = ray.remote(_Host).options(
                    num_cpus=placement.host_cpus, num_gpus=placement.host_gpus, **common
                )
                self._hosts[number] = host.remote(self._world, blocks, x, y)
        waiting = [actor.ready.remote() for actor in self._actors()]
        with _losses_noticed():
            ready, late = ray.wait(waiting, num_returns=len(waiting), timeout=START_SECONDS)
            if late:
                self.close()
                raise PlacementError(
                    f"{len(late)} of {len(waiting)} actors did not start within {START_SECONDS:g} s: "
                    f"{placement.request()}. Free resources: {ray.available_resources()}. Another job may hold them."
                )
            ray.get(ready)


def share(pool: Pool) -> tuple[Any, Any]:
    """Put the data set into the object store, once for all hosts of a node."""
    return ray.put(pool.x), ray.put(pool.y)


def _alive(actor: ActorHandle) -> bool:
    try:
        ray.get(actor.ready.remote())
    except RayActorError:
        return False
    return True


@contextmanager
def _losses_noticed() -> Iterator[None]:
    """Tell lost actors from errors that a person can act on."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RaypflError):
            raise error.cause from None
        if isinstance(error.cause, RayActorError):
            raise HostsLost(str(error.cause)) from None
        raise
    except RayActorError as error:
        raise HostsLost(str(error)) from None
