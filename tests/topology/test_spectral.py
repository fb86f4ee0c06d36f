"""Large sparse matrices give the same numbers as small dense ones."""

import math

import pytest
import torch

from raypfl.topology import Topology, contraction, graph_of, mixing, sample, spectral, spectral_gap, weights
from raypfl.topology.drawn import ErdosRenyi, KOut, Matching, Regular, SmallWorld
from raypfl.topology.shapes import OnePeerExponential, Ring, Star, Torus


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "_DENSE", 0)


@pytest.mark.parametrize(
    "config",
    [
        Regular(),
        ErdosRenyi(p=0.1),
        SmallWorld(),
        Star(),
        Torus(),
        Matching(),
        KOut(),
        KOut(k=2),
        Ring(p_active=0.7),
    ],
    ids=lambda config: config.name,
)
def test_sparse_equals_dense(config: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    a = mixing(config, sample(config, 120, 1, seed=0), torch.ones(120))
    dense = spectral_gap(a)
    monkeypatch.setattr(spectral, "_DENSE", 0)
    found = spectral_gap(a)
    assert found.value == pytest.approx(dense.value, abs=1e-6)
    assert found.doubly_stochastic == dense.doubly_stochastic


@pytest.mark.parametrize(
    "config", [Regular(), Matching(), OnePeerExponential()], ids=lambda config: config.name
)
def test_products_of_rounds(config: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [mixing(config, sample(config, 128, round, seed=0)) for round in range(1, 8)]
    dense = contraction(matrices)
    product = torch.linalg.multi_dot([a.dense() for a in reversed(matrices)])
    assert dense == pytest.approx(float(torch.linalg.matrix_norm(product - 1 / 128, 2)), abs=1e-12)
    monkeypatch.setattr(spectral, "_DENSE", 0)
    assert contraction(matrices) == pytest.approx(dense, abs=1e-6)


@pytest.mark.usefixtures("sparse")
def test_few_distinct_singular_values() -> None:
    # Two sides of 60, everyone joined to all of the other side: eigenvalues 1, 1/61 and 1/61 - 60/61.
    left = torch.arange(60)
    graph = graph_of(120, left.repeat_interleave(60), (left + 60).repeat(60), both_ways=True)
    assert spectral_gap(weights(graph, "metropolis")).value == pytest.approx(2 / 61, abs=1e-9)


def test_second_eigenvalue_where_the_mean_moves() -> None:
    # 1 and 2 hear 0, which hears nobody: row sums 1, eigenvalues 1, 1/2 and 1/2.
    graph = graph_of(3, torch.tensor([1, 2]), torch.tensor([0, 0]))
    found = spectral_gap(weights(graph, "uniform"))
    assert not found.doubly_stochastic
    assert found.value == pytest.approx(0.5, abs=1e-7)


def test_gap_of_a_large_ring_is_exact() -> None:
    gap = spectral_gap(weights(sample(Ring(), 10_000, 1, 0), "uniform")).value
    assert gap == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / 10_000)), rel=1e-6)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_hardly_any_peers(num_peers: int) -> None:
    assert spectral_gap(weights(sample(Ring(), num_peers, 1, 0), "uniform")).value == 1
