"""The shape of what `raypfl bench` measures; never how long anything takes."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.utils import parameters_to_vector
from typer.testing import CliRunner

from raypfl import bench
from raypfl.algebra.phases import WATCHER
from raypfl.bench.baseline import PlainClient
from raypfl.bench.contenders import Turn, cores
from raypfl.bench.memory import PeakStorage, server_rows
from raypfl.bench.report import refuse_overwriting, show, show_phases, write
from raypfl.bench.runner import Measured, Result
from raypfl.bench.workloads import WORKLOADS, chosen
from raypfl.cli import app
from raypfl.console import Console
from raypfl.engine.local import LocalEngine
from raypfl.engine.phases import PhaseClock
from raypfl.errors import ConfigError, StorageError

TINY = replace(WORKLOADS["mlp"], num_clients=4, train_samples=20, test_samples=10, epochs=1, batch_size=10)


def measured(name: str, *seconds: float) -> Measured:
    return Measured(name, 1, 0.5, tuple(Turn(value, value / 2, 0.1, 0.01, 0.002, 800) for value in seconds))


@pytest.fixture
def result() -> Result:
    plain = Measured("plain loop", 2, 3.0, (Turn(1.0), Turn(2.0), Turn(4.0)))
    return Result(
        TINY,
        3.0,
        (plain, measured("ray, 2 hosts", 0.5, 1.0, 4.0), measured("ray, 1 host", 1.0, 1.5, 6.0)),
        False,
        {"forward": 0.6, "mixing": 0.2},
    )


@pytest.mark.parametrize(
    ("name", "parameters", "shape", "train"),
    [("mlp", 50_890, (1, 28, 28), 300), ("lenet5", 62_006, (3, 32, 32), 500)],
)
@pytest.mark.parametrize("batch_size", [100, 10])
def test_a_workload_is_the_setting_of_its_name(
    name: str, parameters: int, shape: tuple[int, ...], train: int, batch_size: int
) -> None:
    name = name if batch_size == 100 else f"{name}-10"
    workload = WORKLOADS[name]
    one = replace(workload, num_clients=1)
    net = one.world(one.pool()).network(torch.device("cpu"))
    assert net.num_weights == parameters
    assert (workload.num_clients, workload.train_samples, workload.test_samples) == (40, train, 100)
    assert (workload.input_shape, workload.epochs, workload.batch_size) == (shape, 10, batch_size)


def test_the_baseline_trains_on_the_samples_of_the_engines() -> None:
    pool, world = TINY.pool(), TINY.world(TINY.pool())
    x, y = TINY.samples(2)
    own = world.federation.clients[2]
    assert np.array_equal(pool.x[own.train], x[:20])
    assert np.array_equal(pool.y[own.test], y[20:])


def test_the_baseline_starts_from_the_engines_model_and_moves_it() -> None:
    client, world, cpu = PlainClient(TINY, 0), TINY.world(TINY.pool()), torch.device("cpu")
    (common, *_) = world.method().init_hub(world.network(cpu), world.clients(cpu)).w
    start = parameters_to_vector(client.module.parameters()).detach().clone()
    # The columns of a row have their own order.
    assert torch.equal(start.sort().values, common.sort().values)
    client.train()
    assert not torch.equal(parameters_to_vector(client.module.parameters()), start)
    assert 0.0 <= client.accuracy() <= 1.0


def test_peak_storage_counts_what_is_alive_at_once() -> None:
    kept = torch.zeros(100)
    with PeakStorage() as peak:
        peak.hold((kept, [kept[:50]]))  # one storage of 400 bytes, however many views
        assert peak.peak_bytes == 400
        more = torch.ones(200)  # 800
        assert peak.peak_bytes == 1200
        del more
        torch.ones(150)  # 600, after the 800 are gone
        assert peak.peak_bytes == 1200
        more = torch.ones(300)  # 1200
    assert peak.peak_bytes == 400 + len(more) * 4


def test_the_server_holds_its_state_and_what_it_receives() -> None:
    assert server_rows(TINY) >= 2.0


def test_ratios_are_medians_of_quotients_of_the_same_turn(result: Result) -> None:
    assert result.measured[1].over(result.baseline) == (0.5, 0.5, 0.75)  # of 0.5, 0.5, 1
    assert result.all_over_one == (1.5, 1.5, 1.75)  # one host over two: 2, 1.5, 1.5


def test_the_table_has_a_line_a_contender(result: Result) -> None:
    grid = show(result)
    assert [row[0] for row in grid.rows] == ["plain loop", "ray, 2 hosts", "ray, 1 host"]
    assert {len(row) for row in grid.rows} == {len(grid.header)}
    assert grid.rows[0][2] == "1.00 [1.00 1.00]"
    assert "3.00 rows per client" in grid.note


def test_files_hold_every_round_and_the_machine(result: Result, tmp_path: Path) -> None:
    refuse_overwriting(tmp_path)
    write(tmp_path, [result])
    rounds = pq.read_table(tmp_path / "bench.parquet").to_pandas()
    assert len(rounds) == 9
    ray = rounds[rounds.contender == "ray, 2 hosts"].set_index("round")
    plain = rounds[rounds.contender == "plain loop"].set_index("round")
    assert ray.ratio.tolist() == (ray.seconds / plain.seconds).tolist() == [0.5, 0.5, 1.0]
    assert plain.server_seconds.isna().all()
    summary = json.loads((tmp_path / "bench.json").read_text())
    assert summary["cores"] == cores()
    assert summary["environment"]["packages"]["torch"] == torch.__version__
    (workload,) = summary["workloads"]
    assert workload["contenders"][0]["server_seconds"] is None
    assert workload["contenders"][1]["ratio"] == {"median": 0.5, "low": 0.5, "high": 0.75}
    with pytest.raises(StorageError, match=r"bench\.parquet is there already"):
        refuse_overwriting(tmp_path)


def test_options_change_the_workload() -> None:
    (quick,) = chosen(["lenet5"], quick=True)
    assert (quick.epochs, quick.input_shape) == (1, (3, 32, 32))
    assert [workload.epochs for workload in chosen([], epochs=2)] == [2] * len(WORKLOADS)
    assert [workload.num_clients for workload in chosen(["mlp", "resnet18"], clients=100)] == [100, 100]
    with pytest.raises(ConfigError, match="no workload 'mpl'. Did you mean mlp"):
        chosen(["mpl"])


def test_the_command_measures_what_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(
        bench, "run", lambda *args, **kwargs: calls.append((*args, kwargs["out"], kwargs["local"]))
    )
    options = ["--rounds", "3", "--epochs", "2", "--clients", "9", "--local", "--out", str(tmp_path)]
    ran = CliRunner().invoke(app, ["bench", "mlp-10", *options])
    assert ran.exit_code == 0, ran.output
    assert calls == [([replace(WORKLOADS["mlp-10"], epochs=2, num_clients=9)], 3, tmp_path, True)]


def test_an_unknown_workload_is_a_message() -> None:
    ran = CliRunner().invoke(app, ["bench", "resnet"])
    assert ran.exit_code == 2
    assert "no workload 'resnet'" in ran.output


def test_shares_of_the_time_are_of_all_of_it(result: Result) -> None:
    grid = show_phases(result)
    assert grid.rows == (("forward", "600", "75.0%"), ("mixing", "200", "25.0%"))


def test_without_ray_both_are_in_this_process(tmp_path: Path) -> None:
    (result,) = bench.run([TINY], 2, console=Console(), local=True, out=tmp_path)
    assert [one.contender for one in result.measured] == ["plain loop", "local"]
    assert all(len(one.turns) == 2 and (one.column("seconds") > 0).all() for one in result.measured)
    assert result.measured[1].column("sent_bytes").tolist() == [2 * 4 * 50_890 * 4] * 2
    clients = {"batches", "forward", "backward", "optimizer", "evaluation"}
    assert clients | {"distances", "mixing", "messages"} <= set(result.phases)
    assert all(seconds >= 0 for seconds in result.phases.values())
    assert len(show(result).rows) == 2
    (workload,) = json.loads((tmp_path / "bench.json").read_text())["workloads"]
    assert workload["clock"] == "processor"
    assert workload["phases"] == result.phases
    assert workload["all_over_one"] is None
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_nobody_listens_outside_a_watched_round() -> None:
    assert WATCHER.get() is None
    clock = PhaseClock(torch.device("cpu"), on=True)
    pool = TINY.pool()
    with closing(LocalEngine(TINY.world(pool), pool)) as engine:
        engine.round(1, evaluate_pre=False, evaluate_post=True)
        assert clock.take_all() == {}
        with clock.running():
            engine.round(2, evaluate_pre=False, evaluate_post=False)
    assert "evaluation" not in clock.take_all()


@pytest.mark.slow
def test_all_contenders_do_all_rounds(tmp_path: Path) -> None:
    (result,) = bench.run([TINY], 2, console=Console(), out=tmp_path)
    names = [one.contender for one in result.measured]
    assert names[0] == "plain loop"
    assert names[-2:] == ["ray, 1 host", "local"]
    for one in result.measured:
        assert len(one.turns) == 2
        assert one.start_seconds > 0
        assert (one.column("seconds") > 0).all()
    for one in result.measured[1:]:
        # Four clients, down and up, 50,890 float32 each.
        assert one.column("sent_bytes").tolist() == [2 * 4 * 50_890 * 4] * 2
        parts = [one.column(name) for name in ("work_seconds", "server_seconds", "own_seconds")]
        assert np.allclose(sum(parts), one.column("seconds"))
        assert all((part > 0).all() for part in parts)
    assert (tmp_path / "bench.json").is_file()
