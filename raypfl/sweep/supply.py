"""Where trials come from: a list, or Optuna's proposals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from pydantic import JsonValue

from raypfl.errors import ConfigError
from raypfl.records.files import storage_errors, write_json
from raypfl.sweep.config import Dimension, Optuna, SweepConfig
from raypfl.sweep.folder import SweepFolder
from raypfl.sweep.results import Row
from raypfl.sweep.space import ATTEMPTS, Point, walk
from raypfl.sweep.trials import Trial, Trials

PROPOSED = "proposed.json"
"""In the folder of a sweep with Optuna: the points it has proposed, in order."""


class Source(Protocol):
    """Trials, one by one."""

    def next(self) -> Trial | None:
        """The next trial; None if there is none."""
        ...

    def exhausted(self) -> bool:
        """Whether there will be no further trial."""
        ...

    def heard(self, trial: Trial, row: Row) -> None:
        """What came of a trial."""
        ...


class Queue:
    """Trials in the order of the space."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._waiting = list(trials)

    def next(self) -> Trial | None:
        """See `Source`."""
        return self._waiting.pop(0) if self._waiting else None

    def exhausted(self) -> bool:
        """See `Source`."""
        return not self._waiting

    def heard(self, trial: Trial, row: Row) -> None:
        """The order does not depend on results."""


class Proposals:
    """Points that Optuna proposes (TPE), each with every seed; it is told the mean score of the seeds.

    Points are written down before they run, so a sweep that is resumed has the same ones, and proposes the
    rest from what they came to.
    """

    def __init__(self, config: SweepConfig, makes: Trials, folder: SweepFolder) -> None:
        """Begin.

        Raises:
            ConfigError: Optuna is not installed.
        """
        assert isinstance(config.search, Optuna)
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "search.name = optuna: Optuna is not installed. Install it with "
                "`pip install raypfl[optuna]`, or use search.draws."
            ) from None
        self._optuna: Any = optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        search = config.search
        # With several trials at once, those that still run count as bad, so that proposals differ.
        sampler = optuna.samplers.TPESampler(
            seed=search.seed, n_startup_trials=search.startup, constant_liar=True
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._config, self._makes, self._path = config, makes, folder.path / PROPOSED
        self._points, self._asked = search.points, list[Any]()
        self._scores: list[dict[str, float | None]] = []
        self._proposed: list[Point] = []
        self._waiting: list[Trial] = []

    def recorded(self) -> list[Trial]:
        """The trials of points that were proposed before; those that have ended are `heard` of next."""
        if not self._path.is_file():
            return []
        with storage_errors(self._path, "read"):
            params = json.loads(self._path.read_text(encoding="utf-8"))["proposed"]
        trials = []
        for one in params:
            self._study.enqueue_trial(one)
            trials += self._propose()
        return trials

    def wait_for(self, trials: Sequence[Trial]) -> None:
        """Trials of earlier proposals that have not ended come first."""
        self._waiting = [*trials, *self._waiting]

    def next(self) -> Trial | None:
        """See `Source`."""
        if not self._waiting and len(self._proposed) < self._points:
            self._waiting = self._propose()
            write_json(self._path, {"proposed": [asked.params for asked in self._asked]})
        return self._waiting.pop(0) if self._waiting else None

    def exhausted(self) -> bool:
        """See `Source`."""
        return not self._waiting and len(self._proposed) >= self._points

    def heard(self, trial: Trial, row: Row) -> None:
        """Tell Optuna once all seeds of a point have ended; a failed one makes the point fail."""
        scores = self._scores[trial.point]
        scores[trial.label] = row["score"] if row["status"] in ("finished", "stopped") else None
        if len(scores) < len(self._makes.of(trial.point, "", trial.values)):
            return
        found = [score for score in scores.values() if score is not None]
        if len(found) < len(scores):
            self._study.tell(self._asked[trial.point], state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._asked[trial.point], sum(found) / len(found))

    def _propose(self) -> list[Trial]:
        for _ in range(ATTEMPTS):
            asked = self._study.ask()
            (point,) = walk(self._config, partial(_values, asked))
            if self._makes.meets(point):
                break
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
        else:
            raise ConfigError(
                f"constraints: none of {ATTEMPTS} proposals meets all of "
                f"{', '.join(map(repr, self._config.constraints))}. Change them or the space."
            )
        self._asked.append(asked)
        self._proposed.append(point)
        self._scores.append({})
        number = len(self._proposed) - 1
        return self._makes.of(number, f"point{number:04d}", point)


def _values(asked: Any, name: str, dimension: Dimension) -> tuple[JsonValue]:
    """Optuna's value of one name, for `walk`; of values that are no numbers in a range it knows the text."""
    values = dimension.grid if dimension.grid is not None else dimension.choice
    if values is not None:
        return (json.loads(asked.suggest_categorical(name, [json.dumps(one) for one in values])),)
    low, high = dimension.bounds
    if dimension.integer is not None:
        return (int(asked.suggest_int(name, int(low), int(high))),)
    return (float(asked.suggest_float(name, low, high, log=dimension.log_uniform is not None)),)
