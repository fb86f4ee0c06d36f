"""Drawn topologies: what they are functions of, their laws, and what cannot be drawn."""

from statistics import median

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.topology import (
    Graph,
    Topology,
    check,
    expected_contraction,
    is_connected,
    is_weakly_connected,
    mixing,
    pulls,
    sample,
    spectral_gap,
    weights,
)
from raypfl.topology.drawn import ErdosRenyi, KOut, Matching, Regular, SmallWorld, queue

CHANGING = [
    KOut(),
    Regular(),
    Regular(k=25),
    ErdosRenyi(refresh="every_round"),
    SmallWorld(p=0.5, refresh="every_round"),
    Matching(),
]
STATIC = [
    KOut(refresh="static"),
    Regular(refresh="static"),
    ErdosRenyi(),
    SmallWorld(p=0.5),
]


def edges(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(graph.receivers.tolist(), graph.sources.tolist(), strict=True))


@pytest.mark.parametrize("config", CHANGING, ids=lambda config: config.name)
def test_a_round_is_a_function_of_seed_and_round(config: Topology) -> None:
    first = sample(config, 30, 3, seed=0)
    sample(config, 30, 4, seed=0)
    assert edges(first) == edges(sample(config, 30, 3, seed=0))
    assert edges(first) != edges(sample(config, 30, 4, seed=0))
    assert edges(first) != edges(sample(config, 30, 3, seed=1))


@pytest.mark.parametrize("config", STATIC, ids=lambda config: config.name)
def test_a_static_graph_is_a_function_of_the_seed(config: Topology) -> None:
    first = sample(config, 30, 3, seed=0)
    assert edges(first) == edges(sample(config, 30, 4, seed=0))
    assert edges(first) != edges(sample(config, 30, 3, seed=1))


@pytest.mark.parametrize("config", CHANGING[1:] + STATIC[1:], ids=lambda config: config.name)
def test_undirected_graphs_have_both_directions(config: Topology) -> None:
    assert sample(config, 30, 1, seed=0).is_symmetric


def test_each_peer_pulls_from_k_others() -> None:
    graph = sample(KOut(k=5), 30, 1, seed=0)
    assert graph.degree.tolist() == [5] * 30
    assert (graph.receivers != graph.sources).all()


@pytest.mark.parametrize("k", [29, 30, 10_000_000])
def test_pulls_stop_at_everyone(k: int) -> None:
    assert sample(KOut(k=k), 30, 1, seed=0).degree.tolist() == [29] * 30


def test_pulls_from_nobody_and_alone() -> None:
    assert sample(KOut(k=0), 30, 1, seed=0).num_edges == 0
    assert sample(KOut(), 1, 1, seed=0).num_edges == 0


def test_queues_of_different_k_are_nested() -> None:
    whole = queue(30, 29, round=2, client=7, seed=0)
    assert sorted(whole) == [peer for peer in range(30) if peer != 7]
    for k in range(30):
        assert queue(30, k, round=2, client=7, seed=0) == whole[:k]


def test_peers_may_ask_for_different_numbers() -> None:
    counts = torch.arange(30) % 8
    graph = pulls(30, counts, round=2, seed=0)
    assert torch.equal(graph.degree, counts)
    for peer in range(30):
        assert graph.sources_of(peer).tolist() == sorted(queue(30, peer % 8, 2, peer, 0))


def test_queues_are_uniform_orders() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for round in range(2400):
        order = tuple(queue(4, 3, round, client=1, seed=0))
        seen[order] = seen.get(order, 0) + 1
    # Six orders, 400 expected of each, standard deviation 18.
    assert len(seen) == 6 and all(abs(count - 400) < 5 * 18.3 for count in seen.values())


@pytest.mark.parametrize(("num_peers", "k", "published"), [(30, 5, 0.339), (8, 3, None)])
def test_pulls_shake_the_mean_and_contract_as_the_formulas_say(
    num_peers: int, k: int, published: float | None
) -> None:
    rounds = 400
    a = torch.stack(
        [weights(pulls(num_peers, k, round, seed=0), "uniform").dense() for round in range(1, rounds + 1)]
    )
    deviation = (k * (1 - k / (num_peers - 1))) ** 0.5 / (k + 1)
    assert published is None or deviation == pytest.approx(published, abs=5e-4)
    assert float((a.sum(1) - 1).square().mean().sqrt()) == pytest.approx(deviation, rel=0.03)
    x = torch.arange(num_peers, dtype=torch.float64)
    x -= x.mean()
    after = a @ x
    left = (after - after.mean(1, keepdim=True)).square().sum(1) / x.square().sum()
    assert float(left.mean()) == pytest.approx(expected_contraction(num_peers, k), rel=0.05)


