"""Processes by identity, and how a whole tree of them is ended and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PAUSE_SECONDS = 0.1
MOST_LOOKS = 20
KILL_SECONDS = 10.0
"""How long a process that was killed may take to be gone; one that hangs in the kernel may never be."""


class Process(NamedTuple):
    """A process, told apart from a later one with the same number."""

    pid: int
    started: int
    """Clock ticks after boot."""

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that has ended and waits for its parent does not."""
        found = _stat(self.pid)
        return found is not None and int(found[19]) == self.started and found[0] not in "ZX"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, to this process or to nobody."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The handle is of whoever has the number now: is it still the one that is meant?
            if self.alive:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def process(pid: int) -> Process | None:
    """The process that has this number now; None if there is none."""
    found = _stat(pid)
    return None if found is None else Process(pid, int(found[19]))


def descendants(root: Process) -> list[Process]:
    """The processes below `root`, if it is still there."""
    for _ in range(MOST_LOOKS):
        if not root.alive:
            return []
        parents = _parents()
        there = {0, *(one.pid for one in parents)}
        # Who ends while the list is gone through hides those below, who have another parent by now.
        if there.issuperset(parents.values()):
            break
    children: dict[int, list[Process]] = {}
    for one, parent in parents.items():
        children.setdefault(parent, []).append(one)
    below, waiting = [], [root.pid]
    while waiting:
        own = children.get(waiting.pop(), [])
        below += own
        waiting += [child.pid for child in own]
    return below


def end(root: Process, others: Sequence[Process] = (), *, grace_seconds: float) -> list[Process]:
    """End `root` and all below it, and `others`.

    Args:
        root: a keeper (`raypfl.cluster.keeper`), which what it started cannot get away from.
        others: processes that were below it at some time; they count if `root` is gone.
        grace_seconds: how long they have to end by themselves before they are killed; 0: none.

    Returns:
        What is still there, which should be nobody.
    """
    patience = time.monotonic() + grace_seconds
    if grace_seconds > 0:
        for one in (*descendants(root), *others):
            one.send(signal.SIGTERM)
        while time.monotonic() < patience and _left(root, others):
            time.sleep(PAUSE_SECONDS)
    patience = time.monotonic() + KILL_SECONDS
    while (left := _left(root, others)) and time.monotonic() < patience:
        # Those below first: the keeper is what the others are found by.
        for one in left:
            one.send(signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
    while root.alive and time.monotonic() < patience:
        root.send(signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
    return left + [root] * root.alive


def _parents() -> dict[Process, int]:
    """Everybody who runs now, with the process id of their parent."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = {pid: _stat(pid) for pid in pids}
    return {
        Process(pid, int(own[19])): int(own[1])
        for pid, own in found.items()
        if own is not None and own[0] not in "ZX"
    }


def _left(root: Process, others: Sequence[Process]) -> list[Process]:
    return list(dict.fromkeys((*descendants(root), *(one for one in others if one.alive))))


def _stat(pid: int) -> list[str] | None:
    """State, parent and what follows them in /proc/PID/stat; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
