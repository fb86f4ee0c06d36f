"""Spaces of sweeps: points, draws, conditions, constraints, and what is refused before any trial starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import CONFIG, small_world

from raypfl.engine.placement import Node
from raypfl.errors import CheckpointError, ConfigError, PlacementError, StorageError
from raypfl.sweep import session
from raypfl.sweep.config import TrialConfig
from raypfl.sweep.folder import SweepFolder
from raypfl.sweep.reading import is_sweep, read
from raypfl.sweep.resources import Ask, Share, ask_of, at_once
from raypfl.sweep.session import Sweep
from raypfl.sweep.space import evaluate
from raypfl.sweep.trials import Trial

REPOSITORY = Path(__file__).resolve().parents[2]
READY = sorted((REPOSITORY / "configs/sweeps").glob("*.yaml"))

DRAWN = {"uniform": [0.1, 1.0]}
TWO = [{"name": "local"}, {"name": "fedavg"}]

BASE = {**CONFIG, "method": {"name": "diversifed"}, "model": {"name": "linear"}, "rounds": 2}


def sweep(*overrides: str, folder: Path = Path("nowhere"), **keys: Any) -> Sweep:
    settings = {"name": "s", "storage_path": str(folder), "base": BASE, **keys}
    return Sweep(read(settings, overrides))


def trials(*overrides: str, **keys: Any) -> list[Trial]:
    return sweep(*overrides, **keys).examples


def tau_and_seed(trial: Trial) -> tuple[float, int]:
    return trial.config.method.tau, trial.seed  # type: ignore[attr-defined]


def test_a_grid_is_every_combination_with_every_seed() -> None:
    found = trials(space={"method.tau": [0.5, 1.0], "partition.alpha": {"grid": [0.1, 2]}, "seed": [3, 4]})
    assert [trial.label for trial in found] == [
        f"tau{tau}-alpha{alpha}-seed{seed}" for tau in (0.5, "1") for alpha in (0.1, 2) for seed in (3, 4)
    ]
    assert [trial.point for trial in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert tau_and_seed(found[-1]) == (1.0, 4)
    assert found[-1].config.partition.alpha == 2  # type: ignore[union-attr]


def test_keys_that_change_together_are_one_dimension() -> None:
    found = trials(space={"method.tau, method.lam": [[0.5, 1.0], [0.9, 0.1]], "training.epochs": [1, 2]})
    pairs = [(trial.config.method.tau, trial.config.method.lam) for trial in found]  # type: ignore[attr-defined]
    assert pairs == [(0.5, 1.0), (0.5, 1.0), (0.9, 0.1), (0.9, 0.1)]


def test_draws_are_in_range_the_same_every_time_and_the_same_for_every_grid_value() -> None:
    space = {
        "partition.alpha": [0.1, 1.0],
        "training.optimizer.lr": {"log_uniform": [1e-4, 1e-1]},
        "method.lam": {"uniform": [2.0, 3.0]},
        "training.epochs": {"integer": [1, 3]},
        "training.batch_size": {"choice": [5, 10]},
    }
    points = [trial.values for trial in trials(space=space, search={"draws": 40})]
    assert points == [trial.values for trial in trials(space=space, search={"draws": 40})]
    assert points != [trial.values for trial in trials(space=space, search={"draws": 40, "seed": 1})]
    assert len(points) == 80
    by_alpha = [[p for p in points if p["partition.alpha"] == alpha] for alpha in (0.1, 1.0)]
    assert [{**p, "partition.alpha": 1.0} for p in by_alpha[0]] == by_alpha[1]
    logs = sorted(math.log10(p["training.optimizer.lr"]) for p in points)  # type: ignore[arg-type]
    assert -4 <= logs[0] < -3.5 < -2.8 < logs[40] < -2.2 < -1.5 < logs[-1] < -1
    assert all(2 <= p["method.lam"] < 3 for p in points)  # type: ignore[operator]
    assert {p["training.epochs"] for p in points} == {1, 2, 3}
    assert {p["training.batch_size"] for p in points} == {5, 10}


def test_a_key_with_a_condition_is_there_only_where_it_holds() -> None:
    found = trials(
        space={
            "method.name": ["fedavg", "diversifed"],
            "method.tau": {"grid": [0.5, 0.6], "when": 'method.name == "diversifed"'},
        }
    )
    assert [trial.label for trial in found] == [
        "fedavg-seed3",
        "diversifed-tau0.5-seed3",
        "diversifed-tau0.6-seed3",
    ]


def test_constraints_leave_grid_points_out_and_draw_others_again() -> None:
    grid = {"method.tau": [0.5, 1.0], "method.lam": [1, 4]}
    found = trials(space=grid, constraints=["method.tau * method.lam < 3"])
    assert [tuple(trial.values.values()) for trial in found] == [(0.5, 1), (0.5, 4), (1.0, 1)]
    drawn = {"method.tau": {"uniform": [0.1, 1.0]}, "method.lam": {"uniform": [0.1, 1.0]}}
    found = trials(space=drawn, search={"draws": 20}, constraints=["method.tau < method.lam / 2"])
    assert len(found) == 20
    assert all(t.values["method.tau"] < t.values["method.lam"] / 2 for t in found)  # type: ignore[operator]


def test_a_key_may_have_the_name_of_a_method_of_dictionaries() -> None:
    assert evaluate("a.items > 2 and a.values in [1, 2]", {"a": {"items": 3, "values": 1}})


def test_the_command_line_changes_base_space_and_sweep() -> None:
    space = {"method.tau": [0.5, 1.0], "partition.alpha": [0.1, 1.0]}
    found = trials("partition.alpha=0.7", "seed=[0,1]", "rounds=5", "space.method.lam=[1,2]", space=space)
    assert len(found) == 8
    assert {trial.config.partition.alpha for trial in found} == {0.7}  # type: ignore[union-attr]
    assert {(trial.seed, trial.config.rounds) for trial in found} == {(0, 5), (1, 5)}
    assert len(trials("method.tau=[0.1,0.2,0.3]", space=space)) == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"space": {"method.taus": [1]}}, "method.taus: unknown key. Did you mean tau"),
        ({"space": {"methods.tau": [1]}}, "methods: unknown key"),
        ({"space": {"method.tau": [-1]}}, "method.tau = -1"),
        ({"space": {"method.tau": {"grid": [1], "uniform": [0, 1]}}}, "exactly one of grid, choice"),
        ({"space": {"method.tau": {"uniform": [1, 0]}}}, "1 is not below 0"),
        ({"space": {"method.tau": {"log_uniform": [0, 1]}}}, "must be positive"),
        ({"space": {"method.tau": {"grids": [1]}}}, "unknown key. Did you mean grid"),
        ({"space": {"method.tau": [1, 1]}}, "must not name 1 twice"),
        ({"space": {}}, "is not a sweep"),
        ({"space": {"method.tau, method.lam": [1, 2]}}, "2 keys that change together"),
        ({"space": {"name": ["a"]}}, "belongs to the sweep"),
        ({"space": {"method.tau": [1]}, "set": {"method.tau": 1}}, "is also in `set`"),
        ({"space": {"method.tau": {"uniform": [0.1, 1]}}}, "search.draws: method.tau is drawn"),
        ({"space": {"method.tau": [1]}, "search": {"draws": 2}}, "nothing in the space is drawn"),
        ({"space": {"seed": {"uniform": [0, 1]}}}, "space.seed"),
        ({"space": {"method.tau": [1]}, "constraints": ["method.tau > 2"]}, "no point of the space meets"),
        ({"space": {"method.tau": [1]}, "constraints": ["method.taus > 2"]}, "keys that no trial has"),
        ({"space": {"method.tau": [1]}, "constraints": ["method.tau >"]}, "cannot be worked out"),
        ({"space": {"method.tau": [1]}, "constraints": ["__import__('os')"]}, "no trial has|worked out"),
        (
            {"space": {"method.tau": DRAWN}, "search": {"draws": 1}, "constraints": ["method.tau > 2"]},
            "no point of the space meets",
        ),
        ({"space": {"method.tau": {"grid": [1], "when": "methods.name == 1"}}}, "space.method.tau.when"),
        ({"space": {"method.tau": [1]}, "select": {"on": "validation"}}, "validation_fraction = 0"),
        ({"space": {"method.tau": [1]}, "select": {"per": ["method.lam"]}}, "is no key of the space"),
        ({"space": {"method.tau": [1]}, "select": {"view": "theirs/pre"}}, "must be model/point"),
        ({"space": {"method.tau": [1]}, "scheduler": {"name": "asha", "grace": 2}}, "nothing to stop"),
        ({"space": {"method.tau": [1]}, "scheduler": {"name": "pbt", "interval": 1}}, "every key changes"),
        ({"space": {"method.tau": [1]}, "schedulers": {}}, "schedulers: unknown key. Did you mean scheduler"),
        ({"space": {"method": [{"name": "fedavg"}]}, "set": {"method.tau": 1}}, "tau"),
        ({"space": {"training.epochs": [1]}, "base": {**BASE, "method": TWO}}, "the base has 2 methods"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_the_reason(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(**keys)


def test_a_population_has_one_seed_and_one_data_set() -> None:
    keys: dict[str, Any] = {
        "space": {"training.optimizer.lr": {"log_uniform": [1e-3, 1.0]}},
        "search": {"draws": 4},
        "scheduler": {"name": "pbt", "interval": 1},
    }
    assert len(sweep(**keys).examples) == 4
    with pytest.raises(ConfigError, match="trained on the same clients' data"):
        sweep("seed=[0,1]", **keys)
    with pytest.raises(ConfigError, match="less than one"):
        sweep("search.draws=2", **keys)
    with pytest.raises(ConfigError, match="space.partition.alpha"):
        sweep(**{**keys, "space": {"partition.alpha": {"uniform": [0.1, 1.0]}}})


def test_a_trial_that_no_node_has_room_for_is_refused(tmp_path: Path) -> None:
    tau = {"method.tau": [1]}
    with pytest.raises(PlacementError, match="a trial asks for 1000 CPU"):
        sweep("trial.cpus=1000", space=tau).check()
    with pytest.raises(PlacementError, match="1 CPU and 0.5 GPU"):
        sweep("trial.gpus=0.5", space=tau).check([Node(4, 0, 0)])
    with pytest.raises(PlacementError, match="1000 client hosts|4 client hosts"):
        sweep(
            "engine.name=ray", "engine.num_actors=4", "resources.num_cpus_per_actor=1000", space=tau
        ).check()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shares", "nodes", "expected"),
    [
        ([Share(1, 0)], [Node(2, 0, 0)], 2),
        ([Share(0.25, 0)], [Node(2, 0, 0)], 8),
        ([Share(1, 0.25)], [Node(16, 2, 0)], 8),
        ([Share(0.1, 0.4)], [Node(16, 2, 0)], 4),  # two fit a GPU, and halves of two do not make a third
        ([Share(1, 0), Share(1, 0)], [Node(3, 0, 0)], 1),
        ([Share(2, 0), Share(2, 0)], [Node(2, 0, 0), Node(3, 0, 0)], 1),
        ([Share(3, 0)], [Node(2, 0, 0), Node(2, 0, 0)], 0),
        ([Share(1, 2)], [Node(8, 3, 0)], 1),
    ],
)
def test_trials_at_once(shares: list[Share], nodes: list[Node], expected: int) -> None:
    assert at_once(Ask(tuple(shares)), nodes) == expected


def test_a_changed_sweep_is_not_continued(tmp_path: Path) -> None:
    first = sweep(space={"method.tau": [0.5, 1.0]}, folder=tmp_path)
    first.folder.begin(first.config)
    folder = SweepFolder(tmp_path / "s")
    folder.check_unchanged(sweep("concurrency=1", "trial.cpus=0.5", "engine.num_actors=2",
                                 space={"method.tau": [0.5, 1.0]}, folder=tmp_path).config)  # fmt: skip
    for change in ("rounds=3", "method.tau=[0.5]", "seed=[1,2]"):
        changed = sweep(change, space={"method.tau": [0.5, 1.0]}, folder=tmp_path)
        with pytest.raises(CheckpointError, match="belongs to another configuration"):
            folder.check_unchanged(changed.config)


def test_folders_are_refused_that_are_none_or_taken(tmp_path: Path) -> None:
    keys = {"name": "s", "storage_path": str(tmp_path), "base": BASE, "space": {"method.tau": [1]}}
    with pytest.raises(StorageError, match="is not a sweep"):
        session.run(keys, resume=True)
    first = Sweep(read(keys))
    first.folder.begin(first.config)
    with pytest.raises(StorageError, match="exists already"):
        session.run(keys)
    with pytest.raises(StorageError, match="that has begun"):
        session.run(tmp_path / "s")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="is not a sweep"):
        session.run(tmp_path / "empty", resume=True)


def test_a_sweep_is_told_from_a_run(tmp_path: Path) -> None:
    assert is_sweep(READY[0])
    assert not is_sweep(REPOSITORY / "configs/quickstart.yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(dict(BASE)))
    with pytest.raises(ConfigError, match="is not a sweep"):
        read(tmp_path / "run.yaml")


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_every_ready_sweep_expands(path: Path) -> None:
    ready = Sweep(read(path, ["storage_path=nowhere"]))
    seeds = len({trial.seed for trial in ready.examples})
    points = {trial.point for trial in ready.examples}
    assert len(ready.examples) == len(points) * seeds
    assert len({trial.label for trial in ready.examples}) == len(ready.examples)
    assert len(points) > 1


def test_the_ready_sweeps_have_the_values_of_the_tables() -> None:
    def of(name: str) -> list[Trial]:
        return Sweep(read(REPOSITORY / f"configs/sweeps/{name}.yaml")).examples

    tau = of("diversifed_tau_alpha_fmnist")
    assert {t.values["method.tau"] for t in tau} == {0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1}
    assert {t.values["partition.alpha"] for t in tau} == {0.1, 0.5, 1.0}
    assert len(tau) == 7 * 3 * 5
    cifar100 = of("diversifed_tau_alpha_cifar100")
    assert {t.values["partition.alpha"] for t in cifar100} == {0.01, 0.1, 0.5}
    assert {t.values["participation.fraction"] for t in of("diversifed_participation")} == {
        1.0,
        0.9,
        0.7,
        0.5,
    }
    assert {t.values["topology.k"] for t in of("ua_pdfl_peers")} == {1, 5, 15, 29}
    steps = {(t.values["participation.count"], t.values["method.inner_steps"]) for t in of("pfml_steps")}
    assert steps == {(count, k) for count in (5, 10) for k in (1, 3, 5, 7)}
    assert {t.values["method.lam"] for t in of("pfml_lambda")} == {10, 20, 30, 40}


def test_a_trial_has_a_place_for_each_of_several_servers() -> None:
    several = ["server.sharding=3", "model={name: mlp, hidden: [300]}", "resources.num_cpus_server=1"]
    world, _ = small_world("engine.name=ray", "engine.num_actors=2", *several)
    ask = ask_of(world.config, TrialConfig(), world, [Node(8, 0, 0)])
    assert ask.bundles() == [{}, *[{"CPU": 1.0}] * 5]
