"""From the settings of a sweep to its trials: each a point of the space with one seed, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.configuration import expand, load, to_dict
from raypfl.errors import ConfigError
from raypfl.settings import ExperimentConfig, RunConfig
from raypfl.sweep.config import Listed, SweepConfig
from raypfl.sweep.space import (
    Point,
    UnknownName,
    drawn_values,
    evaluate,
    labels_of,
    overrides_of,
    points_of,
    walk,
)

EXAMPLES = 20
"""Points that are drawn to check a space whose points are not known beforehand."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    label: str  # the name of its folder
    point: int  # number of the point, from 0; its trials differ in the seed alone
    values: Point
    config: RunConfig

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed


class Trials:
    """Makes the trials of a sweep."""

    def __init__(
        self, config: SweepConfig, folder: Path, check: Callable[[ExperimentConfig], None] | None = None
    ) -> None:
        """Prepare.

        Args:
            config: the sweep.
            folder: where its trials have their folders.
            check: raises if a point's configuration may not be run.
        """
        self._config, self._folder, self._check = config, folder, check
        self._constraints_that_applied: set[str] = set()

    def examples(self) -> list[Trial]:
        """All trials of a space that is listed, point by point and seed by seed; else a few that may come.

        Raises:
            ConfigError: a key is unknown, a value is wrong, or the constraints leave no point.
        """
        if isinstance(self._config.search, Listed):
            points = points_of(self._config, self.meets)
        else:
            drawn = [next(walk(self._config, drawn_values(0, draw, 0))) for draw in range(EXAMPLES)]
            points = [point for point in drawn if self.meets(point)] or drawn[:1]
        for constraint in self._config.constraints:
            if constraint not in self._constraints_that_applied:
                raise ConfigError(
                    f"constraint {constraint!r} names keys that no trial has. Remove it, or write keys as in "
                    "the configuration, such as method.tau or partition.alpha."
                )
        return [
            trial
            for number, (label, point) in enumerate(zip(labels_of(points), points, strict=True))
            for trial in self.of(number, label, point)
        ]

    def of(self, number: int, label: str, point: Point) -> list[Trial]:
        """The trials of one point: one a seed."""
        return [
            Trial(
                f"{label}-seed{config.seed}",
                number,
                point,
                config.model_copy(
                    update={"name": f"{label}-seed{config.seed}", "storage_path": str(self._folder)}
                ),
            )
            for config in self.runs(point)
        ]

    def runs(self, point: Point) -> list[RunConfig]:
        """The configurations of a point, one a seed.

        Raises:
            ConfigError: a key or value is wrong, or more than one method is left.
        """
        base = self._config.base
        assert isinstance(base, dict)
        try:
            experiment = load(base, overrides_of({**self._config.set, **point}))
        except ConfigError as error:
            text = str(error).removeprefix("the configuration:\n")
            raise ConfigError(f"{_described(point)} cannot be run:\n{text}") from None
        if self._check is not None:
            self._check(experiment)
        if len(experiment.method) > 1:
            names = ", ".join(method.name for method in experiment.method)
            raise ConfigError(
                f"the base has {len(experiment.method)} methods ({names}), and a trial is one run. Choose "
                "with method.name in `set`, or vary method.name in `space`."
            )
        return list(expand(experiment).values())

    def meets(self, point: Point) -> bool:
        """Whether a point meets all constraints; one on keys that the point's runs do not have is met."""
        if not self._config.constraints:
            return True
        resolved = to_dict(self.runs(point)[0])
        return all([self._met(constraint, resolved) for constraint in self._config.constraints])

    def _met(self, constraint: str, resolved: Mapping[str, Any]) -> bool:
        try:
            met = evaluate(constraint, resolved)
        except UnknownName:
            return True
        except ConfigError as error:
            raise ConfigError(f"constraint {error}") from None
        self._constraints_that_applied.add(constraint)
        return met


def one_of_each_kind(trials: Sequence[Trial]) -> dict[str, Trial]:
    """The first trial of each kind: those of a kind differ in numbers that hardly change what a round costs.

    Numbers with a fraction (rates, weights, thresholds), seeds and the number of rounds do not make a kind.
    """
    kinds: dict[str, Trial] = {}
    for trial in trials:
        kinds.setdefault(kind_of(trial), trial)
    return kinds


def kind_of(trial: Trial) -> str:
    """What trials of a kind have in common, as text."""
    config = to_dict(trial.config)
    part = {key: config[key] for key in config if key not in ("name", "storage_path", "seed", "rounds")}
    fraction = part.pop("participation")
    return f"{_without_fractions(part)} {fraction}"


def _without_fractions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_fractions(inner) for key, inner in value.items()}
    return "number" if isinstance(value, float) else value


def _described(point: Point) -> str:
    return f"the point {', '.join(overrides_of(point)) or 'of the base'}"
