"""The round loop: rounds, records, checkpoints, lost hosts, interruptions. Knows no engine and no method."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from raypfl.configuration import to_dict
from raypfl.console import Console
from raypfl.engine.contract import Engine, HostsLost, RoundReport
from raypfl.engine.world import World, is_evaluated, training_device
from raypfl.errors import DivergedError, PlacementError
from raypfl.records import checkpoints
from raypfl.records.folder import RunFolder
from raypfl.records.manifest import Manifest
from raypfl.records.metrics import Metrics
from raypfl.watch import Watchers

MAX_LOSSES = 3
"""Times that lost actors are replaced without a new checkpoint in between; then something is wrong."""


class Driver:
    """One run, from a checkpoint (or the start) to its last round.

    Args:
        world: the run.
        engine: hosts and hub, at the state of round `done`.
        folder: where the run's files are.
        metrics: its tables, truncated to round `done`.
        done: completed rounds.
        reported: the (model, point) to show while the run goes on.
        watchers: who else is told figures.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        folder: RunFolder,
        metrics: Metrics,
        console: Console,
        *,
        done: int,
        reported: tuple[str, str],
        watchers: Watchers | None = None,
    ) -> None:
        self._world, self._engine, self._folder, self._metrics = world, engine, folder, metrics
        self._console, self._round, self._reported = console, done, reported
        self._config = world.config
        self._watchers = watchers or Watchers()
        self._losses = 0

    def run(self) -> None:
        """Go on to the end.

        Raises:
            DivergedError: a client's model is no longer finite; names the last good checkpoint.
            KeyboardInterrupt: interrupted; a checkpoint was written first.
        """
        try:
            with _interruptions() as stop:
                finished = False
                while not finished:
                    finished = self._step(stop)
                    if stop.is_set():
                        self._console.note(
                            f"Interrupted after round {self._round}. "
                            f"Continue with: raypfl resume {self._folder.path}"
                        )
                        raise KeyboardInterrupt
        except DivergedError as error:
            raise DivergedError(f"{error} {self._last_good()}") from None
        finally:
            self._metrics.flush(force=True)

    def _step(self, stop: threading.Event) -> bool:
        """A round, or the evaluation after the last one; returns whether that was all."""
        try:
            if self._round >= self._config.rounds:
                if self._due(self._round) and "pre" in self._config.evaluation.points:
                    report = self._engine.evaluate(self._round)
                    self._metrics.add_evaluation(report.clients)
                    self._watchers.evaluation(report.clients)
                return True
            self._one_round()
            if self._checkpoint_due() or stop.is_set():
                self._save()
        except HostsLost as loss:
            self._recover(loss)
        return False

    def _one_round(self) -> None:
        round = self._round + 1
        begin = time.perf_counter()
        report = self._engine.round(
            round, evaluate_pre=self._due(self._round), evaluate_post=self._due(round)
        )
        seconds = time.perf_counter() - begin
        self._metrics.add_round(
            round,
            clients=report.clients,
            traffic=report.traffic,
            diagnostics=report.diagnostics,
            participants=report.participants,
            round_seconds=seconds,
            server_seconds=report.server_seconds,
            evaluation_seconds=report.evaluation_seconds,
            clock=report.clock,
        )
        self._round = round
        self._console.round(
            round, seconds=seconds, clients=report.participants, accuracy=self._accuracy(report)
        )
        self._watchers.round(
            round,
            seconds=seconds,
            participants=report.participants,
            server_seconds=report.server_seconds,
            evaluation_seconds=report.evaluation_seconds,
            clients=report.clients,
            traffic=report.traffic,
        )

    def _due(self, round: int) -> bool:
        return is_evaluated(self._config, round)

    def _checkpoint_due(self) -> bool:
        every = self._config.checkpoint.every
        return self._round >= self._config.rounds or (every > 0 and self._round % every == 0)

    def _save(self) -> None:
        # Tables first: a checkpoint promises that everything up to its round is on disk.
        self._metrics.flush(force=True)
        building = checkpoints.begin(self._folder.checkpoints, self._round)
        parts = self._engine.save(building)
        world = self._world
        manifest = Manifest(
            round=self._round,
            config=to_dict(self._config),
            block=world.block,
            width=world.width,
            threads=self._config.engine.threads,
            partition=world.federation.fingerprint,
            data=world.data,
            device=training_device(self._config).type,
        )
        checkpoints.commit(building, manifest, parts)
        checkpoints.prune(self._folder.checkpoints, self._config.checkpoint.keep)
        self._losses = 0

    def _recover(self, loss: HostsLost) -> None:
        """Everything back to the last checkpoint: survivors have advanced, and would not match the replay."""
        checkpoint = checkpoints.latest(self._folder.checkpoints)
        back = 0 if checkpoint is None else checkpoints.read_manifest(checkpoint).round
        where = f"in round {self._round + 1}"
        self._losses += 1
        if self._losses > MAX_LOSSES:
            raise PlacementError(
                f"actors were lost {self._losses} times since round {back}, the last time {where}: "
                f"{_first_line(loss)} If memory is short, lower engine.num_actors, which changes "
                f"no result. Continue with: raypfl resume {self._folder.path}"
            )
        self._console.note(
            f"An actor was lost {where}; replaced, and back to round {back}. ({_first_line(loss)})"
        )
        try:
            self._engine.restore(checkpoint)
        except HostsLost as another:
            return self._recover(another)
        self._metrics.truncate(back, evaluated=self._due(back))
        self._round = back

    def _accuracy(self, report: RoundReport) -> float | None:
        model, point = self._reported
        shown = [
            np.atleast_1d(block["accuracy"])
            for block in report.clients
            if (block["model"], block["point"], block["split"]) == (model, point, "test")
        ]
        return float(np.concatenate(shown).mean()) if shown else None

    def _last_good(self) -> str:
        checkpoint = checkpoints.latest(self._folder.checkpoints)
        where = (
            "There is no checkpoint yet." if checkpoint is None else f"Last good checkpoint: {checkpoint}."
        )
        return f"{where} Records up to round {self._round} are kept in {self._folder.metrics}."


@contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """The first Ctrl-C (or SIGTERM) asks for a checkpoint and a stop; a second Ctrl-C stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        # Before the words, so that a second Ctrl-C that follows on them does what they say.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Straight to the descriptor: a print that the signal came upon cannot be entered again.
        os.write(2, b"Stopping after this round, with a checkpoint; Ctrl-C again stops at once.\n")

    before: dict[Any, Any] = {
        number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def last_checkpoint(folder: RunFolder) -> tuple[Path | None, Manifest | None]:
    """The last checkpoint of a run and what it says of itself; Nones if there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    checkpoint = checkpoints.latest(folder.checkpoints)
    return checkpoint, None if checkpoint is None else checkpoints.read_manifest(checkpoint)
