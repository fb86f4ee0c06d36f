"""Trials under Ray Tune: supply, placement, schedulers, Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from pydantic import JsonValue
from ray import tune
from ray.tune import PlacementGroupFactory
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from raypfl.data import Pool
from raypfl.sweep.config import Asha, Dimension, Median, Pbt, Scheduler
from raypfl.sweep.folder import SweepFolder
from raypfl.sweep.population import domain_of, within
from raypfl.sweep.resources import Ask
from raypfl.sweep.trials import Trial
from raypfl.sweep.worker import ROUND, SCORE, Terms, run_trial

STOPPING = (
    b"Stopping: trials end after the round they are in, with a checkpoint; Ctrl-C again stops at once.\n"
)

QUIET = {
    # A run's folder has its records; Tune's own would be copies in other forms.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # A trial that fails before its first evaluation has no score to report.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class Supply(Protocol):
    """Where trials come from, and who hears what came of them."""

    def next(self) -> Trial | None:
        """The next trial; None if there is none now."""
        ...

    def exhausted(self) -> bool:
        """Whether there will be no further trial."""
        ...

    def keys(self, trial: Trial) -> Mapping[str, JsonValue]:
        """Of a member of a population: the values of its keys now."""
        ...

    def ended(self, trial: Trial, seconds: float, error: str | None) -> None:
        """A trial has ended.

        Args:
            trial: the trial.
            seconds: as far as Tune knows, for a trial that could not record them.
            error: why, if its process died.
        """
        ...


def run(
    supply: Supply,
    count: int,
    ask: Callable[[Trial], Ask],
    terms: Terms,
    pools: Mapping[str, Pool],
    *,
    scheduler: Scheduler,
    space: Mapping[str, Dimension],
    rounds: int,
    concurrency: int | None,
) -> bool:
    """Run trials until there are no more, or somebody asks to stop; a Ray cluster must be connected.

    Args:
        supply: the trials.
        count: at most so many.
        ask: what each asks of Ray.
        terms: what they have in common.
        pools: data sets that they share, by `pool_key`.
        scheduler: which trials are ended early, or go on from others.
        space: what a population's keys may be.
        rounds: the most that a trial has.
        concurrency: trials at once; None for as many as fit.

    Returns:
        Whether it was asked to stop.
    """
    folder = SweepFolder(terms.path)
    trials: dict[str, Trial] = {}
    options: dict[str, Any] = {}
    population: dict[str, Any] = {}
    if isinstance(scheduler, Pbt):
        # Tune wants to know all members from the start.
        tasks = [_task(trial, supply, ask, trials) for trial in iter(supply.next, None)]
        population = {"task": tune.grid_search(tasks)}
        options = {"max_concurrent_trials": concurrency}
    else:
        options = {
            "search_alg": _Searcher(supply, trials, ask, folder, concurrency),
            "num_samples": count,
        }
    with (
        _settled(),
        _interruptions(folder),
        tempfile.TemporaryDirectory(prefix="raypfl-sweep-") as own,
    ):
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(run_trial, terms=terms, pools=pools), _resources),
            param_space=population,
            tune_config=tune.TuneConfig(
                metric=SCORE,
                mode="max",
                scheduler=scheduler_of(scheduler, rounds, space),
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=str,
                **options,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=own,
                verbose=0,
                callbacks=[_Endings(supply, trials)],
                failure_config=tune.FailureConfig(max_failures=0),
            ),
        )
        tuner.fit()
        return folder.stop.exists()


def scheduler_of(config: Scheduler, rounds: int, space: Mapping[str, Dimension]) -> TrialScheduler:
    """Tune's scheduler; scores and rounds are those that trials report."""
    if isinstance(config, Asha):
        return AsyncHyperBandScheduler(
            time_attr=ROUND, max_t=rounds + 1, grace_period=config.grace, reduction_factor=config.reduction
        )
    if isinstance(config, Median):
        return MedianStoppingRule(
            time_attr=ROUND, grace_period=config.grace, min_samples_required=config.min_trials
        )
    if isinstance(config, Pbt):
        return PopulationBasedTraining(
            time_attr=ROUND,
            perturbation_interval=config.interval,
            hyperparam_mutations={"task": {"keys": {name: domain_of(space[name]) for name in space}}},
            custom_explore_fn=within(space),
            quantile_fraction=config.quantile,
            resample_probability=config.resample,
            log_config=False,
        )
    return FIFOScheduler()  # type: ignore[no-untyped-call]


