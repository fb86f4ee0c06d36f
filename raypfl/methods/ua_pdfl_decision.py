"""What a peer of UA-PDFL decides by the answers that it hears: whose head it takes, or whose model."""

# N peers, O outcomes, E edges.

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raypfl.algebra import jeffreys, jensen_shannon
from raypfl.rng import key, numpy_generator
from raypfl.topology import Graph, graph_of

Divergence = Literal["js", "jeffreys"]
NOBODY = -1
"""The pick of a peer that keeps its model."""


class Rule(NamedTuple):
    """When peers are close: thresholds as in Algorithm 2, which has `<=` for dropout and `<` for heads."""

    tau: float
    divergence: Divergence
    drop_strict: bool
    heads_strict: bool
    may_drop: bool


class Decision(NamedTuple):
    """Of all peers, each from what it hears and nothing else."""

    graph: Graph
    """Who hears whom, without those whose answers are not finite: Q_i."""
    divergences: Tensor
    """`D_ij` of each edge of the graph, float64 [E]."""
    close: Tensor
    """Whether the head of the edge's sender is shared: B_i, bool [E]."""
    pick: Tensor
    """Whose whole model each peer takes, int64 [N]; NOBODY where it drops nothing."""

    @property
    def heads(self) -> Graph:
        """B_i as a graph."""
        graph = self.graph
        return graph_of(graph.num_peers, graph.receivers[self.close], graph.sources[self.close])

    @property
    def num_heads(self) -> Tensor:
        """`|B_i|` of each peer, int64 [N]."""
        return _count(self.graph, self.close)


def decide(
    log_p_NO: Tensor, finite_N: Tensor, graph: Graph, rule: Rule, draw: Callable[[int, Tensor], int]
) -> Decision:
    """Compare every peer's answer with those it hears.

    Args:
        log_p_NO: logarithms of the answers, float64 on the CPU.
        finite_N: which peers have finite answers and models. The others are missing: they are neither heard
            nor hear, and stay broken.
        graph: who hears whom.
        rule: thresholds.
        draw: `draw(peer, candidates)` is one of the candidates; called for the peers that drop their model.
    """
    graph = graph.induced(finite_N)
    distance = jensen_shannon if rule.divergence == "js" else jeffreys
    divergences_E = distance(log_p_NO, graph.receivers, graph.sources)
    # Compared this way round, never negated: a divergence that is not a number is close to nothing.
    close_E = divergences_E < rule.tau if rule.heads_strict else divergences_E <= rule.tau
    within_E = divergences_E < rule.tau if rule.drop_strict else divergences_E <= rule.tau
    pick = torch.full((graph.num_peers,), NOBODY)
    if rule.may_drop:
        # Of an empty set "all are close" must not count.
        drops_N = (graph.degree > 0) & (_count(graph, within_E) == graph.degree)
        for peer in drops_N.nonzero()[:, 0].tolist():
            pick[peer] = draw(peer, graph.sources_of(peer))
    return Decision(graph, divergences_E, close_E, pick)


def draw_peer(seed: int, round: int, peer: int, candidates: Tensor) -> int:
    """One of the candidates, uniformly: j*, a function of seed, round and peer."""
    generator = numpy_generator(key(seed, "dropout", round, peer))
    return int(candidates[int(generator.integers(len(candidates)))])


def _count(graph: Graph, chosen_E: Tensor) -> Tensor:
    counts = torch.zeros(graph.num_peers, dtype=torch.int64)
    return counts.index_add_(0, graph.receivers, chosen_E.long())
