"""The configurations that come with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypfl.configuration import expand, load, read_yaml
from raypfl.scaling.config import read as read_studies

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
STUDIES = [path for path in FILES if "scale" in read_yaml(path)]
SWEEPS = [path for path in FILES if "space" in read_yaml(path)]
TABLES = sorted((ROOT / "configs/paper").glob("*.yaml"))
"""Of papers; tests/paper reads them."""
RUNS = [path for path in FILES if path not in (*STUDIES, *SWEEPS, *TABLES)]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_resolves_to_runs(path: Path) -> None:
    config = load(path)
    assert len(expand(config)) == len(config.method) * len(config.seed)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_of_scaling_studies_resolves_to_points(path: Path) -> None:
    scaling = read_studies(path)
    assert {point.study for point in scaling.points} == set(scaling.scale.studies)


def test_the_command_of_the_readme() -> None:
    config = load(
        ROOT / "configs/diversifed/fmnist_dirichlet.yaml",
        [
            "partition.alpha=0.1",
            "method.tau=0.9",
            "engine.name=ray",
            "engine.num_actors=2",
            "rounds=50",
            "seed=1",
        ],
    )
    assert list(expand(config)) == ["local-seed1", "fedavg-seed1", "fedamp-seed1", "diversifed-seed1"]
    run = expand(config)["diversifed-seed1"]
    assert (run.method.tau, run.partition.alpha, run.rounds, run.seed) == (0.9, 0.1, 50, 1)  # type: ignore[attr-defined, union-attr]
    assert (run.engine.name, run.engine.num_actors) == ("ray", 2)
    assert (run.partition.num_clients, run.training.epochs, run.training.batch_size) == (40, 10, 100)


def test_the_quickstart_compares_four_methods_on_two_actors() -> None:
    config = load(ROOT / "configs/quickstart.yaml")
    assert [method.name for method in config.method] == ["local", "fedavg", "fedamp", "diversifed"]
    assert (config.engine.name, config.engine.num_actors) == ("ray", 2)
    assert (config.data.name, config.partition.num_clients) == ("digits", 20)
