"""What a run would need: figures that can be checked by hand, and refusals before anything starts."""

import re

import pytest
from small_runs import small_world

import raypfl
from raypfl import data
from raypfl.configuration import expand, load
from raypfl.data import Pool
from raypfl.engine import planning
from raypfl.engine.local import LocalEngine
from raypfl.engine.placement import Node
from raypfl.engine.world import World, make_world
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


def alone_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine like this, whatever cluster other tests have left this process in."""
    monkeypatch.setattr(planning, "this_machine", lambda: node)
    monkeypatch.setattr(planning, "attached", lambda: False)


def test_figures_of_a_small_run():
    shown = {name: text.strip() for name, text in lines().items()}
    assert f"{PARAMETERS} parameters" in shown["model"]
    assert shown["participants"] == "4 a round, 4 rounds"
    # Four participants, each with the whole model of 650 floats down and up.
    assert shown["bytes a round"] == "10.4 kB down, 10.4 kB up"
    assert "8 clients, 20 training samples each" in shown["partition"]
    assert shown["blocks"].startswith("4 of 2 clients, 1 models a forward")


def test_cores_that_blocks_leave_idle_are_said(monkeypatch):
    alone_on(Node(8, 0, 8 * 2**30), monkeypatch)
    ray = ["engine.name=ray"]
    assert "engine.block=1 would keep all 8 cores busy" in lines(*ray)["blocks"]
    assert "busy" not in lines(*ray, "engine.num_actors=2")["blocks"]


def test_separate_sends_nothing():
    assert lines("method={name: local}")["bytes a round"].strip() == "0 bytes down, 0 bytes up"


def test_hosts_that_do_not_fit_are_refused_with_the_arithmetic(monkeypatch):
    alone_on(Node(2, 0, 8 * 2**30), monkeypatch)
    with pytest.raises(PlacementError, match=r"3 client hosts with 1 CPU each.*room for 2 of them"):
        raypfl.plan(CONFIG, ["engine.name=ray", "engine.num_actors=3", "engine.block=1"])


def test_memory_that_is_not_there_is_refused(monkeypatch):
    alone_on(Node(2, 0, 2**20), monkeypatch)
    with pytest.raises(PlacementError, match=r"needs about .* of memory, and the 1 node\(s\) have 1\.0 MB"):
        raypfl.plan(CONFIG)


FOMO = "method={name: fedfomo, num_models: 3, epsilon: 0}"


def world_of(*overrides: str) -> tuple[World, Pool]:
    (config,) = expand(load(CONFIG, overrides)).values()
    pool = data.load(config.data, config.seed)
    return make_world(config, pool, data.partition(config.partition, pool, config.seed)), pool


def bytes_of(memory: str, what: str) -> float:
    """The figure of the plan's line in bytes, to the digits that it has."""
    value, unit = re.search(rf"([\d.]+) (bytes|kB|MB) {what}", memory).groups()
    return float(value) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit]


@pytest.mark.parametrize("hosts", [1, 2])
def test_models_that_clients_receive_are_counted(hosts):
    """Participants receive 3 models each, their own and 0 and 1, the first two others: no pair has a row."""
    world, pool = world_of(FOMO, f"engine.num_actors={hosts}")
    engine = LocalEngine(world, pool)
    _, work = engine.hub.open(1, train=True, evaluate_pre=False, evaluate_post=False)
    ids = [own.ids.tolist() for own in work]
    models = [len({0, 1, *own, *([2] if set(own) & {0, 1} else [])}) for own in ids]
    assert [own.down.models.shape[1] for own in work] == models
    shown = lines(FOMO, f"engine.num_actors={hosts}")
    assert bytes_of(shown["memory"], "received") == pytest.approx(4 * 650 * max(models), rel=0.05)
    # Whatever hosts share, a real server sends 3 models to each of 4 participants.
    assert shown["bytes a round"].split(",")[0].strip() == f"{4 * 3 * 650 * 4 / 1000:.1f} kB down"


def test_memory_of_others_models_is_refused_with_the_arithmetic(monkeypatch):
    """The affinities of 8 clients are 8 x 8 numbers, beside 8 models, the start of each."""
    alone_on(Node(2, 0, 2**20), monkeypatch)
    server = (8 * 650 + 8 * 8 + 2 * 8) * 4 / 1000
    with pytest.raises(PlacementError, match=rf"received\), {server:.1f} kB server"):
        raypfl.plan(CONFIG, [FOMO])


def test_virtual_time_is_told():
    slow = "clock={compute: {name: given, values: [1, 1, 1, 1, 1, 1, 1, 9]}, bandwidth: 1e6, deadline: 8}"
    shown = raypfl.plan(CONFIG, [slow, "clock.drop_out=0.25", "training.epochs=2"])
    assert re.search(r"virtual time +rounds end together, uploads after 8 s are thrown away\n", shown)
    assert "a local update takes 2 to 18 s (median 2)\n" in shown
    assert "a message 0 s and 1e+06 bytes a second\n" in shown
    assert "25% of clients fail in a round" in shown
    assert "virtual time" not in raypfl.plan(CONFIG)


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
    assert planning._trials(world, 20) == 2.0
    world, _ = small_world("training.epochs=3", method="fedavg")
    assert planning._trials(world, 20) == 3.0
    # A client with half as many samples has done half of it.
    assert planning._trials(world, 10) == 6.0
