"""Topologies that are drawn: pulls from random peers, random regular, Erdos-Renyi, small world, matching.

All draws are functions of (seed, round), and of the peer where each peer draws for itself. Random regular
and small-world graphs come from networkx, whose versions may draw differently.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from raypfl.errors import ConfigError
from raypfl.rng import key, numpy_generator
from raypfl.topology.base import Degree, Probability, Refresh, Topology
from raypfl.topology.connectivity import is_connected, is_weakly_connected
from raypfl.topology.graph import Graph, graph_of
from raypfl.topology.mixing import DirectedKind, Kind

if TYPE_CHECKING:
    import networkx

_STATIC = 0
"""The round of graphs that stay the same; rounds count from 1."""
_ATTEMPTS = 100


class KOut(Topology):
    """Each peer pulls from k others that it draws for itself (UA-PDFL's `N_com`)."""

    name: Literal["kout"] = "kout"
    k: Annotated[int, Field(ge=0, le=10_000_000)] = 5
    """All others where there are fewer."""
    refresh: Refresh = "every_round"
    weights: DirectedKind = "samplesize"

    is_directed: ClassVar[bool] = True

    @property
    def changes(self) -> bool:
        """See `Topology.changes`."""
        return self.refresh == "every_round"

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        return (
            pulls(num_peers, self.k, round, seed) if self.changes else _static_pulls(num_peers, self.k, seed)
        )


class RandomUndirected(Topology):
    """An undirected graph drawn from a law; drawn again until it is connected where it stays the same."""

    refresh: Refresh
    weights: Kind = "metropolis"

    @property
    def changes(self) -> bool:
        """See `Topology.changes`."""
        return self.refresh == "every_round"

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        if self.changes:
            return self.once(num_peers, key(seed, f"topology {self.name}", round))
        return _connected(self, num_peers, seed)

    @abstractmethod
    def once(self, num_peers: int, draw: int) -> Graph:
        """The graph of the draw that `rng.key` named, connected or not."""


class Regular(RandomUndirected):
    """A random graph in which everyone has k neighbours."""

    name: Literal["regular"] = "regular"
    k: Degree = 5
    refresh: Refresh = "every_round"

    def check(self, num_peers: int) -> None:
        """See `Topology.check`."""
        _check_degree(self.k, num_peers)
        if self.k * num_peers % 2:
            raise ConfigError(
                f"topology.k = {self.k}: no graph of {num_peers} peers has {self.k} neighbours for each, "
                "because k x peers must be even. Use an even topology.k."
            )

    def once(self, num_peers: int, draw: int) -> Graph:
        """See `RandomUndirected.once`."""
        from networkx import complement, random_regular_graph

        # The pairing of stubs that draws it starts over too often for dense graphs.
        missing = num_peers - 1 - self.k
        if missing < self.k:
            return _graph(num_peers, complement(random_regular_graph(missing, num_peers, seed=draw)))
        return _graph(num_peers, random_regular_graph(self.k, num_peers, seed=draw))


class ErdosRenyi(RandomUndirected):
    """Each pair of peers is joined with probability p."""

    name: Literal["er"] = "er"
    p: Annotated[float, Field(gt=0, le=1)] = 0.2
    refresh: Refresh = "static"

    def once(self, num_peers: int, draw: int) -> Graph:
        """See `RandomUndirected.once`."""
        from networkx import fast_gnp_random_graph

        return _graph(num_peers, fast_gnp_random_graph(num_peers, self.p, seed=draw))


class SmallWorld(RandomUndirected):
    """A ring with k neighbours each, of whose edges a part p leads elsewhere (Watts and Strogatz)."""

    name: Literal["smallworld"] = "smallworld"
    k: Degree = 4
    """Even; the mean number of neighbours."""
    p: Probability = 0.1
    refresh: Refresh = "static"

    def check(self, num_peers: int) -> None:
        """See `Topology.check`."""
        _check_degree(self.k, num_peers)
        if self.k % 2:
            raise ConfigError(
                f"topology.k = {self.k}: a small world starts from a ring with k / 2 neighbours on each "
                "side. Use an even topology.k."
            )

    def once(self, num_peers: int, draw: int) -> Graph:
        """See `RandomUndirected.once`."""
        from networkx import watts_strogatz_graph

        return _graph(num_peers, watts_strogatz_graph(num_peers, self.k, self.p, seed=draw))


class Matching(Topology):
    """Everyone is paired with one other, anew in every round."""

    name: Literal["matching"] = "matching"
    weights: Kind = "metropolis"

    @property
    def changes(self) -> bool:
        """See `Topology.changes`."""
        return True

    def check(self, num_peers: int) -> None:
        """See `Topology.check`."""
        if num_peers % 2:
            raise ConfigError(
                f"topology.name = matching: {num_peers} peers cannot all be paired. Use an even number of "
                "clients, or topology.name=kout with k=1."
            )

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        order = numpy_generator(key(seed, "topology matching", round)).permutation(num_peers)
        pairs = torch.from_numpy(order).reshape(-1, 2)
        return graph_of(num_peers, pairs[:, 0], pairs[:, 1], both_ways=True)


def pulls(num_peers: int, counts: int | Tensor, round: int, seed: int) -> Graph:
    """Everyone pulls from random others: the first of `queue`, as many as each peer asks for.

    Args:
        num_peers: N.
        counts: peers to pull from, for all or for each [N]; all others where there are fewer.
        round: of the run, from 1.
        seed: the run's.
    """
    each = [counts] * num_peers if isinstance(counts, int) else counts.tolist()
    queues = [queue(num_peers, count, round, client, seed) for client, count in enumerate(each)]
    receivers = torch.repeat_interleave(torch.arange(num_peers), torch.tensor([len(q) for q in queues]))
    return graph_of(num_peers, receivers, torch.tensor(list(chain.from_iterable(queues)), dtype=torch.int64))


def queue(num_peers: int, k: int, round: int, client: int, seed: int) -> list[int]:
    """The first k (at most all) of one peer's random order of the others.

    The order depends on (seed, round, client) and the number of peers only, so the queues of different k
    are nested. It is shuffled only as far as it is needed: the cost is that of k draws.
    """
    others = num_peers - 1
    # One bounded draw a place, each with the same bounds whatever k is: a prefix of the same stream.
    places = numpy_generator(key(seed, "peers", round, client)).integers(np.arange(min(k, others)), others)
    moved: dict[int, int] = {}
    drawn = []
    for here, there in enumerate(places.tolist()):
        peer = moved.get(there, there)
        moved[there] = moved.get(here, here)
        drawn.append(peer + (peer >= client))
    return drawn


def expected_contraction(num_peers: int, k: int) -> float:
    """E ||(I - J) A x||^2 / ||x||^2 for pulls from k others with uniform weights, x orthogonal to 1."""
    others = num_peers - 1
    if k >= others:
        return 0.0
    own = (1 - k / others) / (k + 1)
    spread = k * (others - k) / ((num_peers - 2) * (k + 1) ** 2) * (1 - 1 / others**2)
    return own**2 + (1 - 1 / num_peers) * spread


@lru_cache(maxsize=16)
def _static_pulls(num_peers: int, k: int, seed: int) -> Graph:
    graph = pulls(num_peers, k, _STATIC, seed)
    # Weakly: often some peer is heard by nobody, which the description of the topology says.
    if not is_weakly_connected(graph):
        raise ConfigError(
            f"topology.k = {k}: the static graph of {num_peers} peers that each pull from {k} falls apart. "
            "Raise topology.k, use another seed, or topology.refresh=every_round."
        )
    return graph


@lru_cache(maxsize=16)
def _connected(config: RandomUndirected, num_peers: int, seed: int) -> Graph:
    for attempt in range(_ATTEMPTS):
        graph = config.once(num_peers, key(seed, f"topology {config.name} {attempt}", _STATIC))
        if is_connected(graph):
            return graph
    options = ", ".join(f"{name} = {value}" for name, value in config if name in ("k", "p"))
    raise ConfigError(
        f"topology.name = {config.name}, {options}: none of {_ATTEMPTS} draws over {num_peers} peers was "
        f"connected, and a static graph must be. Raise {options[0]}, or set topology.refresh=every_round."
    )


def _check_degree(k: int, num_peers: int) -> None:
    if k > num_peers - 1:
        raise ConfigError(
            f"topology.k = {k}: each of {num_peers} peers has only {num_peers - 1} others. "
            f"Lower topology.k to at most {num_peers - 1}, or use topology.name=full."
        )


def _graph(num_peers: int, drawn: networkx.Graph) -> Graph:
    edges = torch.tensor(list(drawn.edges), dtype=torch.int64).reshape(-1, 2)
    return graph_of(num_peers, edges[:, 0], edges[:, 1], both_ways=True)