def test_contraction_formula_at_the_published_setting() -> None:
    assert expected_contraction(30, 5) == pytest.approx(0.134, abs=5e-4)
    assert expected_contraction(30, 29) == expected_contraction(2, 1) == 0
    assert expected_contraction(30, 0) == 1


@pytest.mark.parametrize(("k", "num_peers"), [(1, 2), (5, 30), (4, 5), (3, 4), (28, 30), (25, 30), (29, 30)])
def test_regular_graphs_are_regular_with_equal_weights(k: int, num_peers: int) -> None:
    graph = sample(Regular(k=k), num_peers, 1, seed=0)
    assert graph.degree.tolist() == [k] * num_peers
    a, uniform = mixing(Regular(k=k), graph), weights(graph, "uniform")
    torch.testing.assert_close(a.values, uniform.values, rtol=0, atol=1e-15)


def median_gap(config: Topology, seeds: int) -> float:
    return median(spectral_gap(mixing(config, sample(config, 30, 1, seed))).value for seed in range(seeds))


def test_median_gap_of_regular_graphs() -> None:
    assert median_gap(Regular(), 80) == pytest.approx(0.26, abs=0.015)


def test_median_gap_of_connected_erdos_renyi_graphs() -> None:
    assert median_gap(ErdosRenyi(p=0.2), 80) == pytest.approx(0.16, abs=0.025)


def test_erdos_renyi_has_the_expected_edges() -> None:
    config = ErdosRenyi(p=0.2, refresh="every_round")
    drawn = [sample(config, 30, round, seed=0).num_edges / 2 for round in range(1, 101)]
    # 435 pairs, 87 expected a draw, standard deviation 8.3.
    assert sum(drawn) / 100 == pytest.approx(87, abs=4 * 0.83)


def test_small_world_without_moved_edges_is_the_ring() -> None:
    graph = sample(SmallWorld(k=4, p=0), 30, 1, seed=0)
    assert graph.sources_of(0).tolist() == [1, 2, 28, 29]
    moved = sample(SmallWorld(k=4, p=0.5), 30, 1, seed=0)
    assert moved.num_edges == graph.num_edges and edges(moved) != edges(graph)


def test_matching_pairs_everyone() -> None:
    graph = sample(Matching(), 30, 1, seed=0)
    assert graph.degree.tolist() == [1] * 30 and graph.is_symmetric
    assert mixing(Matching(), graph).values.tolist() == [0.5] * 60


@pytest.mark.parametrize("seed", range(20))
def test_a_static_graph_is_drawn_until_it_is_connected(seed: int) -> None:
    config = ErdosRenyi(p=0.09)
    assert is_connected(sample(config, 30, 1, seed))


def test_some_of_those_draws_were_not_connected() -> None:
    config = ErdosRenyi(p=0.09, refresh="every_round")
    assert not all(is_connected(sample(config, 30, round, seed=0)) for round in range(1, 21))


def test_a_static_pull_graph_may_have_peers_that_nobody_hears() -> None:
    graphs = [sample(KOut(k=2, refresh="static"), 30, 1, seed) for seed in range(10)]
    assert all(map(is_weakly_connected, graphs)) and not all(map(is_connected, graphs))


@pytest.mark.parametrize(
    ("config", "num_peers", "message"),
    [
        (Regular(k=5), 31, r"topology.k = 5: no graph of 31 peers has 5 neighbours .* must be even"),
        (Regular(k=30), 30, r"topology.k = 30: each of 30 peers has only 29 others. .* at most 29"),
        (SmallWorld(k=30), 30, r"topology.k = 30: each of 30 peers has only 29 others"),
        (SmallWorld(k=3), 30, r"topology.k = 3: .* Use an even topology.k"),
        (Matching(), 31, r"matching: 31 peers cannot all be paired"),
        (ErdosRenyi(p=0.001), 30, r"er, p = 0.001: none of 100 draws over 30 peers was connected"),
        (Regular(k=1, refresh="static"), 30, r"regular, k = 1: none of 100 draws over 30 peers"),
        (KOut(k=1, refresh="static"), 200, r"topology.k = 1: the static graph of 200 peers .* falls apart"),
    ],
)
def test_impossible_draws_are_refused(config: Topology, num_peers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config, num_peers, seed=0)


@pytest.mark.parametrize(
    "config", [KOut(), Regular(), Matching(), SmallWorld()], ids=lambda config: config.name
)
def test_ten_thousand_peers_are_stored_by_their_edges(config: Topology) -> None:
    graph = sample(config, 10_000, 1, seed=0)
    a = mixing(config, graph, torch.ones(10_000))
    assert graph.num_edges <= 50_000
    assert len(graph.offsets) == 10_001
    stored = [tensor.untyped_storage().nbytes() for tensor in (*graph[1:], *a[1:])]
    assert max(stored) <= 8 * 60_000
    assert float((a.row_sums() - 1).abs().max()) <= 1e-12
