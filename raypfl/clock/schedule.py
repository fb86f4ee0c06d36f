"""Peers that go at their own pace: whose turn comes next, as arrays that a checkpoint can keep."""

# N peers.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WAITING, RUNNING, DONE = range(3)


class Turn(NamedTuple):
    """The next thing that happens."""

    client: int
    begins: bool
    """Whether the client begins an iteration; else it ends one."""
    time: float


class Schedule:
    """The iterations of N peers in virtual time.

    What happens at the same time happens in this order: iterations end, in the order of ids, before others
    begin. So peers that are equally fast hear what a synchronous round would let them hear.

    Attributes:
        phase: WAITING for its next beginning, RUNNING or DONE with all iterations, int64 `[N]`.
        time: of its next beginning or end, float64 `[N]`.
        iteration: the one that it is in or waits for, from 1, int64 `[N]`.
        version: how many models it has published, int64 `[N]`.
        failed: whether it fails in the iteration that it is in, bool `[N]`.
    """

    FIELDS = ("phase", "time", "iteration", "version", "failed")

    def __init__(self, offset: np.ndarray, *, iterations: int, period: float) -> None:
        """All peers before their first iteration.

        Args:
            offset: when each one begins it `[N]`.
            iterations: how many each one does.
            period: least seconds from one beginning to the next.
        """
        num = len(offset)
        self.offset, self.iterations, self.period = offset, iterations, period
        self.phase = np.full(num, WAITING)
        self.time = offset.astype(np.float64)
        self.iteration = np.ones(num, dtype=np.int64)
        self.version = np.zeros(num, dtype=np.int64)
        self.failed = np.zeros(num, dtype=bool)

    def next(self) -> Turn | None:
        """What happens next; None when all are done."""
        open = np.flatnonzero(self.phase != DONE)
        if not len(open):
            return None
        first = open[np.lexsort((open, self.phase[open] == WAITING, self.time[open]))[0]]
        return Turn(int(first), bool(self.phase[first] == WAITING), float(self.time[first]))

    def begin(self, client: int, seconds: float, *, failed: bool) -> None:
        """The client begins its iteration, which takes so long."""
        assert self.phase[client] == WAITING
        self.phase[client], self.failed[client] = RUNNING, failed
        self.time[client] += seconds

    def end(self, client: int, *, published: bool) -> None:
        """The client ends its iteration."""
        assert self.phase[client] == RUNNING
        done = int(self.iteration[client])
        self.version[client] += published
        self.failed[client] = False
        if done == self.iterations:
            self.phase[client] = DONE
            return
        self.phase[client], self.iteration[client] = WAITING, done + 1
        self.time[client] = max(self.time[client], self.offset[client] + done * self.period)

    def staleness(self, client: int, sources: np.ndarray) -> np.ndarray:
        """By how many versions each source is behind the client's own iterations, int64."""
        behind: np.ndarray = self.iteration[client] - 1 - self.version[sources]
        return behind
