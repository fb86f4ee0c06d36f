"""A sweep from its file to its results: begin, go on, plan."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from raypfl import data
from raypfl.console import Console
from raypfl.data import Pool
from raypfl.engine.placement import Node, connected
from raypfl.engine.planning import nodes_of, settle
from raypfl.engine.world import World
from raypfl.errors import ConfigError, StorageError
from raypfl.experiment import Workshop, pool_key
from raypfl.records.environment import environment
from raypfl.records.files import write_json, write_text
from raypfl.settings import RunConfig
from raypfl.sweep import tuner
from raypfl.sweep.config import Asha, Median, SweepConfig, ToTheEnd
from raypfl.sweep.folder import Outcome, SweepFolder
from raypfl.sweep.plots import write_plots
from raypfl.sweep.reading import SWEEP, is_sweep, read
from raypfl.sweep.resources import Ask, ask_of, at_once
from raypfl.sweep.results import PointResult, Row, best_of, points_of, row_of, write_best, write_trials
from raypfl.sweep.summary import CHOSEN, chosen_table, paper_table, show, summary_of
from raypfl.sweep.trials import Trial, Trials, kind_of, one_of_each_kind
from raypfl.sweep.worker import Terms, view_of


@dataclass(frozen=True)
class SweepResult:
    """What a sweep left."""

    path: Path
    points: tuple[PointResult, ...]
    best: Mapping[str, PointResult]
    """The best of all under "", or of each group of `select.per`."""


def run(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    retry_failed: bool = False,
    console: Console | None = None,
) -> SweepResult:
    """Run the trials of a sweep, or those that are left.

    Args:
        source: the sweep's file, or the same as a mapping; to resume, also its folder.
        overrides: `key=value`, see `reading.read`.
        resume: go on with the sweep of that name.
        retry_failed: with `resume`, run failed trials again (from their last checkpoint).
        console: what shows the progress; nothing does by default.

    Raises:
        RaypflError: with what is wrong, before any trial starts.
        KeyboardInterrupt: it was asked to stop; every trial that had begun has a checkpoint.
    """
    console = console or Console()
    if not isinstance(source, Mapping) and Path(source).is_dir():
        source, resume = _in_folder(Path(source), resume)
    sweep = Sweep(read(source, overrides))
    folder = sweep.folder
    if resume:
        if not folder.settings.is_file():
            raise StorageError(
                f"{folder.path} is not a sweep: it has no {SWEEP}. Leave out --resume to begin it, or give "
                "the name= and storage_path= it has."
            )
        folder.check_unchanged(sweep.config)
    elif folder.path.exists():
        raise StorageError(
            f"{folder.path} exists already, and nothing is overwritten. Continue it with "
            f"`raypfl sweep {folder.path} --resume`, or choose another `name=`."
        )
    sweep.check()
    if not resume:
        folder.begin(sweep.config)
        write_json(folder.path / "environment.json", environment())
    with folder.alone():
        stopped = sweep.work(console, retry_failed=retry_failed)
        result = sweep.finish(console)
    if stopped:
        console.note(f"Interrupted. Continue with: raypfl sweep {folder.path} --resume")
        raise KeyboardInterrupt
    return result


class Sweep:
    """The trials of one sweep, and what is known of them."""

    def __init__(self, config: SweepConfig) -> None:
        """Expand and check the space.

        Raises:
            ConfigError: a key is unknown, a value is wrong, or the constraints leave no point.
        """
        assert config.name is not None
        self.config = config
        self.folder = SweepFolder((Path(config.storage_path).expanduser() / config.name).absolute())
        self.trials = Trials(config, self.folder.path).listed()
        self.on = _split(config, self.trials)
        _check_views(config, self.trials)
        _check_scheduler(config, self.trials)
        self.address = self.trials[0].config.engine.address or os.environ.get("RAY_ADDRESS")
        self._rows: dict[str, Row] = {}
        self._asks: dict[str, Ask] = {}
        self.pools: dict[str, Pool] = {}

    def check(self) -> list[Node]:
        """Make sure that a trial of each kind can be set up and fits the cluster; returns its nodes.

        Raises:
            RaypflError: data are missing, a method does not fit its settings, or a trial asks for too much.
        """
        nodes = nodes_of(self.address)
        workshop = Workshop(Console())
        for kind, trial in one_of_each_kind(self.trials).items():
            world = self._world(workshop, trial.config)
            if trial.config.engine.name == "local":
                settle(world)
            self._asks[kind] = ask_of(trial.config, self.config.trial, world, nodes)
        return nodes

    def ask(self, trial: Trial) -> Ask:
        """What a trial asks of Ray; after `check`."""
        return self._asks[kind_of(trial)]

    def at_once(self, nodes: Sequence[Node]) -> int:
        """How many trials run beside each other (of the largest kind, where kinds differ)."""
        fitting = min(at_once(ask, nodes) for ask in self._asks.values())
        return min(fitting, len(self.trials), self.config.concurrency or fitting)

    def work(self, console: Console, *, retry_failed: bool) -> bool:
        """Run what has not ended; returns whether it was asked to stop."""
        self._collect()
        ended = ("finished", "stopped") if retry_failed else ("finished", "stopped", "failed")
        done = [trial for trial in self.trials if self._rows[trial.label]["status"] in ended]
        hears = not isinstance(self.config.scheduler, ToTheEnd)
        # A scheduler that compares trials has to hear of those that have ended, too.
        trials = [trial for trial in self.trials if (trial not in done or hears)]
        if len(done) == len(self.trials):
            console.note(f"{self.config.name}: complete, {len(done)} trials")
            return False
        terms = Terms(self.folder.path, self.config.select, self.on, hears)
        with connected(self.address) as nodes:
            console.note(
                f"{self.config.name}: {len(self.trials) - len(done)} of {len(self.trials)} trials, "
                f"{self.at_once(nodes)} at once, in {self.folder.path}"
            )
            supply = _Queue(trials, self, console, done=len(done))
            return tuner.run(
                supply,
                len(trials),
                self.ask,
                terms,
                self.pools,
                scheduler=self.config.scheduler,
                rounds=max(trial.config.rounds for trial in trials),
                concurrency=self.config.concurrency,
            )

    def finish(self, console: Console) -> SweepResult:
        """Write tables, figures and the best configuration of what has ended so far."""
        self._collect()
        points = points_of(self.trials, self._rows)
        best = best_of(points, self.config.select.per)
        rows = [self._rows[trial.label] for trial in self.trials]
        name = self.config.name or ""
        write_trials(self.folder, rows)
        write_text(self.folder.summary, summary_of(name, points, best, rows, self.on))
        for number, (group, point) in enumerate(best.items(), 1):
            file = "best.yaml" if not group else f"best-{number}.yaml"
            write_best(self.folder, file, point, self.trials, self._why(group, point))
        figures = write_plots(self.folder.plots, name, points, self.on)
        console.table(chosen_table(points, self.on) if self.on == "validation" else paper_table(points))
        for group, point in best.items():
            console.note(self._why(group, point))
        counts = Counter(row["status"] for row in rows)
        console.note(
            f"{', '.join(f'{count} {status}' for status, count in counts.items())}. Tables are in "
            f"{self.folder.summary}, trials in {self.folder.trials}, {len(figures)} figures in "
            f"{self.folder.plots}."
        )
        return SweepResult(self.folder.path, tuple(points), best)

    def refresh(self, trial: Trial) -> Row:
        """A trial's row as its folder has it now, also in the table of trials."""
        row = row_of(trial, self.folder.outcome(trial.label), self.folder, self.config.select, self.on)
        self._rows[trial.label] = row
        write_trials(self.folder, [self._rows[one.label] for one in self.trials])
        return row

    def _collect(self) -> None:
        for trial in self.trials:
            outcome = self.folder.outcome(trial.label)
            self._rows[trial.label] = row_of(trial, outcome, self.folder, self.config.select, self.on)

    def _why(self, group: str, point: PointResult) -> str:
        """What the best point is best in, and its figures."""
        values = ", ".join(f"{key} = {value}" for key, value in point.values.items())
        head = f"Best{f' for {group}' if group else ''}: {values}."
        seeds = f"mean{' ± sd' if len(point.statuses) > 1 else ''} over {len(point.statuses)} seeds"
        if self.on == "validation":
            return (
                f"{head}\nChosen on validation ({show(point.measures['score'])} %, {CHOSEN['validation']}); "
                f"test accuracy in that round {show(point.measures['test'])} %, {seeds}."
            )
        return f"{head}\nChosen on test ({show(point.measures['best_test'])} %, {CHOSEN['test']}), {seeds}."

    def _world(self, workshop: Workshop, config: RunConfig) -> World:
        """A run's world; its data set is kept for the trials, unless each seed has its own."""
        which = pool_key(config)
        if config.data.name != "synthetic":
            if which not in self.pools:
                self.pools[which] = data.load(config.data, config.seed)
            workshop.give(config, self.pools[which])
        return workshop.world_of(config)


