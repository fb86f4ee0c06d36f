"""Sweeps that run: trials are runs, stop and resume, failures, schedulers, actors, searches, results."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import stumbling
import yaml
from small_runs import CONFIG, assert_same_run

import raypfl
from raypfl.configuration import load
from raypfl.console import Console
from raypfl.records import checkpoints
from raypfl.sweep import planning, session
from raypfl.sweep.population import segments
from raypfl.sweep.session import SweepResult

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

BASE = {
    **CONFIG,
    "rounds": 4,
    "method": {"name": "diversifed"},
    "partition": {**CONFIG["partition"], "validation_fraction": 0.25},
}

TAU = {"method.tau": [0.5, 1.0]}


class Lines(Console):
    """Keeps what it is told; presses Ctrl-C after so many trials."""

    def __init__(self, stop_after: int = 0) -> None:
        self.lines: list[str] = []
        self._stop_after = stop_after

    def note(self, text: str) -> None:
        self.lines.append(text)
        if text.startswith(f"[{self._stop_after}/"):
            os.kill(os.getpid(), signal.SIGINT)


def sweep(tmp_path: Path, *overrides: str, console: Console | None = None, **keys: Any) -> SweepResult:
    options = {name: keys.pop(name) for name in ("resume", "retry_failed") if name in keys}
    settings = {"name": "s", "storage_path": str(tmp_path), "base": BASE, **keys}
    return session.run(settings, overrides, console=console, **options)


def table(tmp_path: Path) -> pd.DataFrame:
    return pd.read_parquet(tmp_path / "s" / "trials.parquet")


@pytest.fixture(scope="module")
def finished(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sweep of two keys and two seeds, seven of its trials whole and one that fails."""
    folder = tmp_path_factory.mktemp("finished")
    stumbling.ask(cluster, "raise", 3)
    sweep(folder, "concurrency=2", "seed=[0,1]", space={**TAU, "partition.alpha": [0.1, 1.0]})
    for claim in cluster.glob("claimed-*"):
        claim.unlink()
    yield folder


def test_a_trial_that_fails_is_a_row_with_its_error_and_the_others_go_on(finished: Path) -> None:
    rows = table(finished)
    assert len(rows) == 8
    failed = rows[rows.status == "failed"]
    assert len(failed) == 1
    assert "the model stumbled" in failed.error.iloc[0]
    others = rows[rows.status == "finished"]
    assert len(others) == 7
    assert others.score.notna().all() and failed.score.isna().all()
    assert (others["config.method.tau"].isin([0.5, 1.0])).all()
    assert others["config.partition.alpha"].dtype == float
    assert (others["config.seed"] == others.seed).all()
    assert "the model stumbled" in (finished / "s" / "summary.md").read_text()


def test_a_trial_is_a_run_with_the_bits_of_the_same_run_alone(finished: Path, tmp_path: Path) -> None:
    label = table(finished).query("status == 'finished'").trial.iloc[0]
    trial = finished / "s" / label
    alone = load(trial / "config.yaml", [f"storage_path={tmp_path}", "name=alone"])
    raypfl.run(alone.model_dump(mode="json"))
    assert_same_run(trial, tmp_path / "alone", "diversifed")


def test_a_row_has_the_figures_of_its_run(finished: Path) -> None:
    row = table(finished).query("status == 'finished'").iloc[-1]
    rounds = raypfl.Result(finished / "s" / row.trial).rounds()
    rounds = rounds[(rounds.model == "personalised") & (rounds.point == "post")].set_index("round")
    validation = rounds[rounds.split == "validation"].accuracy_mean
    test = rounds[rounds.split == "test"].accuracy_mean
    assert row.score_split == "validation"
    assert row.score == validation.max()
    assert row.score_round == validation.idxmax()
    assert row.test == test[row.score_round]
    assert (row.best_test, row.last_test) == (test.max(), test.iloc[-1])
    assert row.last_ten_test == pytest.approx(test.mean())


