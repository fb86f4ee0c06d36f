"""What is timed in turn: the plain loop, the engine on Ray, and the engine without Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple, Protocol

import numpy as np
import torch

from raypfl.algebra.phases import AnyPhase
from raypfl.bench.baseline import PlainClient, PlainProcesses
from raypfl.bench.workloads import HOST_CPUS, SEED, Workload
from raypfl.engine.contract import Engine
from raypfl.engine.local import LocalEngine
from raypfl.engine.phases import PhaseClock
from raypfl.engine.placement import Placement, connected
from raypfl.rng import key, torch_seeded

NAN = float("nan")


class Turn(NamedTuple):
    """One round of one contender; what a contender does not have is NaN."""

    seconds: float
    """The whole round: wall clock, or processor time where contenders share one process."""
    work_seconds: float = NAN
    """Training and evaluation on the slowest host."""
    server_seconds: float = NAN
    """The server's: it opens the round (distances, mixing) and closes it (stacking, aggregation)."""
    own_seconds: float = NAN
    """What the engine adds: wall clock less the slowest host's work and the server's."""
    copy_seconds: float = NAN
    """Copying as many bytes as the round's messages have, once, in memory."""
    sent_bytes: float = NAN
    """Messages down and up."""


class Contender(Protocol):
    """Something that does rounds of a workload; idle between its turns."""

    name: str
    processes: int
    """One-thread processes that train."""
    start_seconds: float
    """Until it was ready for its first round; of Ray with the start of Ray itself."""

    def round(self, round: int) -> Turn:
        """Do and time round `round`."""
        ...


class Plain:
    """The baseline."""

    name = "plain loop"

    def __init__(self, workload: Workload, num_processes: int) -> None:
        begin = time.perf_counter()
        self.processes = num_processes
        self._loop = PlainProcesses(workload, num_processes)
        self.start_seconds = time.perf_counter() - begin

    def round(self, round: int) -> Turn:
        """Do and time a round."""
        begin = time.perf_counter()
        self._loop.round(round)
        return Turn(time.perf_counter() - begin)

    def close(self) -> None:
        """End its processes."""
        self._loop.close()


class Engined:
    """An engine of the project."""

    def __init__(self, name: str, engine: Engine, num_processes: int, start_seconds: float) -> None:
        self.name, self._engine, self.processes = name, engine, num_processes
        self.start_seconds = start_seconds

    def round(self, round: int) -> Turn:
        """Do and time a round."""
        begin = time.perf_counter()
        report = self._engine.round(round, evaluate_pre=False, evaluate_post=True)
        seconds = time.perf_counter() - begin
        sent = sum(int(messages["bytes"].sum()) for messages in report.traffic)
        return Turn(
            seconds,
            report.work_seconds,
            report.server_seconds,
            seconds - report.work_seconds - report.server_seconds,
            _copy_seconds(sent),
            sent,
        )


class PlainHere:
    """The baseline in this process; its rounds are counted in processor time."""

    name = "plain loop"
    processes = 1

    def __init__(self, workload: Workload) -> None:
        begin = time.perf_counter()
        self._clients = [PlainClient(workload, client) for client in range(workload.num_clients)]
        self.start_seconds = time.perf_counter() - begin

    def round(self, round: int) -> Turn:
        """Do and time a round."""
        begin = time.process_time()
        with torch_seeded(key(SEED, "bench batches", round, 0)):
            for client in self._clients:
                client.train()
        for client in self._clients:
            client.accuracy()
        return Turn(time.process_time() - begin)


class EngineHere:
    """The engine without Ray; its rounds are counted in processor time."""

    name = "local"
    processes = 1

    def __init__(self, engine: LocalEngine, start_seconds: float) -> None:
        self._engine, self.start_seconds = engine, start_seconds

    def round(self, round: int) -> Turn:
        """Do and time a round."""
        begin = time.process_time()
        report = self._engine.round(round, evaluate_pre=False, evaluate_post=True)
        seconds = time.process_time() - begin
        return Turn(seconds, sent_bytes=sum(int(messages["bytes"].sum()) for messages in report.traffic))


def line_up_here(workload: Workload, stack: ExitStack) -> tuple[list[Contender], LocalEngine]:
    """The baseline and the engine without Ray, in this process on one thread; `stack` ends them.

    Args:
        workload: what they do.
        stack: entered by the caller.
    """
    begin = time.perf_counter()
    pool = workload.pool()
    # It settles the number of threads, for the baseline as well.
    engine = stack.enter_context(closing(LocalEngine(workload.world(pool), pool)))
    here = EngineHere(engine, time.perf_counter() - begin)
    return [PlainHere(workload), here], engine


def spent(engine: LocalEngine, rounds: Sequence[int]) -> dict[AnyPhase, float]:
    """Processor seconds of a round by what they are spent on, clients and server, a mean over some rounds."""
    clock = PhaseClock(torch.device("cpu"), on=True)
    with clock.running():
        for round in rounds:
            engine.round(round, evaluate_pre=False, evaluate_post=True)
    return {phase: own.cpu_seconds / len(rounds) for phase, own in clock.take_all().items()}


def line_up(workload: Workload, stack: ExitStack) -> tuple[list[Contender], LocalEngine]:
    """Start every contender, the baseline first; `stack` ends them. Also the engine without Ray.

    Args:
        workload: what they do.
        stack: entered by the caller.
    """
    from raypfl.engine.ray import Crew, RayEngine, share

    pool = workload.pool()
    one = workload.world(pool)
    every_core = min(cores(), len(one.blocks()))
    plain = stack.enter_context(closing(Plain(workload, min(cores(), workload.num_clients))))
    contenders: list[Contender] = [plain]
    begin = time.perf_counter()
    stack.enter_context(connected(None))
    shared = share(pool)
    connecting = time.perf_counter() - begin
    for num_hosts in dict.fromkeys((every_core, 1)):
        begin = time.perf_counter()
        crew = stack.enter_context(closing(Crew(Placement(num_hosts, HOST_CPUS, 0, 0, 0))))
        engine = RayEngine(workload.world(pool, num_hosts), shared, crew)
        seconds = connecting + time.perf_counter() - begin
        hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
        contenders.append(Engined(f"ray, {hosts}", engine, num_hosts, seconds))
    begin = time.perf_counter()
    local = stack.enter_context(closing(LocalEngine(one, pool)))
    contenders.append(Engined("local", local, 1, time.perf_counter() - begin))
    return contenders, local


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _copy_seconds(num_bytes: int) -> float:
    source = np.ones(num_bytes, np.uint8)
    begin = time.perf_counter()
    source.copy()
    return time.perf_counter() - begin