class _Queue:
    """Trials in the order of the space."""

    def __init__(self, trials: Sequence[Trial], sweep: Sweep, console: Console, *, done: int) -> None:
        self._waiting, self._sweep, self._console = list(trials), sweep, console
        self._done, self._before, self._begin = done, done, time.monotonic()

    def next(self) -> Trial | None:
        return self._waiting.pop(0) if self._waiting else None

    def exhausted(self) -> bool:
        return not self._waiting

    def ended(self, trial: Trial, error: str | None) -> None:
        folder = self._sweep.folder
        outcome = folder.outcome(trial.label)
        if error is not None:
            folder.record(trial.label, Outcome(status="failed", seconds=0.0, error=error))
        elif outcome is None and folder.stop.exists():
            return
        elif outcome is None:
            # Stopped by the scheduler, and its process ended before it could say so.
            folder.record(trial.label, Outcome(status="stopped", seconds=0.0))
        row = self._sweep.refresh(trial)
        if row["status"] == "interrupted":
            return
        self._done += 1
        self._console.note(
            f"[{self._done}/{len(self._sweep.trials)}] {trial.label}: {_told(row)}{self._left()}"
        )

    def _left(self) -> str:
        count = self._done - self._before
        left = len(self._sweep.trials) - self._done
        if count < 1 or left < 1:
            return ""
        return f", ETA {timedelta(seconds=int((time.monotonic() - self._begin) / count * left))}"


