"""What an epoch of every method costs beside one of FedAvg, in the local engine."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from raypfl.bench.runner import WARM_UP, Spread, spread
from raypfl.bench.workloads import Workload
from raypfl.console import Console
from raypfl.data import Pool
from raypfl.engine.local import LocalEngine
from raypfl.engine.world import World, make_world
from raypfl.errors import ConfigError
from raypfl.explain import suggest
from raypfl.methods import METHODS
from raypfl.settings import RunConfig

REFERENCE = "fedavg"
OPTIMIZER = {"name": "sgd", "lr": 0.01}
"""Plain SGD, the cheapest step there is: no ratio looks better for a costly optimizer on both sides."""


class Entry(NamedTuple):
    """One line of the table: a method with its defaults or in a variant."""

    name: str
    options: dict[str, Any]
    """The configuration's `method`."""


class Round(NamedTuple):
    """One round of all clients, in seconds of this process, which works on one thread and waits for nothing.

    Not of the clock on the wall: other processes would count, and ratios need finer ones.
    """

    train_seconds: float
    """Local updates; evaluation apart."""
    server_seconds: float
    """Plan, download and aggregation."""
    evaluation_seconds: float
    """One evaluation of all clients with what the server holds after the round."""
    down_bytes: float
    """What a participant receives, on average."""
    up_bytes: float
    """What a participant sends, on average."""


class Turn(NamedTuple):
    """A round of a method and, right before or after it, one of FedAvg."""

    own: Round
    fedavg: Round


class Cost(NamedTuple):
    """All counted turns of one entry."""

    entry: Entry
    epochs: float
    """Passes over a client's samples in one of its local updates."""
    fedavg_epochs: float
    at_most: float | None
    """What the method says that an epoch costs beside one of FedAvg, at most."""
    turns: tuple[Turn, ...]

    def spread(self, name: str) -> Spread:
        """Median and quartiles of one quantity of a round."""
        return spread(self.column(name))

    def column(self, name: str) -> np.ndarray:
        """One quantity of every round, float64."""
        return np.array([getattr(turn.own, name) for turn in self.turns], np.float64)

    def ratios(self, name: str) -> np.ndarray:
        """One quantity as a multiple of FedAvg's in the same turn, float64."""
        return self.column(name) / np.array([getattr(turn.fedavg, name) for turn in self.turns], np.float64)

    @property
    def epoch_ratios(self) -> np.ndarray:
        """An epoch of local training as a multiple of FedAvg's in the same turn, float64."""
        return self.ratios("train_seconds") * (self.fedavg_epochs / self.epochs)

    @property
    def is_above(self) -> bool:
        """Whether the median turn costs more than the method says."""
        return self.at_most is not None and spread(self.epoch_ratios).median > self.at_most


class Costs(NamedTuple):
    """One workload."""

    workload: Workload
    measured: tuple[Cost, ...]
    left_out: dict[str, str]
    """Entries that the workload does not suit, and why."""


class Contestant:
    """A method in the local engine."""

    def __init__(self, entry: Entry, workload: Workload, pool: Pool) -> None:
        world = world_of(entry, workload, pool)
        method = world.method()
        self.entry, self.at_most = entry, method.cost()
        self.epochs = method.passes(world.config.training, workload.train_samples)
        self._engine = LocalEngine(world, pool)
        self._round = 0

    def round(self) -> Round:
        """Train, aggregate and evaluate every client once."""
        self._round += 1
        hub, (host,) = self._engine.hub, self._engine.hosts
        times = [process_time()]
        opening, (work,) = hub.open(self._round, train=True, evaluate_pre=False, evaluate_post=False)
        times.append(process_time())
        uploads, report = host.work(work)
        times.append(process_time())
        hub.close(uploads)
        times.append(process_time())
        _, (work,) = hub.open(self._round + 1, train=False, evaluate_pre=True, evaluate_post=False)
        times.append(process_time())
        host.work(work)
        times.append(process_time())
        opened, trained, closed, _, evaluated = np.diff(times)
        src, dst, size = (
            np.concatenate([opening.traffic[name], report.traffic[name]]) for name in ("src", "dst", "bytes")
        )
        # A message between clients counts at both.
        down, up = (float(size[end >= 0].sum()) / opening.participants for end in (dst, src))
        return Round(trained, opened + closed, evaluated, down, up)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def entries(names: Iterable[str] = ()) -> list[Entry]:
    """These methods and their variants; all methods for none.

    Raises:
        ConfigError: there is no method of a name.
    """
    names = list(dict.fromkeys(names)) or list(METHODS)
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"there is no method {name!r}. {suggest(name, METHODS)}")
    return [
        Entry(f"{name} {variant}".strip(), {"name": name, **METHODS[name].needed, **options})
        for name in names
        for variant, options in {"": {}, **METHODS[name].variants}.items()
    ]


def world_of(entry: Entry, workload: Workload, pool: Pool) -> World:
    """The workload with this method, plain SGD, and half of the other samples for validation.

    Raises:
        ConfigError: the method cannot work with it.
    """
    config = workload.config().model_dump()
    config["method"] = entry.options
    config["training"]["optimizer"] = OPTIMIZER
    config["evaluation"]["points"] = ["pre"]
    federation = workload.federation(workload.test_samples // 2)
    return make_world(RunConfig.model_validate(config), pool, federation)


def measure(
    workload: Workload, chosen: Iterable[Entry], rounds: int, console: Console | None = None
) -> Costs:
    """Let every entry do `WARM_UP` rounds and then `rounds` that count, each beside a round of FedAvg.

    Args:
        workload: what they train on.
        chosen: what is measured (`entries`).
        rounds: counted turns of each entry.
        console: what shows the progress; nothing does by default.
    """
    console = console or Console()
    pool = workload.pool()
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        reference = Contestant(entries([REFERENCE])[0], workload, pool)
        fedavg = stack.enter_context(closing(reference))
        contestants: list[Contestant] = []
        for entry in chosen:
            try:
                contestants.append(stack.enter_context(closing(Contestant(entry, workload, pool))))
            except ConfigError as error:
                left_out[entry.name] = str(error)
        turns: list[list[Turn]] = [[] for _ in contestants]
        for round in range(1, WARM_UP + rounds + 1):
            for one, own in zip(contestants, turns, strict=True):
                # The two change places every round: what comes after another method may differ.
                pair = (fedavg, one) if round % 2 else (one, fedavg)
                done = {member: member.round() for member in pair}
                if round > WARM_UP:
                    own.append(Turn(done[one], done[fedavg]))
            console.note(
                f"{workload.name}: round {round} of {WARM_UP + rounds} (the first {WARM_UP} warm up)"
            )
        measured = tuple(
            Cost(one.entry, one.epochs, fedavg.epochs, one.at_most, tuple(own))
            for one, own in zip(contestants, turns, strict=True)
        )
    return Costs(workload, measured, left_out)