def test_the_best_configuration_is_chosen_on_validation_and_runs(finished: Path, tmp_path: Path) -> None:
    rows = table(finished)
    whole = rows.groupby("point").filter(lambda own: (own.status == "finished").all())
    best = whole.groupby("point").score.mean().idxmax()
    config = load(finished / "s" / "best.yaml", [f"storage_path={tmp_path}", "name=best", "rounds=1"])
    expected = rows[rows.point == best].iloc[0]
    assert config.method[0].tau == expected["config.method.tau"]  # type: ignore[attr-defined]
    assert config.partition.alpha == expected["config.partition.alpha"]  # type: ignore[union-attr]
    assert config.seed == (0, 1)
    assert "Chosen on validation" in (finished / "s" / "best.yaml").read_text()
    summary = (finished / "s" / "summary.md").read_text()
    assert summary.index("## Chosen on validation") < summary.index("## As the papers report")
    figures = {path.name for path in (finished / "s" / "plots").iterdir()}
    assert {"heat_map_best_test.png", "heat_map_score.png", "score_over_method.tau.png"} <= figures


def test_a_failed_trial_is_run_again_when_asked(finished: Path) -> None:
    console = Lines()
    keys: dict[str, Any] = {"space": {**TAU, "partition.alpha": [0.1, 1.0]}}
    sweep(finished, "seed=[0,1]", resume=True, console=console, **keys)
    assert any("complete, 8 trials" in line for line in console.lines)
    sweep(finished, "seed=[0,1]", resume=True, retry_failed=True, **keys)
    assert (table(finished).status == "finished").all()


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"space": {"method.tau": [0.5, 0.8, 1.0]}}
    console = Lines(stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, "concurrency=1", "rounds=3", console=console, **keys)
    assert any("raypfl sweep" in line and "--resume" in line for line in console.lines)
    rows = table(tmp_path)
    assert (rows.status == "finished").sum() == 1
    done = rows[rows.status == "finished"].trial.iloc[0]
    before = (tmp_path / "s" / done / "trial.json").stat().st_mtime_ns
    sweep(tmp_path, "concurrency=3", "rounds=3", resume=True, **keys)
    assert (table(tmp_path).status == "finished").all()
    assert (tmp_path / "s" / done / "trial.json").stat().st_mtime_ns == before


def test_an_interrupted_trial_continues_from_its_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"space": {"method.tau": [0.5]}}
    sweep(tmp_path / "first", "rounds=2", **keys)
    folder = tmp_path / "first" / "s"
    # As an interruption leaves it: a checkpoint of round 2 of 4, and a word about it.
    trial = folder / "tau0.5-seed3"
    (trial / "trial.json").write_text('{"status": "interrupted", "seconds": 1.0}')
    settings = (folder / "sweep.yaml").read_text().replace("rounds: 2", "rounds: 4")
    (folder / "sweep.yaml").write_text(settings)
    result = session.run(folder, resume=True)
    assert result.points[0].complete
    assert checkpoints.round_of(checkpoints.latest(trial / "checkpoints")) == 4  # type: ignore[arg-type]
    sweep(tmp_path / "whole", "rounds=4", **keys)
    assert_same_run(trial, tmp_path / "whole" / "s" / "tau0.5-seed3", "diversifed")


def test_asha_ends_trials_early_and_hears_of_the_past_when_resumed(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        # A good rate first: whoever comes later is compared with it.
        "space": {"training.optimizer.lr": [0.1, 0.0001, 0.0002]},
        "set": {"training.epochs": 5, "partition.train_size": 40},
        "scheduler": {"name": "asha", "grace": 2, "reduction": 2},
    }
    sweep(tmp_path, "concurrency=1", **keys)
    rows = table(tmp_path).set_index("config.training.optimizer.lr")
    assert list(rows.status) == ["finished", "stopped", "stopped"]
    assert list(rows.rounds) == [4, 2, 2]
    assert (rows.seconds > 0).all()
    console = Lines()
    sweep(tmp_path, resume=True, console=console, **keys)
    assert any("complete, 3 trials" in line for line in console.lines)
    # Begun again, with the others' scores known: it is ended again.
    (tmp_path / "s" / rows.trial[0.0002] / "trial.json").unlink()
    sweep(tmp_path, resume=True, **keys)
    again = table(tmp_path).set_index("config.training.optimizer.lr")
    assert list(again.status) == ["finished", "stopped", "stopped"]
    assert list(again.rounds) == [4, 2, 2]


