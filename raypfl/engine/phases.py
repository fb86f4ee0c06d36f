"""What seconds are spent on, for those who study it; nothing is measured unless asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast, get_args

import torch

from raypfl.algebra.phases import WATCHER, AnyPhase, ClientPhase, Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
CLIENT_PHASES: tuple[ClientPhase, ...] = get_args(ClientPhase)


class Spent(NamedTuple):
    """On one phase."""

    seconds: float
    """Wall clock."""
    cpu_seconds: float
    """Processor time of the process, all its threads: the same whatever else the machine does."""


class PhaseClock:
    """Listens to the algebra and to the hub, and adds up what each phase takes without the phases inside it.

    Args:
        device: where the work is done; a GPU is waited for at every change of phase.
        on: whether to listen at all.
    """

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self._device, self._on = device, on
        self._stack: list[AnyPhase] = []
        self._spent: dict[AnyPhase, Spent] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Listen; what belongs to no phase counts as `other`."""
        if not self._on:
            yield
            return
        token = WATCHER.set(self)
        self._since = self._now()
        self._stack = ["other"]
        try:
            yield
        finally:
            self.leave()
            WATCHER.reset(token)

    def enter(self, phase: AnyPhase) -> None:
        """See `Watcher.enter`."""
        self._charge()
        self._stack.append(phase)

    def leave(self) -> None:
        """See `Watcher.leave`."""
        self._charge()
        self._stack.pop()

    def take(self) -> dict[Phase, Spent]:
        """What a server spent since the last call, by phase; empty where nobody listens."""
        return cast(dict[Phase, Spent], self.take_all())

    def take_all(self) -> dict[AnyPhase, Spent]:
        """The same where clients work in this process, too."""
        spent, self._spent = self._spent, {}
        return spent

    def _charge(self) -> None:
        now, phase = self._now(), self._stack[-1]
        passed = Spent(*(end - begin for begin, end in zip(self._since, now, strict=True)))
        self._spent[phase] = added([self._spent.get(phase, Spent(0.0, 0.0)), passed])
        self._since = now

    def _now(self) -> Spent:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Spent(time.perf_counter(), time.process_time())


def added(parts: Iterable[Spent]) -> Spent:
    """All of them together."""
    return Spent(*(sum(column) for column in zip(*parts, strict=True)))


def beside(parts: Sequence[dict[Phase, Spent]]) -> dict[Phase, Spent]:
    """The phases of servers that work at the same time: wall clock of the slowest, processor time of all."""
    slowest = max(parts, key=lambda own: sum(spent.seconds for spent in own.values()))
    return {
        name: Spent(slowest[name].seconds if name in slowest else 0.0, spent.cpu_seconds)
        for name, spent in together(parts).items()
    }


def together(parts: Iterable[Mapping[Phase, Spent]]) -> dict[Phase, Spent]:
    """The phases of several pieces of work."""
    parts = list(parts)
    names = [name for name in PHASES if any(name in part for part in parts)]
    return {name: added(part[name] for part in parts if name in part) for name in names}
