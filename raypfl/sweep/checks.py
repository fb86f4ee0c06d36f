"""What can be known to be wrong with a sweep before any trial starts, beyond single keys."""

from __future__ import annotations

from collections.abc import Sequence

from raypfl.errors import ConfigError
from raypfl.sweep.config import Asha, Listed, Median, Pbt, SweepConfig
from raypfl.sweep.trials import Trial
from raypfl.sweep.worker import view_of

MUTABLE = ("training.", "method.")
"""Sections whose numbers may change in a run: the rest say what the models, clients and data are."""


def split_of(config: SweepConfig, trials: Sequence[Trial]) -> str:
    """The split that scores are of: validation or test.

    Raises:
        ConfigError: it shall be validation, and a trial has no such split.
    """
    without = [trial for trial in trials if not trial.config.partition.validation_fraction]
    if config.select.on == "validation" and without:
        raise ConfigError(
            f"select.on = validation: {without[0].label} has partition.validation_fraction = 0, so no "
            "validation split. Set it, for instance to 0.2, or choose select.on=test as the papers do."
        )
    if config.select.on == "auto":
        return "test" if without else "validation"
    return config.select.on


def check_views(config: SweepConfig, trials: Sequence[Trial]) -> None:
    """Make sure that every trial evaluates what it is scored by.

    Raises:
        ConfigError: one does not.
    """
    for trial in trials:
        model, point = view_of(trial.config, config.select)
        evaluation = trial.config.evaluation
        if model not in evaluation.models or point not in evaluation.points:
            raise ConfigError(
                f"{trial.label} would have no score: its evaluation leaves out ({model}, {point}). Add them "
                "to evaluation.models and evaluation.points, or set select.view."
            )


def check_scheduler(config: SweepConfig, trials: Sequence[Trial]) -> None:
    """Make sure that the scheduler fits the space and the runs.

    Raises:
        ConfigError: with what does not.
    """
    scheduler = config.scheduler
    unknown = [key for key in config.select.per if key not in config.keys]
    if unknown:
        raise ConfigError(f"select.per: {unknown[0]} is no key of the space ({', '.join(config.keys)}).")
    if isinstance(scheduler, Asha | Median | Pbt) and config.select.per:
        raise ConfigError(
            f"scheduler.name = {scheduler.name} compares all trials with each other, and select.per wants a "
            "best point for each group. Leave one of them out, or run a sweep for each group."
        )
    shortest = min(trial.config.rounds for trial in trials)
    if isinstance(scheduler, Asha | Median) and scheduler.grace >= shortest:
        raise ConfigError(
            f"scheduler.grace = {scheduler.grace} leaves nothing to stop in {shortest} rounds. Lower it."
        )
    if isinstance(scheduler, Pbt):
        _check_population(config, scheduler, trials)


def _check_population(config: SweepConfig, scheduler: Pbt, trials: Sequence[Trial]) -> None:
    if not isinstance(config.search, Listed):
        raise ConfigError("scheduler.name = pbt searches by itself. Use search.draws for its population.")
    if scheduler.interval >= trials[0].config.rounds:
        raise ConfigError(
            f"scheduler.interval = {scheduler.interval} leaves no exchange in {trials[0].config.rounds} "
            "rounds. Lower it."
        )
    for name, dimension in config.space.items():
        numbers = dimension.uniform or dimension.log_uniform or dimension.integer
        if not numbers or not name.startswith(MUTABLE) or dimension.when or "," in name:
            raise ConfigError(
                f"space.{name}: with scheduler.name = pbt every key changes while a run goes on, so "
                "it must be a number of `training` or `method`, drawn from uniform, log_uniform or "
                "integer, without a condition. Fix other keys in `set`, and run a sweep for each."
            )
    if config.constraints:
        raise ConfigError(
            "constraints: with scheduler.name = pbt keys leave their first values, so constraints would not "
            "hold. Narrow the space instead."
        )
    seeds = {trial.seed for trial in trials}
    if len(seeds) > 1:
        raise ConfigError(
            f"seed = {sorted(seeds)}: with scheduler.name = pbt a run goes on from another's models, which "
            "must have been trained on the same clients' data. Use one seed."
        )
    if len(trials) * scheduler.quantile < 1 or len(trials) < 2:
        raise ConfigError(
            f"scheduler.quantile = {scheduler.quantile:g} of {len(trials)} trials is less than one. Raise "
            "search.draws."
        )