class _NotSaved:
    """Of what Tune saves beside its trials, nothing is ever read: a sweep goes on from its run folders."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Searcher(_NotSaved, Searcher):
    """Hands trials to Tune one by one, and none after a request to stop."""

    def __init__(
        self,
        supply: Supply,
        trials: dict[str, Trial],
        ask: Callable[[Trial], Ask],
        folder: SweepFolder,
        concurrency: int | None,
    ) -> None:
        super().__init__()
        self._supply, self._trials, self._ask = supply, trials, ask
        self._folder, self._concurrency = folder, concurrency
        self._at_work: set[str] = set()

    def suggest(self, trial_id: str) -> Any:
        if self._folder.stop.exists() or self._supply.exhausted():
            return Searcher.FINISHED
        if self._concurrency is not None and len(self._at_work) >= self._concurrency:
            return None
        trial = self._supply.next()
        if trial is None:
            return None
        self._at_work.add(trial_id)
        return {"task": _task(trial, self._supply, self._ask, self._trials)}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self._at_work.discard(trial_id)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "") -> None:
        pass


class _Endings(_NotSaved, TrialProgressCallback):
    """Tells the supply of every end, in place of Tune's own words about it."""

    def __init__(self, supply: Supply, trials: Mapping[str, Trial]) -> None:
        super().__init__()
        self._supply, self._trials = supply, trials

    def on_trial_result(self, *_: Any, **info: Any) -> None:
        pass

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self._supply.ended(self._trials[str(trial)], float(trial.last_result.get("time_total_s", 0.0)), None)

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        reason = str(trial.get_error() or "its process ended").strip().splitlines()[-1]
        seconds = float(trial.last_result.get("time_total_s", 0.0))
        self._supply.ended(self._trials[str(trial)], seconds, f"its process was lost: {reason}")


def _task(
    trial: Trial, supply: Supply, ask: Callable[[Trial], Ask], trials: dict[str, Trial]
) -> dict[str, Any]:
    """What Tune keeps of a trial, and hands to its process."""
    trials[trial.label] = trial
    config, wanted = trial.config, ask(trial)
    if wanted.num_actors is not None:
        engine = config.engine.model_copy(update={"num_actors": wanted.num_actors, "clients_per_actor": None})
        config = config.model_copy(update={"engine": engine})
    keys = supply.keys(trial)
    return {
        "label": trial.label,
        "config": config.model_dump_json(),
        "bundles": json.dumps(wanted.bundles()),
        "keys": dict(keys),
    }


def _resources(config: Mapping[str, Any]) -> PlacementGroupFactory:
    return PlacementGroupFactory(json.loads(config["task"]["bundles"]))


def _name(trial: Any) -> str:
    """Asked once, when a trial is made: later its task may be a copy of another trial's."""
    label: str = trial.config["task"]["label"]
    return label


@contextmanager
def _settled() -> Iterator[None]:
    """Tune's switches and tone of voice, for a while."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    log = logging.getLogger("ray.tune")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interruptions(folder: SweepFolder) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks trials for a checkpoint and an end; a second stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        folder.stop.touch()
        # Before the words, so that a second Ctrl-C that follows on them does what they say.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Straight to the descriptor: a print that the signal came upon cannot be entered again.
        os.write(2, STOPPING)

    before: dict[Any, Any] = {
        number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
