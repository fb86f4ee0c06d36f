"""Whole studies: points in processes of their own, failures, resuming, costs that are counted by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from test_scaling_config import with_studies
from typer.testing import CliRunner

from raypfl import scaling
from raypfl.cli import app
from raypfl.data import load
from raypfl.engine.phases import PHASES
from raypfl.errors import CheckpointError, ConfigError, StorageError
from raypfl.scaling.config import Point, read
from raypfl.scaling.costs import measure_costs
from raypfl.scaling.measure import Protocol, measure_rounds
from raypfl.scaling.process import PointFailed, _ending, run_point

QUICK = Protocol(warm_up=2, rounds=2, seconds=60.0)
FOUR = {"over": {"partition.num_clients": [4]}}


def test_rounds_are_counted_after_the_warm_up() -> None:
    (point,) = read(
        with_studies(a={"over": {"partition.num_clients": [4]}}), ["training.batch_size=8"]
    ).points
    said: list[str] = []
    facts, rounds = measure_rounds(point.config, QUICK, said.append)
    assert [row["round"] for row in rounds] == [3, 4]
    assert said[:3] == ["warm-up 1/2", "warm-up 2/2", "counting"]
    # 64 inputs, 8 hidden units, 10 classes.
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    assert (facts["clients"], facts["participants"], facts["parameters"]) == (4, 4, parameters)
    assert (facts["hosts"], facts["device"], facts["engine"]) == (1, "cpu", "local")
    epochs = point.config.training.epochs
    for row in rounds:
        assert (row["trained"], row["client_steps"]) == (4, 4 * 3 * epochs), "20 samples are 3 batches of 8"
        assert row["upload_bytes"] == row["download_bytes"] == 4 * parameters * 4
        assert row["distances_seconds"] > 0 and row["mixing_seconds"] > 0 and row["qp_seconds"] == 0
        assert sum(row[f"{name}_seconds"] for name in PHASES) <= row["server_seconds"] <= row["seconds"]


def test_no_round_is_begun_when_the_time_is_over() -> None:
    (point,) = read(with_studies(a=FOUR)).points
    assert len(measure_rounds(point.config, QUICK._replace(rounds=5, seconds=1e-9)).rounds) == 1


def test_costs_are_those_of_the_arithmetic() -> None:
    """Of m clients a Gram matrix and a combination; of a client forward, and backward but for its inputs."""
    (point,) = read(
        with_studies(a={"measure": "costs", "over": {"partition.num_clients": [5]}}),
        ["training.epochs=3", "training.batch_size=8"],
    ).points
    facts, rounds = measure_costs(point.config, QUICK)
    parameters, first, second = 610, 64 * 8, 8 * 10
    assert facts["server_flops"] == (4 * 5**2 + 4 * 5) * parameters, "and the mean row, once for each"
    assert facts["server_flops_formula"] == 1.5 * 5**2 * parameters
    assert facts["client_flops"] == (4 * first + 6 * second) * 20 * 3
    assert facts["client_flops_formula"] == 3 * 2 * (first + second) * 20 * 3
    assert facts["client_seconds"] > 0
    assert all(row["client_steps"] == 5 for row in rounds), "the server is timed in rounds of one step"


def test_other_methods_have_no_formula_of_the_server() -> None:
    (point,) = read(
        with_studies(a={"measure": "costs", "over": {"method.name": ["fedavg"]}}), ["training.epochs=1"]
    ).points
    facts = measure_costs(point.config, QUICK).facts
    assert "server_flops_formula" not in facts
    assert facts["server_flops"] == 2 * 4 * 610, "one mean of four models"


def test_random_data_have_the_shape_asked_for() -> None:
    data = {"name": "random", "shape": [3, 32, 32], "num_classes": 7, "train_samples": 50, "test_samples": 30}
    study = {"over": {"seed": [0]}, "fixed": {"data": data, "model": {"name": "lenet5"}}}
    (point,) = read(with_studies(a=study)).points
    pool, other = load(point.config.data, 0), load(point.config.data, 1)
    assert (pool.x.shape, pool.num_train, pool.num_classes) == ((80, 3, 32, 32), 50, 7)
    assert set(pool.y.tolist()) == set(range(7))
    assert pool.fingerprint == other.fingerprint, "only the size of a run makes a difference"


def in_this_process(
    point: Point, protocol: Protocol, *, limit_seconds: float | None, free_memory: float, progress: Any
) -> dict[str, Any]:
    """What `run_point` gives, without a process."""
    if point.config.partition.num_clients == 8:
        raise PointFailed("out of memory")
    facts, rounds = measure_rounds(point.config, protocol, progress)
    return {"facts": {**facts, "memory_bytes": 1, "processes": 1, "load": 0.0}, "rounds": rounds}


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Points are measured here; the names of those that were."""
    measured: list[str] = []

    def run(point: Point, protocol: Protocol, **options: Any) -> dict[str, Any]:
        measured.append(point.name)
        return in_this_process(point, protocol, **options)

    monkeypatch.setattr(scaling, "run_point", run)
    return measured


