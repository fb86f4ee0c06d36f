"""A sweep from its file to its results: begin it, or go on with it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
from pydantic import JsonValue

from raypfl import data
from raypfl.configuration import check_imports, parse_overrides
from raypfl.console import Console
from raypfl.data import Pool
from raypfl.data.sources.images import ImageConfig
from raypfl.engine.placement import Node, connected, nodes_alive
from raypfl.engine.planning import nodes_of, settle
from raypfl.engine.world import World
from raypfl.errors import StorageError
from raypfl.records.environment import environment
from raypfl.records.files import write_json, write_text
from raypfl.records.storage import is_remote
from raypfl.settings import ExperimentConfig, RunConfig
from raypfl.sweep import tuner
from raypfl.sweep.checks import check_scheduler, check_views, split_of
from raypfl.sweep.config import Listed, Pbt, SweepConfig, ToTheEnd
from raypfl.sweep.folder import Outcome, SweepFolder
from raypfl.sweep.plots import write_plots
from raypfl.sweep.population import clear, lineage
from raypfl.sweep.reading import SWEEP, is_sweep, read
from raypfl.sweep.resources import Ask, ask_of, at_once
from raypfl.sweep.results import PointResult, Row, best_of, points_of, row_of, write_best, write_trials
from raypfl.sweep.summary import CHOSEN, chosen_table, paper_table, show, summary_of
from raypfl.sweep.supply import Proposals, Queue, Source
from raypfl.sweep.trials import Trial, Trials, kind_of, one_of_each_kind
from raypfl.sweep.worker import Terms
from raypfl.workshop import Workshop, pool_key


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
    allow_imports: Collection[str] = (),
    console: Console | None = None,
) -> SweepResult:
    """Run the trials of a sweep, or those that are left.

    Args:
        source: the sweep's file, or the same as a mapping; to resume, also its folder.
        overrides: `key=value`, see `reading.read`.
        resume: go on with the sweep of that name.
        retry_failed: with `resume`, run failed trials again (from their last checkpoint).
        allow_imports: packages of which a file may name models (see `configuration.load`).
        console: what shows the progress; nothing does by default.

    Raises:
        RaypflError: with what is wrong, before any trial starts.
        KeyboardInterrupt: it was asked to stop; every trial that had begun has a checkpoint.
    """
    console = console or Console()
    if not isinstance(source, Mapping) and Path(source).is_dir():
        source = _in_folder(Path(source), resume)
    sweep = opened(source, overrides, allow_imports)
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


def opened(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], allow_imports: Collection[str]
) -> Sweep:
    """A sweep whose code is what its caller wrote, or allowed."""
    if isinstance(source, Mapping):
        return Sweep(read(source, overrides))
    check = partial(check_imports, allow_imports=allow_imports, typed=parse_overrides(overrides))
    return Sweep(read(source, overrides), check)


class Sweep:
    """The trials of one sweep, and what is known of them."""

    def __init__(self, config: SweepConfig, check: Callable[[ExperimentConfig], None] | None = None) -> None:
        """Expand and check the space.

        Args:
            config: the sweep.
            check: raises if a point's configuration may not be run.

        Raises:
            ConfigError: a key is unknown, a value is wrong, or the constraints leave no point.
        """
        assert config.name is not None
        self.config = config
        if is_remote(config.storage_path):
            raise StorageError(
                f"storage_path = {config.storage_path}: the folder of a sweep must be on a file system that "
                "is mounted, on every node if there are several. Runs can be elsewhere, sweeps cannot."
            )
        self.folder = SweepFolder((Path(config.storage_path).expanduser() / config.name).absolute())
        self._makes = Trials(config, self.folder.path, check)
        self.examples = self._makes.examples()
        """All trials, or, where results decide which there will be, a few of their kind."""
        self.on = split_of(config, self.examples)
        check_views(config, self.examples)
        check_scheduler(config, self.examples)
        self.total = len(self.examples)
        if not isinstance(config.search, Listed):
            self.total = config.search.points * len({trial.seed for trial in self.examples})
        self.address = self.examples[0].config.engine.address or os.environ.get("RAY_ADDRESS")
        self.pools: dict[str, Pool] = {}
        self._workshop = Workshop(Console())
        self._nodes: list[Node] = []
        self._asks: dict[str, Ask] = {}
        self._trials: dict[str, Trial] = {}
        self._rows: dict[str, Row] = {}

    def check(self, nodes: list[Node] | None = None) -> None:
        """Make sure that a trial of each kind can be set up, and fits the cluster.

        Args:
            nodes: of the cluster, if they are known.

        Raises:
            RaypflError: data are missing, a method does not fit its settings, or a trial asks for too much.
        """
        if nodes is None:
            nodes = nodes_alive() if ray.is_initialized() else nodes_of(self.address)
        self._nodes = nodes
        for trial in one_of_each_kind(self.examples).values():
            world = self.world(trial.config)
            if trial.config.engine.name == "local":
                settle(world)
            self.ask(trial)

    def world(self, config: RunConfig) -> World:
        """A run's world; its data set is kept for the trials, unless each seed has its own."""
        if isinstance(config.data, ImageConfig):
            which = pool_key(config)
            if which not in self.pools:
                self.pools[which] = data.load(config.data, config.seed)
            self._workshop.give(config, self.pools[which])
        return self._workshop.world_of(config)

    def ask(self, trial: Trial) -> Ask:
        """What a trial asks of Ray; after `check`."""
        kind = kind_of(trial)
        if kind not in self._asks:
            world = self.world(trial.config) if trial.config.engine.name == "ray" else None
            self._asks[kind] = ask_of(trial.config, self.config.trial, world, self._nodes)
        return self._asks[kind]

    def at_once(self) -> int:
        """How many trials run beside each other (of the largest kind, where kinds differ); after `check`."""
        fitting = min(at_once(ask, self._nodes) for ask in self._asks.values())
        return min(fitting, self.total, self.config.concurrency or fitting)

    def work(self, console: Console, *, retry_failed: bool) -> bool:
        """Run what has not ended; returns whether it was asked to stop."""
        source = self._source(() if retry_failed else ("failed",))
        over = ENDED if retry_failed else (*ENDED, "failed")
        done = sum(row["status"] in over for row in self._rows.values())
        if source.exhausted():
            console.note(f"{self.config.name}: complete, {done} trials")
            return False
        scheduler = self.config.scheduler
        interval = scheduler.interval if isinstance(scheduler, Pbt) else None
        console.note(
            f"{self.config.name}: {self.total - done} of {self.total} trials, {self.at_once()} at once, in "
            f"{self.folder.path}"
        )
        with connected(self.address):
            return tuner.run(
                _Progress(source, self, console, done=done),
                self.total,
                self.ask,
                Terms(self.folder.path, self.config.select, self.on, self._scheduler_hears(), interval),
                self.pools,
                scheduler=scheduler,
                space=self.config.space,
                rounds=max(trial.config.rounds for trial in self.examples),
                concurrency=self.config.concurrency,
            )

    def finish(self, console: Console) -> SweepResult:
        """Write tables, figures and the best configuration of what has ended so far."""
        trials = list(self._trials.values())
        # Read again: a trial that was stopped may have written its last words after its end was told.
        rows = [self._row(trial) for trial in trials]
        points = points_of(trials, self._rows)
        best = best_of(points, self.config.select.per)
        name = self.config.name or ""
        write_trials(self.folder, rows)
        write_text(self.folder.summary, summary_of(name, points, best, rows, self.on))
        for number, (group, point) in enumerate(best.items(), 1):
            file = "best.yaml" if not group else f"best-{number}.yaml"
            write_best(self.folder, file, point, trials, self._why(group, point))
        if isinstance(self.config.scheduler, Pbt) and all(row["status"] in ENDED for row in rows):
            for trial in trials:
                clear(self.folder.path / trial.label, trial.config.checkpoint.keep)
        figures = write_plots(self.folder.plots, name, points, self.on, self.config.select.per)
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
        row = self._row(trial)
        write_trials(self.folder, list(self._rows.values()))
        return row

    def ended(self) -> list[str]:
        """Labels of the trials that have nothing left to do."""
        return [label for label, row in self._rows.items() if row["status"] in ENDED]

    def _source(self, over: Sequence[str]) -> Source:
        """What is left to do; trials whose status is in `over` have had their chance."""
        if isinstance(self.config.search, Listed):
            left = [trial for trial in self.examples if not self._is_over(trial, over)]
            all_ended = all(self._rows[trial.label]["status"] in (*ENDED, *over) for trial in left)
            return Queue([] if all_ended else left)
        proposals = Proposals(self.config, self._makes, self.folder)
        waiting = []
        for trial in proposals.recorded():
            if self._is_over(trial, over):
                proposals.heard(trial, self._rows[trial.label])
            else:
                waiting.append(trial)
        proposals.wait_for(waiting)
        return proposals

    def _is_over(self, trial: Trial, over: Sequence[str]) -> bool:
        status = self._row(trial)["status"]
        # A scheduler that compares trials has to hear of those that have ended, too.
        heard = self._scheduler_hears()
        return status in over or (status in ENDED and not heard)

    def _scheduler_hears(self) -> bool:
        return not isinstance(self.config.scheduler, ToTheEnd | Pbt)

    def _row(self, trial: Trial) -> Row:
        outcome = self.folder.outcome(trial.label)
        row = row_of(trial, outcome, self.folder, self.config.select, self.on)
        self._trials[trial.label], self._rows[trial.label] = trial, row
        return row

    def _why(self, group: str, point: PointResult) -> str:
        """What the best point is best in, and its figures."""
        values = ", ".join(f"{key} = {value}" for key, value in point.values.items())
        head = f"Best{f' for {group}' if group else ''}: {values}."
        count = len(point.statuses)
        seeds = f"mean ± sd over {count} seeds" if count > 1 else "one seed"
        if isinstance(self.config.scheduler, Pbt):
            head += " Keys changed as the run went on; its lineage.json says when."
        if self.on == "validation":
            return (
                f"{head}\nChosen on validation ({show(point.measures['score'])} %, {CHOSEN['validation']}); "
                f"test accuracy in that round {show(point.measures['test'])} %, {seeds}."
            )
        return f"{head}\nChosen on test ({show(point.measures['best_test'])} %, {CHOSEN['test']}), {seeds}."


