"""What to know about a topology before a run: degrees, connectivity, weights, how fast it mixes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from raypfl.topology import TopologyConfig, active, check, mixing, sample
from raypfl.topology.connectivity import is_connected, is_weakly_connected
from raypfl.topology.drawn import KOut, expected_contraction
from raypfl.topology.graph import Graph, graph_of
from raypfl.topology.mixing import Mixing
from raypfl.topology.shapes import OnePeerExponential, exponents
from raypfl.topology.spectral import contraction, spectral_gap

_ROUNDS = 5
"""How many rounds of a topology that changes are looked at, at least."""


def describe(config: TopologyConfig, num_peers: int, sizes: Tensor | None, seed: int) -> list[str]:
    """Lines for a person; the first rounds of this very run are looked at where rounds differ.

    Args:
        config: the topology.
        num_peers: N.
        sizes: training samples of each peer [N]; None where they are not known, and taken as equal.
        seed: the run's.

    Raises:
        ConfigError: see `topology.check`.
    """
    check(config, num_peers, seed, sizes)
    same = not config.changes and config.p_active == 1
    rounds = range(1, 2 if same else 1 + _window(config, num_peers))
    graphs = [sample(config, num_peers, round, seed) for round in rounds]
    known = torch.ones(num_peers) if sizes is None else sizes
    matrices = [mixing(config, graph, known) for graph in graphs]
    lines = [
        _degrees(graphs),
        _connected(graphs, config.is_directed or not graphs[0].is_symmetric),
        _weights(config, matrices, sizes is None),
        *_gaps(matrices),
    ]
    if isinstance(config, KOut) and config.changes and config.p_active == 1 and config.lazy == 0:
        left = expected_contraction(num_peers, config.k)
        lines.append(f"squared disagreement left by a round, expected with uniform weights: {left:.3g}")
    if config.p_active < 1:
        present = [int(active(config, num_peers, round, seed).sum()) for round in rounds]
        lines.append(f"peers there in a round: {_range(present)} (probability {config.p_active:g} each)")
    return lines


def _window(config: TopologyConfig, num_peers: int) -> int:
    """Rounds to look at; whole turns where rounds take turns."""
    turn = max(exponents(num_peers), 1) if isinstance(config, OnePeerExponential) else 1
    return math.ceil(_ROUNDS / turn) * turn


def _degrees(graphs: list[Graph]) -> str:
    return f"in-degree: {_range(torch.cat([graph.degree for graph in graphs]).tolist())}"


def _connected(graphs: list[Graph], directed: bool) -> str:
    kind = "directed" if directed else "undirected"
    if len(graphs) == 1:
        return f"graph: {kind}, the same every round, {_reach(graphs[0])}"
    whole = sum(map(is_connected, graphs))
    union = graph_of(
        graphs[0].num_peers, torch.cat([g.receivers for g in graphs]), torch.cat([g.sources for g in graphs])
    )
    return (
        f"graph: {kind}, differs from round to round; {whole} of {len(graphs)} rounds connected, "
        f"all of them together {_reach(union)}"
    )


def _reach(graph: Graph) -> str:
    if is_connected(graph):
        return "connected"
    return "connected, but not in both directions" if is_weakly_connected(graph) else "NOT connected"


def _weights(config: TopologyConfig, matrices: list[Mixing], assumed: bool) -> str:
    kind = f"{config.weights or 'the file, or by its kind'}{f', lazy {config.lazy:g}' if config.lazy else ''}"
    if config.weights == "samplesize" and assumed:
        kind += " (sizes taken as equal here)"
    if all(matrix.is_doubly_stochastic() for matrix in matrices):
        return f"weights: {kind}; doubly stochastic"
    sums = torch.cat([matrix.column_sums() for matrix in matrices])
    return (
        f"weights: {kind}; not doubly stochastic (columns sum to {sums.min():.3g} to {sums.max():.3g}), so "
        "the mean over peers moves"
    )


def _gaps(matrices: list[Mixing]) -> list[str]:
    gaps = [spectral_gap(matrix) for matrix in matrices]
    bound = all(gap.doubly_stochastic for gap in gaps)
    how = "1 - ||A - J||_2" if bound else "1 - modulus of the second eigenvalue, since not doubly stochastic"
    if len(gaps) == 1:
        return [f"spectral gap: {_number(gaps[0].value)} ({how})"]
    lines = [f"spectral gap: {_number(median(g.value for g in gaps))} (median of {len(gaps)} rounds; {how})"]
    if bound:
        left = contraction(matrices)
        lines.append(f"disagreement left by {len(gaps)} rounds: at most {_number(left)} of what there was")
    return lines


def _number(value: float) -> str:
    if math.isnan(value):
        return "not found (no convergence)"
    return f"{value:.3g}" if abs(value) > 1e-9 else "0"


def _range(values: Iterable[int]) -> str:
    values = list(values)
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}, mean {sum(values) / len(values):.4g}"
