"""Points in processes of their own: their memory is watched from outside, and they can be ended."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, NamedTuple

import psutil

from raypfl.configuration import to_dict
from raypfl.errors import RaypflError
from raypfl.scaling.config import Point
from raypfl.scaling.measure import COUNTING, Protocol

LOOK_SECONDS = 0.1
"""Between two looks at the memory of a point while it warms up; more where looking itself takes long."""
WATCH_SECONDS = 1.0
"""Between two looks at the machine's memory while rounds are timed."""


class PointFailed(RaypflError):
    """A point could not be measured; the text says why."""


class Memory(NamedTuple):
    """Of all processes of a point together, at the moment when they held most."""

    bytes: int
    """Proportional set size: what processes share counts once."""
    processes: int


def run_point(
    point: Point,
    protocol: Protocol,
    *,
    limit_seconds: float | None,
    free_memory: float,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure a point in a process of its own.

    Args:
        point: what.
        protocol: how many rounds.
        limit_seconds: it fails if it takes longer; None: it may take its time.
        free_memory: share of the machine's memory that has to stay free; it fails where there is less.
        progress: is told what the point is doing.

    Returns:
        `facts` and `rounds` of the point in plain types.

    Raises:
        PointFailed: it could not be measured.
    """
    machine = psutil.virtual_memory()
    reserve = free_memory * machine.total
    request = {
        "measure": point.measure,
        "config": to_dict(point.config),
        "protocol": protocol._asdict(),
        "memory_bytes": max(int(machine.available - reserve), 2**29),
    }
    load = psutil.getloadavg()[0]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "raypfl.scaling.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        family: list[psutil.Process] = []
        try:
            assert process.stdin is not None
            # It may have ended at once; then it has said why.
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            done, memory = _wait(process, family, reserve, limit_seconds, progress)
            if done is None:
                raise PointFailed(_ending(process, errors))
        finally:
            _end(process, family)
    facts = {**done["facts"], "memory_bytes": memory.bytes, "processes": memory.processes, "load": load}
    return {"facts": facts, "rounds": done["rounds"]}


def _wait(
    process: subprocess.Popen[str],
    family: list[psutil.Process],
    reserve: float,
    limit_seconds: float | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any] | None, Memory]:
    """What the process said at its end (None: nothing), and its memory; `family` is kept up to date."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    begin = time.monotonic()
    most, pause, warming = Memory(0, 0), 0.0, True
    while True:
        try:
            line = lines.get(timeout=pause)
        except queue.Empty:
            line = None
        if line == "":
            return None, most
        event = {} if line is None else json.loads(line)
        if event.get("event") == "done":
            return event, most
        if event.get("event") == "failed":
            raise PointFailed(event["text"])
        if event:
            warming = warming and event["text"] != COUNTING
            progress(event["text"])
        if limit_seconds is not None and time.monotonic() - begin > limit_seconds:
            raise PointFailed(f"took longer than scale.limit_seconds = {limit_seconds:g}.")
        free = psutil.virtual_memory().available
        if free < reserve:
            raise PointFailed(
                f"out of memory: it and others left {free / 2**30:.1f} GiB of the machine's "
                f"{psutil.virtual_memory().total / 2**30:.1f} GiB free (scale.free_memory)."
            )
        pause = WATCH_SECONDS
        if warming:
            since = time.monotonic()
            family[:] = _family(process.pid)
            most = max(most, _memory(family))
            # Looking walks through the pages of every process: a tenth of the time at most.
            pause = max(LOOK_SECONDS, 10 * (time.monotonic() - since))


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    """All lines, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory(family: list[psutil.Process]) -> Memory:
    total, processes = 0, 0
    for member in family:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        processes += 1
    return Memory(total, processes)


def _ending(process: subprocess.Popen[str], errors: IO[str]) -> str:
    """Why a process ended that said nothing."""
    status = process.wait()
    if status < 0:
        hint = " (the system ends processes so that take too much memory)" if status == -9 else ""
        return f"its process was ended by signal {-status}{hint}."
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    # The last line of a message of several says little.
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = [*lines[-1:], *raised[-1:]][-1:] or ["it said nothing"]
    return f"its process ended with status {status}: {last[0]}"


def _end(process: subprocess.Popen[str], family: list[psutil.Process]) -> None:
    """Leave nothing running: the process goes when its input ends, and takes its own with it."""
    assert process.stdin is not None and process.stdout is not None
    # It may have ended before it read all that was written.
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    left = [member for member in family if member.is_running() and member.pid != process.pid]
    for member in left:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=10)