def _told(row: Row) -> str:
    if row["status"] == "failed":
        return f"failed: {row['error']}"
    score = "" if row["score"] is None else f"{100 * row['score']:.2f} % on {row['score_split']}, "
    stopped = f"stopped in round {row['rounds']}, " if row["status"] == "stopped" else ""
    return f"{stopped}{score}{row['seconds']:.1f} s"


def _split(config: SweepConfig, trials: Sequence[Trial]) -> str:
    """The split that scores are of."""
    without = [trial for trial in trials if not trial.config.partition.validation_fraction]
    if config.select.on == "validation" and without:
        raise ConfigError(
            f"select.on = validation: {without[0].label} has partition.validation_fraction = 0, so no "
            "validation split. Set it, for instance to 0.2, or choose select.on=test as the papers do."
        )
    if config.select.on == "auto":
        return "test" if without else "validation"
    return config.select.on


def _check_views(config: SweepConfig, trials: Sequence[Trial]) -> None:
    for trial in trials:
        model, point = view_of(trial.config, config.select)
        evaluation = trial.config.evaluation
        if model not in evaluation.models or point not in evaluation.points:
            raise ConfigError(
                f"{trial.label} would have no score: its evaluation leaves out ({model}, {point}). Add them "
                "to evaluation.models and evaluation.points, or set select.view."
            )


def _check_scheduler(config: SweepConfig, trials: Sequence[Trial]) -> None:
    scheduler = config.scheduler
    unknown = [key for key in config.select.per if key not in config.keys]
    if unknown:
        raise ConfigError(f"select.per: {unknown[0]} is no key of the space ({', '.join(config.keys)}).")
    if not isinstance(scheduler, Asha | Median):
        return
    if config.select.per:
        raise ConfigError(
            f"scheduler.name = {scheduler.name} compares all trials with each other, and select.per wants a "
            "best point for each group. Leave one of them out, or run a sweep for each group."
        )
    shortest = min(trial.config.rounds for trial in trials)
    if scheduler.grace >= shortest:
        raise ConfigError(
            f"scheduler.grace = {scheduler.grace} leaves nothing to stop in {shortest} rounds. Lower it."
        )


def _in_folder(path: Path, resume: bool) -> tuple[Path, bool]:
    """The settings inside a sweep's folder."""
    if not is_sweep(path):
        raise StorageError(
            f"{path} is not a sweep: it has no {SWEEP}. Give the folder that the sweep printed."
        )
    if not resume:
        raise StorageError(
            f"{path} is a sweep that has begun. Continue it with `raypfl sweep {path} --resume`."
        )
    return path / SWEEP, True
