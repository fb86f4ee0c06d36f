"""A trial: the function that Tune calls, in a process that serves one trial after another."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from ray import tune

from raypfl.configuration import expand, load
from raypfl.console import Console
from raypfl.data import Pool
from raypfl.engine.supervisor import Supervisor
from raypfl.errors import RaypflError
from raypfl.methods import METHODS
from raypfl.records import checkpoints
from raypfl.records.ranking import write_summary
from raypfl.records.statistics import ClientStatistics
from raypfl.records.summary import summarise
from raypfl.settings import RunConfig
from raypfl.sweep.config import Select
from raypfl.sweep.folder import Outcome, Status, SweepFolder
from raypfl.sweep.population import Member
from raypfl.sweep.scores import history, score_of
from raypfl.sweep.space import overrides_of
from raypfl.workshop import Workshop, pool_key

SCORE, ROUND = "score", "round"
"""What a trial reports to a scheduler."""

FINISHING_SECONDS = "600"
"""How long a trial that was stopped may take to leave its round before its process is given up."""

for _name, _value in {
    # Paths in configurations are relative to where the sweep was started, not to Tune's folders.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": FINISHING_SECONDS,
}.items():
    # Tune reads these in the worker's process, which unpickles (so imports) this module before that.
    os.environ.setdefault(_name, _value)


@dataclass(frozen=True)
class Terms:
    """What all trials of a sweep have in common."""

    path: Path
    select: Select
    on: str  # the split that scores are of
    reports: bool = False  # whether a scheduler hears every score
    interval: int | None = None  # rounds between the exchanges of a population


def run_trial(config: Mapping[str, Any], terms: Terms, pools: Mapping[str, Pool]) -> None:
    """Run a trial, or go on with it, and record what came of it; errors are recorded, not raised.

    Args:
        config: Tune's, with `task`: `config` as JSON, and of a population the values of its `keys`.
        terms: those of the sweep.
        pools: data sets that are in memory already, by `pool_key`.
    """
    folder = SweepFolder(terms.path)
    if folder.stop.exists():
        return
    # Tune names the trial: of a task that was taken over from another trial, nothing else is its own.
    label = tune.get_context().get_trial_name()
    task = config["task"]
    (run,) = expand(load(json.loads(task["config"]), overrides_of(task["keys"]))).values()
    run = run.model_copy(update={"name": label})
    outcome = folder.outcome(label)
    if outcome is not None and outcome.status in ("finished", "stopped") and terms.reports:
        # Resumed with a scheduler that has to hear the past; what came of this trial stands.
        _tell_past(folder, run, terms, before=None)
        return
    spent = 0.0 if outcome is None else outcome.seconds
    begin = time.monotonic()

    def record(status: Status, error: str | None = None) -> None:
        seconds = spent + time.monotonic() - begin
        folder.record(label, Outcome(status=status, seconds=seconds, error=error))

    try:
        (folder.path / label).mkdir(exist_ok=True)
        if terms.interval is None:
            _work(folder, run, terms, pools)
        else:
            _work_in_segments(folder, run, terms, pools, task["keys"])
        record("finished")
    except KeyboardInterrupt:
        record("interrupted")
    except SystemExit:
        # Tune ends a function where it reports: its scheduler has stopped it, or has other plans for it.
        if terms.interval is not None:
            raise
        write_summary(folder.run(label).summary, summarise(folder.run(label)))
        record("stopped")
        raise
    except RaypflError as error:
        record("failed", f"{type(error).__name__}: {error}")
    except Exception as error:
        path = folder.path / label / "error.log"
        path.write_text(traceback.format_exc(), encoding="utf-8")
        record("failed", f"{type(error).__name__}: {error} (see {path})")


_DESK: list[Workshop] = []
"""This process's workshop: what one trial has read or started serves the next."""


def _work(folder: SweepFolder, config: RunConfig, terms: Terms, pools: Mapping[str, Pool]) -> None:
    if not _DESK:
        _DESK.append(Workshop(Console()).__enter__())
    (desk,) = _DESK
    if (which := pool_key(config)) in pools:
        desk.give(config, pools[which])
    model, point = view_of(config, terms.select)
    assert config.name is not None
    supervisor = Supervisor(stopping=folder.stop.exists)
    if terms.reports:
        checkpoint = checkpoints.latest(folder.run(config.name).checkpoints)
        done = 0 if checkpoint is None else checkpoints.round_of(checkpoint)
        # What is received after the checkpoint's round is evaluated again, what was trained in it is not.
        _tell_past(folder, config, terms, before=done + (point == "post"))

        def evaluated(round: int, by_split: Mapping[str, ClientStatistics]) -> None:
            if terms.on in by_split:
                _tell([(round, score_of(by_split[terms.on], terms.select))])

        supervisor = Supervisor(folder.stop.exists, evaluated, (model, point))
    desk.work(folder.run(config.name), config, config.name, 1, 1, supervisor)


def _work_in_segments(
    folder: SweepFolder,
    config: RunConfig,
    terms: Terms,
    pools: Mapping[str, Pool],
    keys: Mapping[str, JsonValue],
) -> None:
    assert config.name is not None and terms.interval is not None
    run = folder.run(config.name)
    member = Member(folder.path, config.name, keys)
    member.take_place(config)

    def report(round: int, checkpoint: Any) -> None:
        scores = dict(history(run, view_of(config, terms.select), terms.on, terms.select))
        tune.report({ROUND: round, SCORE: scores[round]}, checkpoint=checkpoint)

    member.run(config, terms.interval, lambda part: _work(folder, part, terms, pools), report)


def view_of(config: RunConfig, select: Select) -> tuple[str, str]:
    """The (model, point) that scores are of."""
    if select.view is None:
        return METHODS[config.method.name].reported
    model, _, point = select.view.partition("/")
    return model, point


def _tell_past(folder: SweepFolder, config: RunConfig, terms: Terms, before: int | None) -> None:
    """Report the scores that are on record; of a run that goes on, those before its checkpoint."""
    if not terms.reports:
        return
    assert config.name is not None
    past = history(folder.run(config.name), view_of(config, terms.select), terms.on, terms.select)
    _tell([(round, score) for round, score in past if before is None or round < before])


def _tell(scores: Sequence[tuple[int, float]]) -> None:
    for round, score in scores:
        tune.report({ROUND: round, SCORE: score})
