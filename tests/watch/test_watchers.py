"""What watchers are told, that they change nothing, and what happens when one of them fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import CONFIG, assert_same_run, drive, small_world

import raypfl
from raypfl.configuration import load
from raypfl.engine.contract import HostsLost
from raypfl.engine.driver import Driver
from raypfl.engine.local import LocalEngine
from raypfl.errors import ConfigError
from raypfl.records.metrics import Metrics
from raypfl.watch import RunSeen, Watcher, Watchers

SEEN = RunSeen("a/run", "/runs/a/run", {"method": {"name": "fedavg"}, "seed": 0}, 0, ("global", "pre"))


class Notebook(Watcher):
    """Writes down what it is told."""

    def __init__(self, *, fails_in: int | None = None) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.ended: list[bool] = []
        self.fails_in = fails_in

    def figures(self, round: int, figures: Any) -> None:
        if round == self.fails_in:
            raise OSError("connection refused")
        self.told.append((round, dict(figures)))

    def end(self, failed: bool) -> None:
        self.ended.append(failed)


def block(round: int, point: str, clients: list[int], accuracy: list[float]) -> dict[str, Any]:
    same = {"round": round, "point": point, "model": "global", "split": "test", "samples": 10}
    return {**same, "client": np.array(clients), "accuracy": np.array(accuracy), "loss": np.nan}


def tell(watchers: Watchers, round: int, *clients: dict[str, Any]) -> None:
    watchers.round(
        round,
        seconds=2.0,
        participants=4,
        server_seconds=0.5,
        evaluation_seconds=0.25,
        clients=clients,
        traffic=[
            {"src": -1, "dst": np.array([0, 1]), "bytes": np.array([100, 50])},
            {"src": np.array([0, 1]), "dst": -1, "bytes": 7},
            {"src": 2, "dst": 3, "bytes": 1000},
        ],
    )


def test_figures_belong_to_their_round() -> None:
    seen = Notebook()
    before, after = block(0, "pre", [0, 1], [0.1, 0.3]), block(1, "post", [1, 2], [0.5, 1.0])
    tell(Watchers({"one": seen}), 1, after, block(1, "post", [0], [0.0]), before)
    costs = {
        "round": 1,
        "participants": 4,
        "clients_per_second": 2.0,
        # Between peers a message is sent by one client and received by another.
        "bytes/up": 14 + 1000,
        "bytes/down": 150 + 1000,
        "seconds/round": 2.0,
        "seconds/server": 0.5,
        "seconds/evaluation": 0.25,
    }
    assert seen.told == [
        (0, {"accuracy/test/global/pre": pytest.approx(0.2)}),
        (1, {**costs, "accuracy/test/global/post": 0.5}),
    ]


def test_a_replayed_round_is_told_once() -> None:
    seen = Notebook()
    watchers = Watchers({"one": seen})
    for round in (1, 2, 3, 2, 3, 4):
        tell(watchers, round, block(round - 1, "pre", [0], [0.5]))
    assert [round for round, figures in seen.told if "bytes/up" in figures] == [1, 2, 3, 4]
    assert [round for round, figures in seen.told if "accuracy/test/global/pre" in figures] == [0, 1, 2, 3]


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    notes: list[str] = []
    failing, fine = Notebook(fails_in=2), Notebook()
    watchers = Watchers({"failing": failing, "fine": fine}, notes.append)
    watchers.begin(SEEN)
    for round in (1, 2, 3):
        tell(watchers, round)
    watchers.end(failed=False)
    assert notes == ["watch: failing failed (OSError: connection refused); the run goes on without."]
    assert [round for round, _ in failing.told] == [1] and failing.ended == []
    assert [round for round, _ in fine.told] == [1, 2, 3] and fine.ended == [False]


class LosesOnce(LocalEngine):
    """Loses its hosts in round 4, when two rounds have passed since the checkpoint."""

    lost = False

    def round(self, round: int, **due: Any) -> Any:
        report = super().round(round, **due)
        if round == 4 and not self.lost:
            self.lost = True
            raise HostsLost("a host is gone")
        return report


def test_watching_changes_no_number_and_tells_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, pool = small_world()
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    seen = Notebook()
    build = Driver.__init__

    def watched(driver: Driver, *arguments: Any, **options: Any) -> None:
        build(driver, *arguments, **options, watchers=Watchers({"one": seen}))

    monkeypatch.setattr(Driver, "__init__", watched)
    run = drive(world, LosesOnce(world, pool), tmp_path / "watched")
    assert_same_run(run, undisturbed)
    rounds = raypfl.Result(run).rounds()
    for row in rounds.itertuples():
        told = {name: value for round, own in seen.told if round == row.round for name, value in own.items()}
        if row.split != "train":
            name = f"{row.split}/{row.model}/{row.point}"
            assert told[f"accuracy/{name}"] == pytest.approx(row.accuracy_mean, rel=1e-12)
            assert told[f"loss/{name}"] == pytest.approx(row.loss_mean, rel=1e-12)
        if row.round:
            assert (told["bytes/up"], told["bytes/down"]) == (row.upload_bytes, row.download_bytes)
            assert told["seconds/server"] == row.server_seconds or row.round == 3
    assert [round for round, own in seen.told if "round" in own] == [1, 2, 3, 4, 5, 6]


def test_an_interrupted_run_has_failed_for_its_watchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Notebook()
    monkeypatch.setattr("raypfl.workshop.watchers_of", lambda chosen: {"one": seen})
    monkeypatch.setattr(Metrics, "add_evaluation", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    config = {**CONFIG, "rounds": 1, "name": "run", "storage_path": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        raypfl.run(config)
    assert seen.ended == [True]


@pytest.mark.parametrize(
    ("watch", "names"),
    [
        ("tensorboard", ["tensorboard"]),
        (["mlflow", {"name": "wandb", "mode": "offline"}], ["mlflow", "wandb"]),
    ],
)
def test_watchers_are_named_alone_or_with_options(watch: Any, names: list[str]) -> None:
    assert [one.name for one in load({**CONFIG, "watch": watch}).watch] == names


@pytest.mark.parametrize(
    ("watch", "told"),
    [
        (["tensorbord"], "tensorbord"),
        (["wandb", {"name": "wandb", "project": "x"}], "must not name anything twice"),
        ([{"name": "mlflow", "uri": "x"}], "uri: unknown key"),
    ],
)
def test_a_watcher_that_is_not_there(watch: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load({**CONFIG, "watch": watch})


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_said_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypfl.watch.choice.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"watch = {name}: .* pip install 'raypfl\[{name}\]'"):
        raypfl.run({**CONFIG, "watch": name, "storage_path": str(tmp_path), "name": "run"})
    assert not list(tmp_path.iterdir())
