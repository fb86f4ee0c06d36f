"""Mixing matrices `A` by rows: row i says what peer i takes of its own model and of those it hears."""

# N peers, E entries, diagonal included.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raypfl.errors import ConfigError
from raypfl.topology.graph import Graph, graph_of

Kind = Literal["uniform", "samplesize", "metropolis"]
DirectedKind = Literal["uniform", "samplesize"]


class Mixing(NamedTuple):
    """A row-stochastic matrix in compressed rows; every row has its diagonal entry, even where it is 0."""

    num_peers: int
    offsets: Tensor
    """Where each row starts in `columns` and `values`, int64 [N + 1] on the CPU."""
    columns: Tensor
    """Ascending within a row, int64 [E]."""
    values: Tensor
    """Non-negative, float64 [E]; each row sums to one within 1e-12."""

    @property
    def rows(self) -> Tensor:
        """The row of each entry, int64 [E]."""
        return torch.repeat_interleave(torch.arange(self.num_peers), self.offsets.diff())

    def row_sums(self) -> Tensor:
        """Float64 [N]."""
        return _sums(self.num_peers, self.rows, self.values)

    def column_sums(self) -> Tensor:
        """Float64 [N]; how much of each peer's model is taken by all."""
        return _sums(self.num_peers, self.columns, self.values)

    def is_doubly_stochastic(self, tolerance: float = 1e-9) -> bool:
        """Whether columns sum to one too, so that mixing keeps the mean of all models."""
        return bool(((self.column_sums() - 1).abs() <= tolerance).all())

    def dense(self) -> Tensor:
        """Float64 [N, N], for small graphs."""
        matrix = torch.zeros(self.num_peers, self.num_peers, dtype=torch.float64)
        matrix[self.rows, self.columns] = self.values
        return matrix


def weights(graph: Graph, kind: Kind, sizes: Tensor | None = None, lazy: float = 0.0) -> Mixing:
    """Weights of one of the usual kinds.

    With d_i the number of peers that i receives from and n_i its number of training samples:

    * uniform: 1 / (1 + d_i) for each of them and for i itself.
    * samplesize: in proportion to n_j, own included.
    * metropolis: 1 / (1 + max(d_i, d_j)) on edges of an undirected graph, the rest for i itself; symmetric
      and doubly stochastic on any such graph (Metropolis-Hastings).

    A peer that hears nobody keeps its own model in all of them.

    Args:
        graph: who hears whom.
        kind: of the three above.
        sizes: training samples of each peer [N]; needed by samplesize.
        lazy: c of `c I + (1 - c) A`.

    Raises:
        ConfigError: samplesize without positive sizes, or metropolis on a directed graph.
    """
    degree = graph.degree.double()
    receivers, sources = graph.receivers, graph.sources
    if kind == "uniform":
        own = 1 / (1 + degree)
        return assemble(graph, own[receivers], own, lazy)
    if kind == "samplesize":
        size = _checked(sizes, graph.num_peers)
        total = size + _sums(graph.num_peers, receivers, size[sources])
        return assemble(graph, size[sources] / total[receivers], size / total, lazy)
    _require_symmetric(graph)
    edges = 1 / (1 + torch.maximum(degree[receivers], degree[sources]))
    return assemble(graph, edges, 1 - _sums(graph.num_peers, receivers, edges), lazy)


def assemble(graph: Graph, edges: Tensor, own: Tensor, lazy: float = 0.0) -> Mixing:
    """A matrix from the weight of each edge, in the graph's order [E], and of each peer's own model [N]."""
    everyone = torch.arange(graph.num_peers)
    rows = torch.cat((graph.receivers, everyone))
    columns = torch.cat((graph.sources, everyone))
    values = torch.cat(((1 - lazy) * edges, lazy + (1 - lazy) * own))
    order = torch.argsort(rows * graph.num_peers + columns)
    return Mixing(
        graph.num_peers, graph.offsets + torch.arange(graph.num_peers + 1), columns[order], values[order]
    )


def restrict(mixing: Mixing, graph: Graph, lazy: float = 0.0) -> Mixing:
    """The weights of those edges that are in the graph; what a peer cannot hear it takes of its own model.

    So a symmetric matrix stays symmetric and doubly stochastic, whoever is away. Every edge of the graph
    must be in the matrix.
    """
    n = graph.num_peers
    edge = graph.receivers * n + graph.sources
    edges = mixing.values[torch.searchsorted(mixing.rows * n + mixing.columns, edge)]
    diagonal = mixing.values[mixing.rows == mixing.columns]
    heard_always = _sums(n, mixing.rows, mixing.values) - diagonal
    own = diagonal + (heard_always - _sums(n, graph.receivers, edges)).clamp(min=0)
    return assemble(graph, edges, own, lazy)


def support(mixing: Mixing) -> Graph:
    """The edges with a weight above zero."""
    positive = mixing.values > 0
    return graph_of(mixing.num_peers, mixing.rows[positive], mixing.columns[positive])


def _sums(num_peers: int, index: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(num_peers, dtype=torch.float64).index_add_(0, index, values)


def _checked(sizes: Tensor | None, num_peers: int) -> Tensor:
    if sizes is None or sizes.shape != (num_peers,):
        given = "none were given" if sizes is None else f"there are {list(sizes.shape)}"
        raise ConfigError(f"topology.weights = samplesize: needs the sizes of {num_peers} peers, {given}.")
    size = sizes.double()
    if not bool((size > 0).all()):
        peer = int((~(size > 0)).nonzero()[0])
        raise ConfigError(
            f"topology.weights = samplesize: peer {peer} has {size[peer]:g} training samples. "
            "Every peer needs at least one, or use topology.weights=uniform."
        )
    return size


def _require_symmetric(graph: Graph) -> None:
    n, other = graph.num_peers, graph.transpose()
    one_way = ~torch.isin(graph.receivers * n + graph.sources, other.receivers * n + other.sources)
    if bool(one_way.any()):
        first = int(one_way.nonzero()[0])
        raise ConfigError(
            "topology.weights = metropolis: needs an undirected graph, but peer "
            f"{int(graph.receivers[first])} receives from peer {int(graph.sources[first])} and not the "
            "other way. Use topology.weights=uniform or samplesize."
        )
