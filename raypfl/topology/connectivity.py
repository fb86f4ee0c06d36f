"""Whether what one peer knows reaches the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raypfl.topology.graph import Graph

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def is_connected(graph: Graph) -> bool:
    """Whether everyone hears of everyone, over any number of steps (strongly connected)."""
    return _components(graph, "strong")[0] <= 1


def is_weakly_connected(graph: Graph) -> bool:
    """Whether the graph hangs together if the direction of its edges is forgotten."""
    return _components(graph, "weak")[0] <= 1


def pieces(graph: Graph) -> np.ndarray:
    """Which weakly connected part each peer is in, int [N], numbered from 0."""
    return _components(graph, "weak")[1]


def is_bipartite(graph: Graph) -> bool:
    """Whether an undirected graph has two sides and edges only between them.

    That is: whether, in its double cover, no peer is joined to its own copy.
    """
    from scipy.sparse import block_array
    from scipy.sparse.csgraph import connected_components

    edges = _matrix(graph)
    _, part = connected_components(block_array([[None, edges], [edges, None]]), directed=False)
    return not bool((part[: graph.num_peers] == part[graph.num_peers :]).any())


def _components(graph: Graph, connection: str) -> tuple[int, np.ndarray]:
    from scipy.sparse.csgraph import connected_components

    number, part = connected_components(_matrix(graph), directed=True, connection=connection)
    return int(number), part


def _matrix(graph: Graph) -> csr_array:
    from scipy.sparse import csr_array

    entries = np.ones(graph.num_edges, dtype=np.int8)
    shape = (graph.num_peers, graph.num_peers)
    return csr_array((entries, graph.sources.numpy(), graph.offsets.numpy()), shape=shape)
