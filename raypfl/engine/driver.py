"""The round loop: rounds, records, checkpoints, faults, interruptions. Knows no engine and no method."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from raypfl.configuration import leave_to_import, to_dict
from raypfl.console import Console
from raypfl.engine.contract import Engine, HostsLost, RoundReport
from raypfl.engine.faults import Patience, Tolerance, first_line
from raypfl.engine.supervisor import Supervisor, statistics_of
from raypfl.engine.world import World, is_evaluated, training_device
from raypfl.errors import (
    CheckpointError,
    ClientError,
    DivergedError,
    PlacementError,
    RaypflError,
    StorageError,
)
from raypfl.records import checkpoints
from raypfl.records.folder import RunFolder
from raypfl.records.log import Taken
from raypfl.records.manifest import Manifest
from raypfl.records.metrics import Metrics
from raypfl.records.storage import Place
from raypfl.watch import Watchers

T = TypeVar("T")


class Driver:
    """One run, from a checkpoint (or the start) to its last round.

    Args:
        world: the run.
        engine: hosts and hub, at the state of round `done`.
        folder: where the run's files are.
        metrics: its tables, truncated to round `done`.
        done: completed rounds.
        reported: the (model, point) to show while the run goes on.
        tolerance: what is done about faults; absent: what the configuration says.
        patience: how long storage may fail; absent: what the configuration says.
        supervisor: who hears scores, and may ask for a stop.
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
        tolerance: Tolerance | None = None,
        patience: Patience | None = None,
        supervisor: Supervisor | None = None,
        watchers: Watchers | None = None,
    ) -> None:
        self._world, self._engine, self._folder, self._metrics = world, engine, folder, metrics
        self._console, self._round, self._reported = console, done, reported
        self._config = world.config
        self._supervisor = supervisor or Supervisor()
        self._tolerance = tolerance or Tolerance(self._config.faults)
        self._patience = patience or Patience(self._config.faults.storage_seconds)
        self._unsaved, self._saved = False, done
        self._watchers = watchers or Watchers()

    def run(self) -> None:
        """Go on to the end.

        Raises:
            DivergedError: a client's model is no longer finite.
            ClientError: a client raised or hung, and the run is not to go on without it.
            PlacementError: actors were lost, and are not to be replaced (again).
            StorageError: it failed for too long. All of these name the last good checkpoint.
            KeyboardInterrupt: interrupted; a checkpoint was written first.
        """
        try:
            with _interruptions() as stop:
                finished = False
                while not finished:
                    finished = self._step(stop)
                    if stop.is_set():
                        self._console.note(
                            f"Interrupted after round {self._round}. Continue with: {self._resume}"
                        )
                        raise KeyboardInterrupt
            self._insist(lambda: self._metrics.flush(force=True))
        except (DivergedError, ClientError, PlacementError, StorageError) as error:
            self._flush_if_possible()
            raise self._with_last_good(error) from error.__cause__
        except BaseException:
            self._flush_if_possible()
            raise

    def _step(self, stop: threading.Event) -> bool:
        """A round, or the evaluation after the last one; returns whether that was all."""
        try:
            if self._round >= self._config.rounds:
                if self._due(self._round) and "pre" in self._config.evaluation.points:
                    records = self._engine.evaluate(self._round).clients
                    self._attempt(lambda: self._metrics.add_evaluation(records))
                    self._watchers.evaluation(records)
                    self._tell(records)
                return True
            self._one_round()
            if self._supervisor.stopping():
                stop.set()
            if self._round >= self._config.rounds or stop.is_set():
                self._insist(self._save)
            elif self._checkpoint_due() or (self._unsaved and self._patience.due):
                self._unsaved = not self._attempt(self._save)
        except (HostsLost, ClientError) as fault:
            self._recover(fault)
        return False

    def _attempt(self, write: Callable[[], None]) -> bool:
        """Write; if storage fails the run goes on, and what could not be written is tried again later.

        Returns:
            Whether it is written.

        Raises:
            StorageError: storage has failed for too long. CheckpointError, always: waiting would not help.
        """
        try:
            write()
        except StorageError as error:
            self._storage_failed(error)
            return False
        self._storage_works()
        return True

    def _insist(self, work: Callable[[], T]) -> T:
        """Write or read, and wait while storage fails, where there is nothing else to do. Raises likewise."""
        while True:
            try:
                result = work()
            except StorageError as error:
                self._storage_failed(error)
                self._patience.wait()
            else:
                self._storage_works()
                return result

    def _storage_failed(self, error: StorageError) -> None:
        # What waiting would not help with.
        if isinstance(error, CheckpointError | Taken):
            raise error
        if not self._patience.failing:
            self._console.note(f"{first_line(error)} The run keeps what it cannot write, and tries again.")
        self._patience.failed(error)

    def _storage_works(self) -> None:
        if self._patience.failing:
            self._console.note("Storage works again.")
        self._patience.succeeded()

    def _flush_if_possible(self) -> None:
        # The error that ends the run is the one to show.
        with suppress(StorageError):
            self._metrics.flush(force=True)

    def _one_round(self) -> None:
        round = self._round + 1
        begin = time.perf_counter()
        away = self._tolerance.away(round)
        report = self._engine.round(
            round, evaluate_pre=self._due(self._round), evaluate_post=self._due(round), away=tuple(away)
        )
        seconds = time.perf_counter() - begin
        self._attempt(
            lambda: self._metrics.add_round(
                round,
                clients=report.clients,
                traffic=report.traffic,
                diagnostics=report.diagnostics,
                pairs=report.pairs,
                participants=report.participants,
                round_seconds=seconds,
                server_seconds=report.server_seconds,
                evaluation_seconds=report.evaluation_seconds,
                clock=report.clock,
                dropped=away,
            )
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
        self._tell(report.clients)

    def _tell(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Pass scores on, when they are on disk: whoever hears of them may end the run there and then."""
        if self._supervisor.evaluated is None:
            return
        for round, by_split in statistics_of(records, self._supervisor.view or self._reported).items():
            self._metrics.flush(force=True)
            self._supervisor.evaluated(round, by_split)

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
            dropped=self._tolerance.dropped(self._round),
        )
        checkpoints.commit(building, manifest, parts)
        self._unsaved, self._saved = False, self._round
        self._tolerance.committed()
        # Last: what is written is safe, also if old checkpoints cannot be removed.
        checkpoints.prune(self._folder.checkpoints, self._config.checkpoint.keep)

    def _recover(self, fault: HostsLost | ClientError) -> None:
        """Everything back to the last checkpoint: survivors have advanced, and would not match the replay."""
        checkpoint, back = self._insist(self._last)
        self._console.note(self._tolerance.survive(fault, self._round + 1, back))
        try:
            self._insist(lambda: self._engine.restore(checkpoint))
        except HostsLost as another:
            return self._recover(another)
        self._insist(lambda: self._metrics.truncate(back, evaluated=self._due(back)))
        self._round = back

    def _last(self) -> tuple[Place | None, int]:
        """The last checkpoint, and its round."""
        checkpoint, manifest = last_checkpoint(self._folder)
        back = 0 if manifest is None else manifest.round
        if back < self._saved:
            raise StorageError(f"the checkpoint of round {self._saved} is not in {self._folder.checkpoints}.")
        return checkpoint, back

    def _accuracy(self, report: RoundReport) -> float | None:
        model, point = self._reported
        shown = [
            np.atleast_1d(block["accuracy"])
            for block in report.clients
            if (block["model"], block["point"], block["split"]) == (model, point, "test")
        ]
        return float(np.concatenate(shown).mean()) if shown else None

    def _with_last_good(self, error: RaypflError) -> RaypflError:
        """The same error, which also says where the run can go on from."""
        try:
            checkpoint = checkpoints.latest(self._folder.checkpoints)
        except StorageError:
            return error
        where = (
            "There is no checkpoint yet." if checkpoint is None else f"Last good checkpoint: {checkpoint}."
        )
        kept = f"Records up to round {self._round} are kept in {self._folder.metrics}."
        if self._metrics.has_pending:
            kept = f"Records since round {self._metrics.written} could not be written."
        said = str(error)
        # After a traceback, on a line of its own.
        said += "" if said.endswith("\n") else " "
        # Who diverges would do so again.
        then = "" if isinstance(error, DivergedError) else f" Continue with: {self._resume}"
        return type(error)(f"{said}{where} {kept}{then}")

    @property
    def _resume(self) -> str:
        return f"raypfl resume {self._folder.path}{leave_to_import(self._config)}"


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


def last_checkpoint(folder: RunFolder) -> tuple[Place | None, Manifest | None]:
    """The last checkpoint of a run and what it says of itself; Nones if there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    checkpoint = checkpoints.latest(folder.checkpoints)
    return checkpoint, None if checkpoint is None else checkpoints.read_manifest(checkpoint)
