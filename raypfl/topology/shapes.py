"""Topologies that nothing is drawn for: ring, torus, exponential graphs, complete graph, star."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from raypfl.errors import ConfigError
from raypfl.topology.base import Degree, Topology
from raypfl.topology.graph import Graph, graph_of
from raypfl.topology.mixing import DirectedKind, Kind


class Ring(Topology):
    """Each peer and those up to `steps` places to its left and right."""

    name: Literal["ring"] = "ring"
    steps: Degree = 1
    weights: Kind = "uniform"

    def check(self, num_peers: int) -> None:
        """See `Topology.check`; two peers still make a ring of one step, with one neighbour each."""
        if self.steps > 1 and 2 * self.steps >= num_peers:
            raise ConfigError(
                f"topology.steps = {self.steps}: a ring with {2 * self.steps} neighbours needs more than "
                f"{2 * self.steps} peers, there are {num_peers}. Lower topology.steps, or use name=full."
            )

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        return _circulant(num_peers, range(1, self.steps + 1), both_ways=True)


class Torus(Topology):
    """A grid whose edges meet: peer `row * columns + column` has four neighbours."""

    name: Literal["torus"] = "torus"
    rows: Annotated[int, Field(ge=3)] | None = None
    """Left out: what `columns` leaves, or the most square grid."""
    columns: Annotated[int, Field(ge=3)] | None = None
    weights: Kind = "uniform"

    def shape(self, num_peers: int) -> tuple[int, int]:
        """Rows and columns; `ConfigError` where no grid of at least 3 x 3 has this many peers."""
        rows, columns = self.rows, self.columns
        if rows is None and columns is None:
            rows = next((r for r in range(math.isqrt(num_peers), 2, -1) if num_peers % r == 0), None)
            if rows is None:
                raise ConfigError(
                    f"topology.name = torus: {num_peers} peers do not make a grid of at least 3 x 3. "
                    "Use another number of clients, or another topology."
                )
        if rows is None:
            assert columns is not None
            rows = num_peers // columns
        elif columns is None:
            columns = num_peers // rows
        if rows * columns != num_peers or min(rows, columns) < 3:
            asked = [
                f"topology.{key} = {getattr(self, key)}" for key in ("rows", "columns") if getattr(self, key)
            ]
            raise ConfigError(
                f"{', '.join(asked)}: a torus needs rows x columns = {num_peers} peers and at least 3 of "
                "each. Leave both out for the most square grid."
            )
        return rows, columns

    def check(self, num_peers: int) -> None:
        """See `Topology.check`."""
        self.shape(num_peers)

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        rows, columns = self.shape(num_peers)
        grid = torch.arange(num_peers).reshape(rows, columns)
        below, right = grid.roll(-1, 0), grid.roll(-1, 1)
        there = torch.cat((below.reshape(-1), right.reshape(-1)))
        return graph_of(num_peers, torch.arange(num_peers).repeat(2), there, both_ways=True)


class Exponential(Topology):
    """The static exponential graph: peer i receives from i - 1, i - 2, i - 4, ... (modulo all peers)."""

    name: Literal["exp"] = "exp"
    weights: DirectedKind = "uniform"

    is_directed: ClassVar[bool] = True

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        return _circulant(num_peers, [2**s for s in range(exponents(num_peers))])


class OnePeerExponential(Topology):
    """One edge of the exponential graph a round, in turn.

    The product of log2(N) rounds in a row is exactly the mean where N is a power of two.
    """

    name: Literal["exp1"] = "exp1"
    weights: DirectedKind = "uniform"

    is_directed: ClassVar[bool] = True

    @property
    def changes(self) -> bool:
        """See `Topology.changes`."""
        return True

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        turns = exponents(num_peers)
        return _circulant(num_peers, [2 ** (round % turns)] if turns else [])


class Full(Topology):
    """Everyone hears everyone."""

    name: Literal["full"] = "full"
    weights: Kind = "uniform"

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        everyone = torch.arange(num_peers)
        return graph_of(num_peers, everyone.repeat_interleave(num_peers), everyone.repeat(num_peers))


class Star(Topology):
    """Peer 0 and everyone else, as if it were a server."""

    name: Literal["star"] = "star"
    weights: Kind = "metropolis"

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        others = torch.arange(1, num_peers)
        return graph_of(num_peers, torch.zeros_like(others), others, both_ways=True)


def exponents(num_peers: int) -> int:
    """Edges of a peer in the exponential graph, ceil(log2 N), in integers."""
    return (num_peers - 1).bit_length()


def _circulant(num_peers: int, offsets: Sequence[int], *, both_ways: bool = False) -> Graph:
    """Peer i receives from i - offset for each offset."""
    receivers = torch.arange(num_peers).repeat(len(offsets))
    steps = torch.tensor(offsets, dtype=torch.int64).repeat_interleave(num_peers)
    return graph_of(num_peers, receivers, (receivers - steps) % num_peers, both_ways=both_ways)
