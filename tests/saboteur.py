"""A console that, after a round, makes a client stumble in the next one and meanwhile does damage."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ray
import stumbling

from raypfl.console import Console

if TYPE_CHECKING:
    from raypfl.engine.ray import Crew


class Moment(NamedTuple):
    """The middle of a round: one client is blocked."""

    crew: Crew
    pids: dict[str, int]
    """Of the crew's actors, by name."""
    claim: Path
    """Of the blocked process, which goes on when this file is gone."""

    def survivors_are_done(self) -> None:
        """Wait for the host that is not blocked."""
        blocked = [self.pids["host-0"], self.pids["host-1"]].index(stumbling.pid_of(self.claim))
        # Calls of an actor are worked off in turn: this one answers when its round is done.
        ray.get(self.crew.hosts[1 - blocked].ready.remote())


Strike = Callable[[Moment], None]


def kill_host(moment: Moment) -> None:
    """The one with the blocked client, once the other has finished."""
    moment.survivors_are_done()
    os.kill(stumbling.pid_of(moment.claim), signal.SIGKILL)


def kill_hub(moment: Moment) -> None:
    os.kill(moment.pids["hub"], signal.SIGKILL)


class Saboteur(Console):
    """Strikes in the middle of rounds, and keeps the notes.

    Args:
        folder: where clients are asked to stumble.
        strikes: what to do, by round; None: nothing but to let the client raise.
    """

    def __init__(self, crew: Crew, folder: Path, strikes: Mapping[int, Strike | None]) -> None:
        self.crew, self.folder, self.strikes = crew, folder, dict(strikes)
        self.notes: list[str] = []
        self.recovered: dict[int, float] = {}
        """Seconds from a strike until its round was done, by round."""
        self._struck: dict[int, float] = {}
        self._threads: list[threading.Thread] = []

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        if round in self._struck:
            self.recovered[round] = time.monotonic() - self._struck.pop(round)
        if round + 1 not in self.strikes:
            return
        strike = self.strikes.pop(round + 1)
        stumbling.ask(self.folder, "raise" if strike is None else "block")
        arguments = (round + 1, strike, self.crew.processes())
        self._threads.append(threading.Thread(target=self._strike, args=arguments))
        self._threads[-1].start()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def join(self) -> None:
        """Wait until nothing is struck any more."""
        for thread in self._threads:
            thread.join()

    def _strike(self, round: int, strike: Strike | None, pids: dict[str, int]) -> None:
        claim = stumbling.claimed(self.folder)
        self._struck[round] = time.monotonic()
        if strike is not None:
            strike(Moment(self.crew, pids, claim))
        claim.unlink(missing_ok=True)