ENDED = ("finished", "stopped")
"""Statuses of trials that have nothing left to do."""


class _Progress:
    """Trials of a source as they go to Tune, and a line for each that has ended."""

    def __init__(self, source: Source, sweep: Sweep, console: Console, *, done: int) -> None:
        self._source, self._sweep, self._console = source, sweep, console
        self._done, self._before, self._begin = done, done, time.monotonic()
        self._past = set(sweep.ended())

    def next(self) -> Trial | None:
        return self._source.next()

    def exhausted(self) -> bool:
        return self._source.exhausted()

    def keys(self, trial: Trial) -> Mapping[str, JsonValue]:
        if not isinstance(self._sweep.config.scheduler, Pbt):
            return {}
        steps = lineage(self._sweep.folder.path / trial.label)
        found: Mapping[str, JsonValue] = steps[-1]["keys"] if steps else trial.values
        return found

    def ended(self, trial: Trial, seconds: float, error: str | None) -> None:
        folder = self._sweep.folder
        before = folder.outcome(trial.label)
        if error is not None:
            folder.record(trial.label, Outcome(status="failed", seconds=seconds, error=error))
        elif before is None and not folder.stop.exists():
            # Stopped by the scheduler, and its process ended before it could say so.
            folder.record(trial.label, Outcome(status="stopped", seconds=seconds))
        row = self._sweep.refresh(trial)
        self._source.heard(trial, row)
        if row["status"] in (*ENDED, "failed") and trial.label not in self._past:
            self._done += 1
            total = self._sweep.total
            self._console.note(f"[{self._done}/{total}] {trial.label}: {_told(row)}{self._left(total)}")

    def _left(self, total: int) -> str:
        count, left = self._done - self._before, total - self._done
        if left < 1:
            return ""
        return f", ETA {timedelta(seconds=int((time.monotonic() - self._begin) / count * left))}"


def _told(row: Row) -> str:
    if row["status"] == "failed":
        return f"failed: {row['error']}"
    score = "" if row["score"] is None else f"{100 * row['score']:.2f} % on {row['score_split']}, "
    stopped = f"stopped in round {row['rounds']}, " if row["status"] == "stopped" else ""
    return f"{stopped}{score}{row['seconds']:.1f} s"


def _in_folder(path: Path, resume: bool) -> Path:
    """The settings inside a sweep's folder."""
    if not is_sweep(path):
        raise StorageError(
            f"{path} is not a sweep: it has no {SWEEP}. Give the folder that the sweep printed."
        )
    if not resume:
        raise StorageError(
            f"{path} is a sweep that has begun. Continue it with `raypfl sweep {path} --resume`."
        )
    return path / SWEEP
