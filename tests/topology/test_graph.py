"""Graphs by edges against their dense adjacency."""

import pytest
import torch

from raypfl.topology import Graph, graph_of


@pytest.fixture
def graph() -> Graph:
    """0 hears 1 and 2, 2 hears 0; 1 and 3 hear nobody."""
    return graph_of(4, torch.tensor([2, 0, 0, 3, 0]), torch.tensor([0, 2, 1, 3, 2]))


def test_rows_are_sets_of_others_in_order(graph: Graph) -> None:
    assert graph.sources.tolist() == [1, 2, 0]
    assert graph.offsets.tolist() == [0, 2, 2, 3, 3]
    assert graph.receivers.tolist() == [0, 0, 2]
    assert graph.degree.tolist() == [2, 0, 1, 0]
    assert [graph.sources_of(i).tolist() for i in range(4)] == [[1, 2], [], [0], []]
    assert graph.num_edges == 3


def test_both_ways_adds_the_opposite_edges() -> None:
    graph = graph_of(3, torch.tensor([0, 1]), torch.tensor([1, 2]), both_ways=True)
    assert graph.adjacency().int().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert graph.is_symmetric


def test_the_row_is_the_receiver(graph: Graph) -> None:
    assert graph.adjacency().int().tolist() == [[0, 1, 1, 0], [0] * 4, [1, 0, 0, 0], [0] * 4]


def test_transpose_turns_every_edge(graph: Graph) -> None:
    assert torch.equal(graph.transpose().adjacency(), graph.adjacency().T)
    assert not graph.is_symmetric


def test_equal_degrees_do_not_make_a_graph_symmetric() -> None:
    assert not graph_of(3, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])).is_symmetric


def test_induced_keeps_numbers_and_edges_between_the_active(graph: Graph) -> None:
    active = torch.tensor([True, False, True, True])
    expected = graph.adjacency() & active & active[:, None]
    assert torch.equal(graph.induced(active).adjacency(), expected)
    assert graph.induced(torch.zeros(4, dtype=torch.bool)).offsets.tolist() == [0] * 5
