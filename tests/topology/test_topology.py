"""The configuration of topologies, and who is away."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from raypfl.topology import TOPOLOGIES, Topology, TopologyConfig, active, check, mixing, sample
from raypfl.topology.drawn import ErdosRenyi, KOut, Matching, Regular
from raypfl.topology.mixing import Kind
from raypfl.topology.shapes import Full, Ring, Torus

ADAPTER: TypeAdapter[Topology] = TypeAdapter(TopologyConfig)
WITHOUT_FILE = [name for name in TOPOLOGIES if name != "file"]


def test_every_topology_is_listed() -> None:
    mapping = ADAPTER.json_schema()["discriminator"]["mapping"]
    assert set(mapping) == set(TOPOLOGIES)


@pytest.mark.parametrize("name", WITHOUT_FILE)
def test_defaults_can_be_drawn_over_30_peers(name: str) -> None:
    config = ADAPTER.validate_python({"name": name})
    check(config, 30, seed=0)
    assert config.changes == (name in {"kout", "regular", "exp1", "matching"})
    graph = sample(config, 30, 1, seed=0)
    assert config.is_directed == (not graph.is_symmetric)
    assert config.changes == (sample(config, 30, 2, seed=0).sources.tolist() != graph.sources.tolist())


def test_default_weights() -> None:
    kinds = {name: ADAPTER.validate_python({"name": name}).weights for name in WITHOUT_FILE}
    metropolis = {"regular", "er", "smallworld", "star", "matching"}
    assert {name for name, kind in kinds.items() if kind == "metropolis"} == metropolis
    assert kinds["kout"] == "samplesize"
    assert {kinds[name] for name in WITHOUT_FILE if name not in metropolis | {"kout"}} == {"uniform"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "kout", "k": -1},
        {"name": "kout", "weights": "metropolis"},
        {"name": "exp", "weights": "metropolis"},
        {"name": "ring", "steps": 0},
        {"name": "ring", "refresh": "static"},
        {"name": "torus", "rows": 2},
        {"name": "er", "p": 0},
        {"name": "er", "p": 1.5},
        {"name": "smallworld", "p": -0.1},
        {"name": "ring", "weights": "given"},
        {"name": "ring", "lazy": 1},
        {"name": "ring", "p_active": 0},
        {"name": "file"},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(wrong)


def test_availability_is_a_function_of_seed_round_and_peer() -> None:
    config = Ring(p_active=0.6)
    first = active(config, 30, 1, seed=0)
    assert torch.equal(first, active(config, 30, 1, seed=0))
    assert not torch.equal(first, active(config, 30, 2, seed=0))
    assert not torch.equal(first, active(config, 30, 1, seed=1))
    assert torch.equal(first[:20], active(config, 20, 1, seed=0))
    # Nobody is away who was there at a lower probability.
    assert (active(Ring(p_active=0.9), 30, 1, seed=0) | ~first).all()


def test_availability_has_its_probability() -> None:
    there = sum(int(active(Ring(p_active=0.7), 100, round, seed=0).sum()) for round in range(1, 101))
    # 10,000 draws, standard deviation 46.
    assert abs(there - 7000) < 4 * 46


@pytest.mark.parametrize("config", [Regular(), ErdosRenyi(), Ring(), Torus(), Full(), Matching()])
def test_metropolis_stays_doubly_stochastic_when_peers_are_away(config: Topology) -> None:
    config = config.model_copy(update={"p_active": 0.6, "weights": "metropolis"})
    for round in range(1, 6):
        there = active(config, 30, round, seed=0)
        a = mixing(config, sample(config, 30, round, seed=0))
        assert 0 < there.sum() < 30
        assert a.is_doubly_stochastic(1e-12)
        assert torch.equal(a.dense(), a.dense().T)
        assert torch.equal(a.dense()[~there], torch.eye(30, dtype=torch.float64)[~there])


@pytest.mark.parametrize("kind", ["uniform", "samplesize"])
def test_other_weights_are_scaled_to_those_that_are_there(kind: Kind) -> None:
    sizes = torch.arange(1, 31)
    everyone, some = KOut(weights=kind), KOut(weights=kind, p_active=0.6)
    there = active(some, 30, 1, seed=0).double()
    whole = mixing(everyone, sample(everyone, 30, 1, seed=0), sizes).dense()
    kept = whole * there * there[:, None]
    expected = torch.where(there[:, None] > 0, kept / kept.sum(1, keepdim=True), torch.eye(30).double())
    found = mixing(some, sample(some, 30, 1, seed=0), sizes).dense()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_nobody_there() -> None:
    config = Ring(p_active=1e-12)
    assert torch.equal(mixing(config, sample(config, 30, 1, 0)).dense(), torch.eye(30).double())
