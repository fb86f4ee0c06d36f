"""What TensorBoard, MLflow, W&B and Ray get of a run; stand-ins have the API that is used of theirs."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from small_runs import CONFIG

import raypfl
from raypfl.watch import RunSeen
from raypfl.watch.config import MlflowConfig, TensorboardConfig, WandbConfig
from raypfl.watch.mlflow import Mlflow
from raypfl.watch.tensorboard import Tensorboard
from raypfl.watch.wandb import Wandb

POST = "accuracy/test/personalised/post"
RUN = RunSeen("a/run", "/runs/a/run", {"method": {"name": "local"}, "rounds": 2}, 0, ("personalised", "post"))


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Name, step and value of all scalars in event files, in TFRecord's framing, with purges applied."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: list[tuple[str, int, float]] = []
    for path in sorted(folder.glob("events*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                found = [one for one in found if one[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return iter(found)


def test_tensorboard_has_every_round_once_also_after_resuming(tmp_path: Path) -> None:
    config = {**CONFIG, "name": "run", "storage_path": str(tmp_path), "rounds": 2, "watch": "tensorboard"}
    raypfl.run({**config, "model": {"name": "linear"}})
    result = raypfl.resume(tmp_path / "run", ["rounds=3"])
    found = [(step, value) for name, step, value in scalars(tmp_path / "run" / "tensorboard") if name == POST]
    rounds = result.rounds().query("model == 'personalised' and point == 'post' and split == 'test'")
    expected = zip(rounds["round"], rounds["accuracy_mean"], strict=True)
    assert found == [(round, pytest.approx(accuracy)) for round, accuracy in expected]


def test_tensorboard_keeps_what_was_written_in_the_same_second(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        board = Tensorboard(TensorboardConfig(name="tensorboard", folder=str(tmp_path)))
        board.begin(RUN)
        board.figures(step, {"round": step})
        board.end(failed=False)
    assert len(list((tmp_path / "a" / "run").glob("events*"))) == 3


def test_tensorboard_in_a_folder_of_ones_choice(tmp_path: Path) -> None:
    board = Tensorboard(TensorboardConfig(name="tensorboard", folder=str(tmp_path)))
    board.begin(RUN)
    board.figures(1, {"round": 1})
    board.end(failed=False)
    assert ("round", 1, 1.0) in list(scalars(tmp_path / "a" / "run"))


class Client:
    """Stands in for `mlflow.tracking.MlflowClient`."""

    calls: list[tuple[Any, ...]] = []

    def __init__(self, tracking_uri: str | None) -> None:
        self.calls.append(("client", tracking_uri))

    def get_experiment_by_name(self, name: str) -> Any:
        return None if name == "new" else SimpleNamespace(experiment_id="7")

    def create_experiment(self, name: str) -> str:
        self.calls.append(("experiment", name))
        return "8"

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        self.calls.append(("search", experiments, filter_string))
        return [SimpleNamespace(info=SimpleNamespace(run_id="old"))]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.calls.append(("run", experiment, run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_param(self, run: str, key: str, value: str) -> None:
        self.calls.append(("param", run, key, value))

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        self.calls.append(("metrics", run, [(name, value, step) for name, value, _, step in metrics]))

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append(("status", run, status))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    Client.calls = []
    module("mlflow", monkeypatch)
    module("mlflow.tracking", monkeypatch, MlflowClient=Client)
    module("mlflow.entities", monkeypatch, Metric=lambda *values: values)
    return Client.calls


def test_mlflow_gets_parameters_metrics_and_the_end(mlflow: list[tuple[Any, ...]]) -> None:
    watcher = Mlflow(MlflowConfig(name="mlflow", tracking_uri="http://here", experiment="new"))
    watcher.begin(RUN)
    watcher.figures(1, {"bytes/up": 5.0, POST: 0.5})
    watcher.end(failed=True)
    assert mlflow == [
        ("client", "http://here"),
        ("experiment", "new"),
        ("run", "8", "a/run", {"raypfl.run": "/runs/a/run"}),
        ("param", "r", "method.name", "local"),
        ("param", "r", "rounds", "2"),
        ("metrics", "r", [("bytes/up", 5.0, 1), (POST, 0.5, 1)]),
        ("status", "r", "FAILED"),
    ]


def test_mlflow_finds_the_run_again_that_is_resumed(mlflow: list[tuple[Any, ...]]) -> None:
    watcher = Mlflow(MlflowConfig(name="mlflow"))
    watcher.begin(RUN._replace(done=1))
    watcher.end(failed=False)
    assert mlflow == [
        ("client", None),
        ("search", ["7"], "tags.`raypfl.run` = '/runs/a/run'"),
        ("status", "old", "RUNNING"),
        ("status", "old", "FINISHED"),
    ]


def test_wandb_has_the_rounds_as_axis_and_one_identity_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append(("axis", name, step_metric)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
    )
    begun: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        return run

    module("wandb", monkeypatch, init=init)
    for seen in (RUN, RUN._replace(done=1), RUN._replace(folder="s3://bucket/b")):
        watcher = Wandb(WandbConfig(name="wandb", mode="offline"))
        watcher.begin(seen)
    watcher.figures(2, {POST: 0.5})
    watcher.end(failed=False)
    assert calls[-3:] == [("axis", "*", "round"), ("log", {POST: 0.5, "round": 2}), ("finish", 0)]
    first, again, other = (options["id"] for options in begun)
    assert first == again != other
    assert [options["dir"] for options in begun] == ["/runs/a/run", "/runs/a/run", None]
    assert begun[0]["mode"] == "offline" and begun[0]["config"] == RUN.config


def test_a_run_is_told_to_what_its_configuration_names(tmp_path: Path, mlflow: list[tuple[Any, ...]]) -> None:
    config = {
        **CONFIG,
        "name": "run",
        "storage_path": str(tmp_path),
        "rounds": 1,
        "model": {"name": "linear"},
    }
    raypfl.run({**config, "watch": [{"name": "mlflow", "experiment": "new"}]})
    kinds = [call[0] for call in mlflow if call[0] != "param"]
    assert kinds == ["client", "experiment", "run", "metrics", "metrics", "metrics", "status"]
    assert mlflow[-1] == ("status", "r", "FINISHED")


def test_rays_gauges_have_the_runs_label(monkeypatch: pytest.MonkeyPatch) -> None:
    from raypfl.engine import ray_metrics

    values: dict[str, tuple[float, dict[str, str]]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.tags = name, dict.fromkeys(tag_keys, "")

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self.tags |= tags

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            values[self.name] = value, self.tags | (tags or {})

    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    watcher = ray_metrics.RayMetrics()
    watcher.begin(RUN._replace(config={"method": {"name": "local"}, "seed": 4}))
    watcher.figures(3, {"round": 3, "bytes/up": 9.0, POST: 0.75, "loss/test/personalised/post": 1.0})
    label = {"run": "a/run", "method": "local", "seed": "4"}
    assert values == {
        "raypfl_round": (3, label),
        "raypfl_upload_bytes": (9.0, label),
        "raypfl_accuracy": (0.75, {**label, "model": "personalised", "point": "post"}),
    }
