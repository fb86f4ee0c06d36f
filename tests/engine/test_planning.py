"""What a run would need: figures that can be checked by hand, and refusals before anything starts."""

import pytest
from small_runs import small_world

import raypfl
from raypfl.engine import planning
from raypfl.engine.placement import Node
from raypfl.errors import PlacementError

CONFIG = {
    "rounds": 4,
    "method": {"name": "fedavg"},
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 8,
        "alpha": 5.0,
        "train_size": 20,
        "test_size": 10,
        "when_short": "replace",
    },
    "model": {"name": "linear"},
    "training": {"epochs": 1, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.1}},
    "participation": {"count": 4},
}
PARAMETERS = 64 * 10 + 10


def lines(*overrides: str) -> dict[str, str]:
    text = raypfl.plan(CONFIG, overrides)
    return dict(line.strip().split("  ", 1) for line in text.splitlines()[1:])


def test_figures_of_a_small_run():
    shown = {name: text.strip() for name, text in lines().items()}
    assert f"{PARAMETERS} parameters" in shown["model"]
    assert shown["participants"] == "4 a round, 4 rounds"
    # Four participants, each with the whole model of 650 floats down and up.
    assert shown["bytes a round"] == "10.4 kB down, 10.4 kB up"
    assert "8 clients, 20 training samples each" in shown["partition"]
    assert shown["blocks"].startswith("4 of 2 clients, 1 models a forward")


def test_cores_that_blocks_leave_idle_are_said(monkeypatch):
    monkeypatch.setattr(planning, "this_machine", lambda: Node(8, 0, 8 * 2**30))
    ray = ["engine.name=ray"]
    assert "engine.block=1 would keep all 8 cores busy" in lines(*ray)["blocks"]
    assert "busy" not in lines(*ray, "engine.num_actors=2")["blocks"]


def test_separate_sends_nothing():
    assert lines("method={name: local}")["bytes a round"].strip() == "0 bytes down, 0 bytes up"


def test_hosts_that_do_not_fit_are_refused_with_the_arithmetic(monkeypatch):
    monkeypatch.setattr(planning, "this_machine", lambda: Node(2, 0, 8 * 2**30))
    with pytest.raises(PlacementError, match=r"3 client hosts with 1 CPU each.*room for 2 of them"):
        raypfl.plan(CONFIG, ["engine.name=ray", "engine.num_actors=3", "engine.block=1"])


def test_memory_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(planning, "this_machine", lambda: Node(2, 0, 2**20))
    with pytest.raises(PlacementError, match=r"needs about .* of memory, and the 1 node\(s\) have 1\.0 MB"):
        raypfl.plan(CONFIG)


def test_planning_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raypfl.plan(CONFIG)
    assert not list(tmp_path.iterdir())


def test_models_that_clients_keep_are_said_and_not_counted_as_traffic():
    one, other = "{name: mlp, hidden: [10]}", "{name: linear}"
    options = ["method={name: pfml, beta: 1}", f"personal_model=[{one}, {other}]"]
    shown = lines(*options)
    assert f"{PARAMETERS} parameters" in shown["model"]
    assert shown["model"].endswith("personal: mlp (760), linear (650)")
    assert shown["bytes a round"].strip() == "10.4 kB down, 10.4 kB up"


def test_everybody_downloads_where_everybody_trains():
    shown = lines("method={name: pfedme, update_scope: all}")
    assert shown["bytes a round"].strip() == "20.8 kB down, 10.4 kB up"
    assert shown["participants"].strip() == "8 a round, 4 rounds"


def test_time_is_that_of_the_steps_asked_for():
    """Four steps of ten samples are two passes over twenty."""
    world, _ = small_world("training.steps=4", method="fedavg")
    assert planning._epochs(world) == 2.0
    world, _ = small_world("training.epochs=3", method="fedavg")
    assert planning._epochs(world) == 3