def test_trials_with_actors_have_them_to_themselves(tmp_path: Path) -> None:
    """Six CPUs, two hosts a trial: three trials at once, and no actor waits for another trial's."""
    sweep(
        tmp_path, "engine.name=ray", "engine.num_actors=2", "rounds=2", space={"method.tau": [0.5, 0.8, 1.0]}
    )
    assert (table(tmp_path).status == "finished").all()
    sweep(tmp_path / "local", "rounds=2", space={"method.tau": [0.5]})
    assert_same_run(tmp_path / "s" / "tau0.5-seed3", tmp_path / "local" / "s" / "tau0.5-seed3", "diversifed")


def test_a_population_goes_on_from_its_best_members(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "space": {"training.optimizer.lr": {"log_uniform": [1e-4, 0.3]}},
        "search": {"draws": 4},
        "scheduler": {"name": "pbt", "interval": 2, "quantile": 0.5},
    }
    # Members exchange only while they are at work together, which on a busy machine takes longer runs.
    for last_round in (6, 24, 96):
        folder = tmp_path / str(last_round)
        folder.mkdir()
        sweep(folder, "concurrency=2", f"rounds={last_round}", **keys)
        rows = table(folder)
        assert (rows.status == "finished").all(), rows.error.tolist()
        assert (rows.rounds == last_round).all()
        histories = {
            label: json.loads((folder / "s" / label / "lineage.json").read_text())["lineage"]
            for label in rows.trial
        }
        moves = [
            (label, step) for label, history in histories.items() for step in history if step["from"] != label
        ]
        if moves:
            break
    assert moves
    for label, step in moves:
        assert 1e-4 <= step["keys"]["training.optimizer.lr"] <= 0.3
        rounds = set(raypfl.Result(folder / "s" / label).rounds()["round"])
        assert rounds - {0} == set(range(1, last_round + 1))
    label, _ = moves[-1]
    last = histories[label][-1]
    config = yaml.safe_load((folder / "s" / label / "config.yaml").read_text())
    assert config["training"]["optimizer"]["lr"] == last["keys"]["training.optimizer.lr"]


def test_optuna_proposes_and_goes_on_where_it_was(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "space": {
            "training.optimizer": {"grid": [{"name": "sgd", "lr": 0.1}, {"name": "adam"}]},
            "training.optimizer.lr": {"log_uniform": [1e-4, 0.1]},
        },
        "search": {"name": "optuna", "points": 4, "startup": 2},
        "constraints": ["training.optimizer.lr < 0.05"],
    }
    console = Lines(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, "concurrency=1", "rounds=1", console=console, **keys)
    before = json.loads((tmp_path / "s" / "proposed.json").read_text())["proposed"]
    sweep(tmp_path, "rounds=1", resume=True, **keys)
    proposed = json.loads((tmp_path / "s" / "proposed.json").read_text())["proposed"]
    assert proposed[: len(before)] == before
    rows = table(tmp_path)
    assert len(rows) == 4 and (rows.status == "finished").all()
    assert (rows["config.training.optimizer.lr"] < 0.05).all()


def test_the_plan_of_a_sweep(tmp_path: Path) -> None:
    settings = {"name": "s", "storage_path": str(tmp_path), "base": BASE, "space": {**TAU, "seed": [0, 1]}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(settings))
    text = planning.plan(tmp_path / "sweep.yaml", ["concurrency=2"])
    assert "trials     4: 2 points, 2 seeds each" in text
    assert "at once    2" in text
    assert "time       about 0:0" in text
    assert not (tmp_path / "s").exists()


def test_segments_end_at_exchanges_and_at_the_end() -> None:
    assert segments(0, 6, 2) == [2, 4, 6]
    assert segments(3, 7, 2) == [4, 6, 7]
    assert segments(7, 7, 2) == []
