"""Mixing weights on random graphs, and what methods may ask of them."""

import pytest
import torch
from torch import Tensor

from raypfl.errors import ConfigError
from raypfl.topology import (
    Graph,
    Mixing,
    graph_of,
    pulls,
    require_row_stochastic,
    require_symmetric_doubly_stochastic,
    sample,
    weights,
)
from raypfl.topology.drawn import ErdosRenyi, KOut
from raypfl.topology.mixing import Kind, assemble
from raypfl.topology.shapes import Ring

SIZES = torch.arange(1, 31) * 7 % 23 + 1
KINDS: list[Kind] = ["uniform", "samplesize", "metropolis"]


def undirected(seed: int) -> Graph:
    return sample(ErdosRenyi(p=0.15, refresh="every_round"), 30, 1, seed)


def from_dense(matrix: list[list[float]]) -> Mixing:
    a = torch.tensor(matrix, dtype=torch.float64)
    receivers, sources = (a - a.diag().diag()).nonzero(as_tuple=True)
    graph = graph_of(len(a), receivers, sources)
    return assemble(graph, a[graph.receivers, graph.sources], a.diag())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lazy", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_rows_sum_to_one_over_a_peer_and_those_it_hears(kind: Kind, lazy: float, seed: int) -> None:
    graph = undirected(seed) if kind == "metropolis" else pulls(30, SIZES % 9, 1, seed)
    a = weights(graph, kind, SIZES, lazy)
    assert float((a.row_sums() - 1).abs().max()) <= 1e-12
    dense = a.dense()
    assert (dense >= 0).all()
    assert torch.equal(dense > 0, graph.adjacency() | torch.eye(30, dtype=torch.bool))
    require_row_stochastic(a)


def test_by_hand() -> None:
    # 0 hears 1 and 2, 1 hears 0, 2 hears 0: degrees 2, 1, 1.
    graph = graph_of(3, torch.tensor([0, 0]), torch.tensor([1, 2]), both_ways=True)
    third = 1 / 3
    expected = {
        "uniform": [[third, third, third], [0.5, 0.5, 0], [0.5, 0, 0.5]],
        "samplesize": [[0.1, 0.3, 0.6], [0.25, 0.75, 0], [1 / 7, 0, 6 / 7]],
        "metropolis": [[third, third, third], [third, 1 - third, 0], [third, 0, 1 - third]],
    }
    for kind in KINDS:
        found = weights(graph, kind, torch.tensor([1, 3, 6])).dense()
        wanted = torch.tensor(expected[kind], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)
        lazy = weights(graph, kind, torch.tensor([1, 3, 6]), lazy=0.2).dense()
        torch.testing.assert_close(lazy, 0.2 * torch.eye(3).double() + 0.8 * wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("lazy", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(10))
def test_metropolis_is_symmetric_and_doubly_stochastic(seed: int, lazy: float) -> None:
    graph = undirected(seed)
    a = weights(graph, "metropolis", lazy=lazy)
    assert torch.equal(a.dense(), a.dense().T)
    assert float((a.column_sums() - 1).abs().max()) <= 1e-12 and a.is_doubly_stochastic()
    own = a.values[a.rows == a.columns]
    assert (own >= 1 / (1 + graph.degree.double()) - 1e-15).all()


def test_uniform_weights_of_pulls_do_not_keep_the_mean() -> None:
    a = weights(pulls(30, 5, 1, 0), "uniform")
    torch.testing.assert_close(a.column_sums(), a.dense().sum(0), rtol=0, atol=1e-14)
    assert not a.is_doubly_stochastic()


@pytest.mark.parametrize("kind", KINDS)
def test_relabelling_peers_relabels_the_weights(kind: Kind) -> None:
    graph = undirected(0)
    new = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    relabelled = graph_of(30, new[graph.receivers], new[graph.sources])
    sizes = torch.empty_like(SIZES)
    sizes[new] = SIZES
    before, after = weights(graph, kind, SIZES).dense(), weights(relabelled, kind, sizes).dense()
    torch.testing.assert_close(after[new][:, new], before, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (None, "needs the sizes of 30 peers, none were given"),
        (torch.ones(29), r"needs the sizes of 30 peers, there are \[29\]"),
        (torch.arange(30), "peer 0 has 0 training samples"),
        (torch.full((30,), torch.nan), "peer 0 has nan training samples"),
    ],
)
def test_sizes_must_be_there(sizes: Tensor | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weights(undirected(0), "samplesize", sizes)


def test_metropolis_needs_both_directions() -> None:
    graph = graph_of(3, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]))
    with pytest.raises(ConfigError, match="peer 1 receives from peer 2 and not the other way"):
        weights(graph, "metropolis")


@pytest.mark.parametrize("num_peers", [1, 2, 5, 30])
def test_ring_meets_the_assumptions(num_peers: int) -> None:
    require_symmetric_doubly_stochastic(weights(sample(Ring(), num_peers, 1, 0), "uniform"))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.6]], r"row 1 of the mixing matrix sums to 1.1. Every row must sum to 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"has -0.5 in row 0, column 1. Weights must not be negative"),
        (
            [[0.5, 0.5, 0], [0.4, 0.4, 0.2], [0, 0.2, 0.8]],
            r"not symmetric: peer 0 gives peer 1's model the weight 0.5, peer 1 gives peer 0's 0.4",
        ),
        (
            [[0, 1, 0], [0, 0, 1], [1, 0, 0]],
            r"peer 0 gives peer 1's model the weight 1, peer 1 gives peer 0's 0\.",
        ),
        ([[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]], r"peer 1 is not joined to peer 0"),
        ([[0, 1], [1, 0]], r"eigenvalue -1: .* Set topology.lazy above 0"),
    ],
)
def test_broken_assumptions_are_named(matrix: list[list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_symmetric_doubly_stochastic(from_dense(matrix))


def test_an_odd_cycle_or_a_kept_model_has_no_eigenvalue_of_minus_one() -> None:
    require_symmetric_doubly_stochastic(from_dense([[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]))
    require_symmetric_doubly_stochastic(from_dense([[0.1, 0.9], [0.9, 0.1]]))


def test_a_matrix_that_changes_need_not_be_connected_in_one_round() -> None:
    pairs = from_dense([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    require_symmetric_doubly_stochastic(pairs, static=False)
    with pytest.raises(ConfigError, match="peer 2 is not joined to peer 0"):
        require_symmetric_doubly_stochastic(pairs)


def test_pulls_break_the_assumptions() -> None:
    with pytest.raises(ConfigError, match="not symmetric"):
        require_symmetric_doubly_stochastic(weights(sample(KOut(), 30, 1, 0), "uniform"), static=False)
