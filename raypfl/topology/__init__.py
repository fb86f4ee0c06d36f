"""Who hears whom (`sample`) and with which weights (`mixing`), for methods without a server."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from raypfl.rng import key, numpy_generator
from raypfl.topology.base import Topology
from raypfl.topology.conditions import require_row_stochastic, require_symmetric_doubly_stochastic
from raypfl.topology.connectivity import is_connected, is_weakly_connected
from raypfl.topology.drawn import (
    ErdosRenyi,
    KOut,
    Matching,
    Regular,
    SmallWorld,
    expected_contraction,
    pulls,
)
from raypfl.topology.edge_list import EdgeListFile
from raypfl.topology.graph import Graph, graph_of
from raypfl.topology.mixing import Mixing, weights
from raypfl.topology.shapes import Exponential, Full, OnePeerExponential, Ring, Star, Torus
from raypfl.topology.spectral import Gap, contraction, spectral_gap

__all__ = [
    "TOPOLOGIES",
    "Full",
    "Gap",
    "Graph",
    "KOut",
    "Mixing",
    "Regular",
    "Ring",
    "Topology",
    "TopologyConfig",
    "active",
    "check",
    "contraction",
    "expected_contraction",
    "graph_of",
    "is_connected",
    "is_weakly_connected",
    "mixing",
    "pulls",
    "require_row_stochastic",
    "require_symmetric_doubly_stochastic",
    "sample",
    "spectral_gap",
    "weights",
]

TopologyConfig = Annotated[
    KOut
    | Regular
    | Ring
    | Torus
    | Exponential
    | OnePeerExponential
    | Full
    | ErdosRenyi
    | SmallWorld
    | Star
    | Matching
    | EdgeListFile,
    Field(discriminator="name"),
]

TOPOLOGIES: dict[str, str] = {
    "kout": "each peer pulls from k random others, new every round; directed (UA-PDFL)",
    "regular": "random, k neighbours each, new every round; undirected",
    "ring": "the nearest `steps` peers on each side",
    "torus": "a grid with four neighbours each, edges joined",
    "exp": "peers 1, 2, 4, 8, ... places away; directed",
    "exp1": "one edge of exp a round, in turn; directed",
    "full": "everyone hears everyone",
    "er": "each pair joined with probability p (Erdos-Renyi); undirected",
    "smallworld": "a ring of k neighbours with a part p of its edges moved (Watts-Strogatz); undirected",
    "star": "peer 0 and all others",
    "matching": "random pairs, new every round",
    "file": "edges, and weights if you like, from a text file (topology.file)",
}
"""Every topology, with one line each."""


def check(config: TopologyConfig, num_peers: int, seed: int, sizes: Tensor | None = None) -> None:
    """See whether the topology can be had, before a run.

    Args:
        config: the topology.
        num_peers: N.
        seed: the run's.
        sizes: training samples of each peer [N]; without them, weights by size are not looked at.

    Raises:
        ConfigError: it is impossible over this many peers; a graph that stays the same is not connected; a
            file cannot be read or is malformed; the weights do not go with the graph.
    """
    graph = _everyone(config, num_peers, 1, seed)
    equal = torch.ones(num_peers)
    require_row_stochastic(mixing(config, graph, equal if sizes is None else sizes))


def sample(config: TopologyConfig, num_peers: int, round: int, seed: int) -> Graph:
    """Who hears whom in a round; peers that are away hear nobody and are heard by nobody.

    Args:
        config: the topology.
        num_peers: N.
        round: from 1.
        seed: the run's.

    Raises:
        ConfigError: as `check`.
    """
    graph = _everyone(config, num_peers, round, seed)
    return graph if config.p_active == 1 else graph.induced(active(config, num_peers, round, seed))


def active(config: TopologyConfig, num_peers: int, round: int, seed: int) -> Tensor:
    """Who is there in a round, bool [N]; whoever is, is also there at a higher `p_active`."""
    if config.p_active == 1:
        return torch.ones(num_peers, dtype=torch.bool)
    drawn = (numpy_generator(key(seed, "availability", round, peer)).random() for peer in range(num_peers))
    return torch.tensor([value < config.p_active for value in drawn])


def mixing(config: TopologyConfig, graph: Graph, sizes: Tensor | None = None) -> Mixing:
    """The weights that the topology gives to the edges of one of its graphs.

    Args:
        config: the topology.
        graph: from `sample`, or another over the same peers where the weights are not a file's.
        sizes: training samples of each peer [N]; needed by `samplesize`.

    Raises:
        ConfigError: see `weights`.
    """
    return config.mixing(graph, sizes)


def _everyone(config: TopologyConfig, num_peers: int, round: int, seed: int) -> Graph:
    config.check(num_peers)
    return config.draw(num_peers, round, seed)
