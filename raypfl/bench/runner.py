"""Contenders in turn, round by round, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from raypfl.algebra.phases import AnyPhase
from raypfl.bench.contenders import Turn, line_up, line_up_here, spent
from raypfl.bench.memory import server_rows
from raypfl.bench.workloads import Workload
from raypfl.console import Console

WARM_UP = 2
"""Rounds that are not counted: first calls of libraries, first pages of Ray's store."""
PHASE_ROUNDS = 2
"""Rounds of the engine without Ray whose time is split by what it is spent on; not counted either."""


class Spread(NamedTuple):
    """Over rounds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""


class Measured(NamedTuple):
    """All counted rounds of one contender."""

    contender: str
    processes: int
    """One-thread processes that train."""
    start_seconds: float
    """Until it was ready for its first round; of Ray with the start of Ray itself."""
    turns: tuple[Turn, ...]

    def column(self, name: str) -> np.ndarray:
        """One quantity of every round, float64."""
        return np.array([getattr(turn, name) for turn in self.turns], np.float64)

    def spread(self, name: str) -> Spread:
        """Median and quartiles of one quantity."""
        return spread(self.column(name))

    def over(self, other: Measured) -> Spread:
        """Time as a multiple of another's in the same turn; below 1 is faster."""
        return spread(self.column("seconds") / other.column("seconds"))


class Result(NamedTuple):
    """One workload."""

    workload: Workload
    server_rows: float
    """Peak storage of the server, in rows a client (`memory.server_rows`)."""
    measured: tuple[Measured, ...]
    """The baseline first, then Ray on all cores, Ray with one host, and the engine without Ray; or the
    first and the last."""
    local: bool
    """Whether times are processor time of this process, and there is no Ray."""
    phases: dict[AnyPhase, float]
    """Processor seconds of a round of the engine without Ray, by what they are spent on."""

    @property
    def baseline(self) -> Measured:
        """What ratios are taken to."""
        return self.measured[0]

    @property
    def all_over_one(self) -> Spread | None:
        """Rounds a second of Ray with a host a core, as a multiple of those with one host."""
        hosts = [one for one in self.measured if one.contender.startswith("ray")]
        return hosts[-1].over(hosts[0]) if hosts else None


def measure(
    workload: Workload, rounds: int, console: Console | None = None, *, local: bool = False
) -> Result:
    """Let the contenders do `WARM_UP` rounds and then `rounds` that count, in turn.

    In a script, the call belongs under `if __name__ == "__main__":`, since the baseline starts processes.

    Args:
        workload: what they do.
        rounds: counted rounds of each contender.
        console: what shows the progress; nothing does by default.
        local: without Ray, both in this process and in its processor time.
    """
    console = console or Console()
    console.note(f"{workload.name}: starting")
    rows = server_rows(workload)
    with ExitStack() as stack:
        contenders, engine = (line_up_here if local else line_up)(workload, stack)
        turns: list[list[Turn]] = [[] for _ in contenders]
        for round in range(1, WARM_UP + rounds + 1):
            for place in range(len(contenders)):
                # Another one begins every time: what comes after an idle moment, or after Ray, may differ.
                number = (place + round) % len(contenders)
                turn = contenders[number].round(round)
                if round > WARM_UP:
                    turns[number].append(turn)
            if round > WARM_UP:
                last = ", ".join(
                    f"{one.name} {own[-1].seconds:.3g} s" for one, own in zip(contenders, turns, strict=True)
                )
                console.note(f"{workload.name}: round {round - WARM_UP}/{rounds}  {last}")
        measured = tuple(
            Measured(one.name, one.processes, one.start_seconds, tuple(own))
            for one, own in zip(contenders, turns, strict=True)
        )
        last_round = WARM_UP + rounds
        phases = spent(engine, range(last_round + 1, last_round + PHASE_ROUNDS + 1))
    return Result(workload, rows, measured, local, phases)


def spread(values: np.ndarray) -> Spread:
    """Median and quartiles."""
    return Spread(*(float(value) for value in np.quantile(values, (0.5, 0.25, 0.75))))
