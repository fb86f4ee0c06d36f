"""Who hears whom in one round, stored by edges: nothing here grows with the square of the peers."""

# N peers, E edges.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Graph(NamedTuple):
    """A directed graph without self loops and without repeated edges; an undirected one has both directions.

    Rows are receivers: row i lists the peers that i receives from. Make one with `graph_of`.
    """

    num_peers: int
    offsets: Tensor
    """Where each receiver's row starts in `sources`, int64 [N + 1] on the CPU."""
    sources: Tensor
    """The peers received from, ascending within a receiver, int64 [E] on the CPU."""

    @property
    def num_edges(self) -> int:
        """Ordered pairs; an undirected edge counts twice."""
        return len(self.sources)

    @property
    def degree(self) -> Tensor:
        """How many peers each one receives from, int64 [N]."""
        return self.offsets.diff()

    @property
    def receivers(self) -> Tensor:
        """The receiver of each edge, ascending, int64 [E]."""
        return torch.repeat_interleave(torch.arange(self.num_peers), self.degree)

    @property
    def is_symmetric(self) -> bool:
        """Whether everyone hears those who hear it."""
        other = self.transpose()
        return torch.equal(self.offsets, other.offsets) and torch.equal(self.sources, other.sources)

    def sources_of(self, peer: int) -> Tensor:
        """The peers that one peer receives from, ascending."""
        return self.sources[self.offsets[peer] : self.offsets[peer + 1]]

    def transpose(self) -> Graph:
        """The same edges the other way: row j lists the peers that receive from j."""
        return graph_of(self.num_peers, self.sources, self.receivers)

    def induced(self, active_N: Tensor) -> Graph:
        """The edges between active peers; the others keep their number and have an empty row."""
        receivers = self.receivers
        kept = active_N[receivers] & active_N[self.sources]
        return graph_of(self.num_peers, receivers[kept], self.sources[kept])

    def adjacency(self) -> Tensor:
        """Dense bool [N, N], true where the row's peer receives from the column's; for small graphs."""
        dense = torch.zeros(self.num_peers, self.num_peers, dtype=torch.bool)
        dense[self.receivers, self.sources] = True
        return dense


def graph_of(num_peers: int, receivers: Tensor, sources: Tensor, *, both_ways: bool = False) -> Graph:
    """The graph of a list of edges in any order; self loops and repeats are left out.

    Args:
        num_peers: N.
        receivers: of each edge, int64 [E].
        sources: of each edge, int64 [E].
        both_ways: add the opposite of every edge.
    """
    if both_ways:
        receivers, sources = torch.cat((receivers, sources)), torch.cat((sources, receivers))
    different = receivers != sources
    edges = torch.unique(receivers[different] * num_peers + sources[different])
    degree = torch.bincount(edges // num_peers, minlength=num_peers)
    offsets = torch.zeros(num_peers + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=offsets[1:])
    return Graph(num_peers, offsets, edges % num_peers)
