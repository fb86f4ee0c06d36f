"""The shape of what `raypfl bench methods` measures, and what methods promise; never a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raypfl import bench
from raypfl.bench import method_report
from raypfl.bench.methods import Cost, Costs, Entry, Round, Turn, entries, measure
from raypfl.bench.workloads import WORKLOADS
from raypfl.cli import app
from raypfl.errors import ConfigError
from raypfl.methods import METHODS
from raypfl.methods.fedrep import Config as FedRep
from raypfl.methods.pfedme import Config as PFedMe
from raypfl.training import TrainingConfig

TINY = replace(WORKLOADS["mlp"], num_clients=4, train_samples=20, test_samples=10, epochs=2, batch_size=10)
TRAINING = TrainingConfig(epochs=2, batch_size=10)


def cost(at_most: float | None, *seconds: float, epochs: float = 4) -> Cost:
    turns = tuple(
        Turn(Round(own, 0.4, 0.3, 2e3, 1e3), Round(own / ratio, 0.1, 0.1, 8, 8))
        for ratio, own in enumerate(seconds, 1)
    )
    return Cost(Entry("pfedme", {"name": "pfedme"}), epochs, 2, at_most, turns)


def test_every_method_and_variant_is_an_entry_that_its_options_allow() -> None:
    chosen = entries()
    assert {entry.options["name"] for entry in chosen} == set(METHODS)
    assert len({entry.name for entry in chosen}) == len(chosen)
    for entry in chosen:
        METHODS[entry.options["name"]].Config(**entry.options)


def test_names_narrow_and_unknown_ones_are_refused() -> None:
    assert [entry.name for entry in entries(["fedtc", "fedavg"])] == ["fedtc", "fedtc live", "fedavg"]
    with pytest.raises(ConfigError, match="no method 'fedrad'. Did you mean fedrod"):
        entries(["fedavg", "fedrad"])


def test_what_methods_promise() -> None:
    promised = {
        entry.name: METHODS[entry.options["name"]](
            METHODS[entry.options["name"]].Config(**entry.options)
        ).cost()
        for entry in entries(
            ["fedper", "fedrod", "fedtc", "pfedme", "fedpac", "pfml", "fml", "fedproto", "fedavg"]
        )
    }
    assert promised == {
        "fedper": 1.15,
        "fedrod": 1.15,
        "fedtc": 1.15,
        "fedtc live": 1.15,
        "pfedme": 5.5,
        "fedpac": 1.4,
        "pfml": 6.5,
        "fml": 2.5,
        "fedproto": 1.25,
        "fedavg": None,
    }
    assert METHODS["pfedme"](PFedMe(inner_steps=2)).cost() == 2.5
    pfml = METHODS["pfml"]
    assert pfml(pfml.Config(inner_steps=0)).cost() == 2.5
    assert pfml(pfml.Config(inner_steps=3, inner_order="gauss_seidel")).cost() == 8.5


def test_epochs_are_passes_over_a_clients_samples() -> None:
    def passes(name: str, samples: int = 45, **options: object) -> float:
        method = METHODS[name]
        return method(method.Config(**options)).passes(TRAINING, samples)

    assert passes("fedavg") == 2
    assert passes("pfedme") == 2
    assert passes("pfedme", local_batches=15) == 3, "15 of 5 batches"
    assert passes("pfml", local_batches=10) == 2
    assert METHODS["fedrep"](FedRep(head_epochs=3, body_epochs=2)).passes(TRAINING, 45) == 5
    # Two batches of 10 an outer step: 40 of 45 samples; or parts of whole batches, and nothing is left out.
    assert passes("per_fedavg") == pytest.approx(2 * 40 / 45)
    assert passes("per_fedavg", draw="parts") == 2
    assert passes("per_fedavg", samples=15) == 2


def test_an_epochs_ratio_is_of_the_same_turn_and_by_epochs() -> None:
    found = cost(1.0, 1.0, 2.0, 3.0)
    assert found.epoch_ratios.tolist() == [0.5, 1.0, 1.5], "four epochs for FedAvg's two"
    assert found.ratios("server_seconds").tolist() == [4.0] * 3
    assert not found.is_above
    assert cost(0.99, 1.0, 2.0, 3.0).is_above
    assert not cost(None, 1.0, 2.0, 3.0).is_above


def test_the_table_marks_what_is_above_and_says_what_was_left_out() -> None:
    grid = method_report.show(Costs(TINY, (cost(1.0, 1.0), cost(0.4, 1.0), cost(None, 1.0)), {"x": "why"}))
    assert {len(row) for row in grid.rows} == {len(grid.header)}
    assert [row[1:4] for row in grid.rows] == [
        ("0.50 [0.50 0.50]", "1.00", ""),
        ("0.50 [0.50 0.50]", "0.40", "above"),
        ("0.50 [0.50 0.50]", "", ""),
    ]
    assert grid.rows[0][-2:] == ("2", "1")
    assert grid.note.endswith("Left out: x: why")


def test_a_method_that_the_workload_does_not_suit_is_left_out_with_its_reason() -> None:
    nothing = Entry("fedrep", {"name": "fedrep", "head_epochs": 0, "body_epochs": 0})
    found = measure(TINY, [nothing], 1)
    assert found.measured == ()
    assert "nothing would be trained" in found.left_out["fedrep"]


def test_bytes_are_those_of_declared_messages_and_files_hold_every_turn(tmp_path: Path) -> None:
    costs = measure(TINY, entries(["fedavg", "fedper", "local"]), 2)
    method_report.write(tmp_path, costs)
    turns = pq.read_table(tmp_path / "bench.parquet").to_pandas()
    assert len(turns) == 3 * 2
    first = turns.groupby("entry").first()
    assert (turns.train_seconds > 0).all()
    # 64 hidden units, 10 classes: the head is 650 of 50,890 float32.
    assert first.down_bytes.to_dict() == {"fedavg": 4 * 50_890, "fedper": 4 * 50_240, "local": 0}
    assert first.up_bytes.to_dict() == first.down_bytes.to_dict()
    (fedavg, fedper, _) = json.loads((tmp_path / "bench.json").read_text())["methods_on"]["methods"]
    assert (fedavg["at_most"], fedper["at_most"]) == (None, 1.15)
    assert set(fedper["epoch_ratio"]) == {"median", "low", "high"}


def test_the_command_measures_what_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(bench, "run_methods", lambda *args, **kwargs: calls.append((*args, kwargs["out"])))
    arguments = [
        "--workload",
        "lenet5",
        "--methods",
        "fedper, fedavg",
        "--rounds",
        "3",
        "--out",
        str(tmp_path),
    ]
    ran = CliRunner().invoke(app, ["bench", "methods", *arguments])
    assert ran.exit_code == 0, ran.output
    expected = replace(WORKLOADS["lenet5"], epochs=5)
    assert calls == [(expected, entries(["fedper", "fedavg"]), 3, tmp_path)]


def test_an_unknown_method_is_a_message() -> None:
    ran = CliRunner().invoke(app, ["bench", "methods", "--methods", "fedpr"])
    assert ran.exit_code == 2
    assert "no method 'fedpr'" in ran.output
