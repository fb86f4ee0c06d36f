"""What topologies share: the options of all of them, and what each one answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.topology.graph import Graph
from raypfl.topology.mixing import Kind, Mixing, weights

Degree = Annotated[int, Field(ge=1, le=10_000_000)]
Probability = Annotated[float, Field(ge=0, le=1)]
Refresh = Literal["every_round", "static"]


class Topology(StrictModel, ABC):
    """Options of every topology."""

    name: str
    weights: Kind | Literal["given"] | None
    lazy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """c of `c I + (1 - c) A`: more of a peer's own model than the weights say."""
    p_active: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The probability that a peer is there in a round; drawn for each peer and round alone."""

    is_directed: ClassVar[bool] = False
    """Whether a peer may hear one that does not hear it."""

    @property
    def changes(self) -> bool:
        """Whether the graph differs from round to round, before who is away is taken out."""
        return False

    def check(self, num_peers: int) -> None:  # noqa: B027 - most have nothing to check
        """See whether there is such a graph over this many peers.

        Raises:
            ConfigError: there is none.
        """

    @abstractmethod
    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """The graph of a round with everyone there; `check` has passed.

        Raises:
            ConfigError: it is the same in all rounds and not connected.
        """

    def mixing(self, graph: Graph, sizes: Tensor | None) -> Mixing:
        """The weights over a graph of this topology, see `mixing.weights`."""
        assert self.weights is not None and self.weights != "given"
        return weights(graph, self.weights, sizes, self.lazy)