def test_a_point_that_fails_is_a_row_and_the_others_go_on(
    without_processes: list[str], tmp_path: Path
) -> None:
    source = with_studies(clients={"over": {"partition.num_clients": [4, 8, 6]}})
    options = [f"storage_path={tmp_path}", "name=study"]
    path = scaling.run(source, options)
    assert path == tmp_path / "study"
    points = pd.read_parquet(path / "points.parquet")
    assert points.status.tolist() == ["done", "failed", "done"]
    assert points.error.tolist()[1] == "out of memory"
    assert pd.isna(points.rounds_per_second[1])
    assert len(pd.read_parquet(path / "rounds.parquet")) == 2 * 2
    summary = (path / "summary.md").read_text()
    assert "Failed: num_clients=8: out of memory" in summary
    assert "![clients](plots/clients.png)" in summary and (path / "plots/clients.png").is_file()

    with pytest.raises(StorageError, match="exists already.*--resume"):
        scaling.run(source, options)
    with pytest.raises(CheckpointError, match=r"points\.clients-001\.config\.training\.epochs"):
        scaling.run(source, [*options, "training.epochs=2"], resume=True)

    # What failed is tried again, and nothing else.
    without_processes.clear()
    scaling.run(source, options, resume=True)
    assert without_processes == ["clients-002"]
    again = pd.read_parquet(path / "points.parquet")
    assert again.round_seconds.tolist()[::2] == points.round_seconds.tolist()[::2]


def test_an_interrupted_study_goes_on(
    without_processes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_studies(a={"over": {"partition.num_clients": [4, 5, 6]}})
    options = [f"storage_path={tmp_path}", "name=study"]
    whole = scaling.run_point

    def interrupted(point: Point, protocol: Protocol, **rest: Any) -> dict[str, Any]:
        if point.number == 2:
            raise KeyboardInterrupt
        return whole(point, protocol, **rest)

    monkeypatch.setattr(scaling, "run_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scaling.run(source, options)
    monkeypatch.setattr(scaling, "run_point", whole)
    path = scaling.run(source, options, resume=True)
    assert without_processes == ["a-001", "a-002", "a-003"]
    assert pd.read_parquet(path / "points.parquet").clients.tolist() == [4, 5, 6]


def test_studies_can_be_measured_one_by_one(without_processes: list[str], tmp_path: Path) -> None:
    source = with_studies(a={"over": {"seed": [0]}}, b={"over": {"seed": [1]}})
    options = [f"storage_path={tmp_path}", "name=study"]
    scaling.run(source, [*options, "scale.only=[b]"])
    assert without_processes == ["b-001"]
    scaling.run(source, options, resume=True)
    assert without_processes == ["b-001", "a-001"]


def test_a_damaged_point_is_named(without_processes: list[str], tmp_path: Path) -> None:
    source, options = with_studies(a={"over": {"seed": [0]}}), [f"storage_path={tmp_path}", "name=study"]
    path = scaling.run(source, options)
    (path / "points/a-001.json").write_text("{")
    with pytest.raises(StorageError, match=r"a-001\.json is damaged .* Remove it"):
        scaling.run(source, options, resume=True)


def test_nothing_is_left_of_a_study_that_is_refused(tmp_path: Path) -> None:
    source = with_studies(
        a={"fixed": {"partition": {"name": "iid"}}, "over": {"partition.num_clients": [5000]}}
    )
    with pytest.raises(ConfigError, match="nothing was started"):
        scaling.run(source, [f"storage_path={tmp_path}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('no such thing\\nhelp yourself')", "status 1: ImportError: no such thing"),
        ("import sys; sys.exit('first\\nlast')", "status 1: last"),
        ("import os; os._exit(3)", "status 3: it said nothing"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9 (the system ends processes so"),
    ],
)
def test_what_a_process_that_dies_leaves_behind(code: str, said: str) -> None:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stderr=errors, text=True)
        assert said in _ending(process, errors)


@pytest.mark.slow
def test_a_point_has_a_process_of_its_own(tmp_path: Path) -> None:
    """Two points, of which one diverges: the command's own way, from end to end."""
    path = tmp_path / "small.yaml"
    steep = {"training.optimizer": {"name": "sgd", "lr": 1e30}}
    path.write_text(json.dumps(with_studies(a={"cases": {"good": {}, "steep": steep}})))
    before = psutil.Process().children(recursive=True)
    ran = CliRunner().invoke(app, ["scale", str(path), f"storage_path={tmp_path}", "name=study"])
    assert ran.exit_code == 0, ran.output
    points = pd.read_parquet(tmp_path / "study/points.parquet").set_index("settings")
    assert points.status.to_dict() == {"good": "done", "steep": "failed"}
    assert points.error["steep"].startswith("DivergedError: round 1")
    # A process with torch in it, and nothing large besides.
    assert 2**27 < points.memory_bytes["good"] < 2**32
    assert points.processes["good"] == 1
    assert_ended(before)


@pytest.mark.slow
def test_a_point_that_takes_too_long_is_ended() -> None:
    (point,) = read(with_studies(a={"over": {"seed": [0]}})).points
    before = psutil.Process().children(recursive=True)
    with pytest.raises(PointFailed, match=r"longer than scale\.limit_seconds = 0\.01"):
        run_point(point, QUICK, limit_seconds=0.01, free_memory=0.001)
    assert_ended(before)


def assert_ended(before: list[psutil.Process]) -> None:
    """No process of a point is left; those of a cluster of other tests may come and go."""
    since = set(psutil.Process().children(recursive=True)) - set(before)
    assert not [child for child in since if "raypfl.scaling.child" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_machine_without_memory_ends_the_point() -> None:
    (point,) = read(with_studies(a={"over": {"seed": [0]}})).points
    with pytest.raises(PointFailed, match=r"of the machine's .* GiB free \(scale\.free_memory\)"):
        run_point(point, QUICK, limit_seconds=None, free_memory=0.9999)
    assert torch.get_num_threads() == 1
