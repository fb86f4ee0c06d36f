"""Two models of a client that learn from its labels and from each other, on the same batches."""

# k clients, P parameters, b running statistics, B samples a client, C classes.

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from raypfl.training import (
    Batch,
    Network,
    cross_entropy_per_sample,
    divergence_of_logs,
    log_probabilities,
)


class Side(NamedTuple):
    """One of the two models of some clients."""

    net: Network
    rows: Tensor
    """`[k, width]` or wider, as they began; what is not in the other fields stays as it is here."""
    w: Tensor
    """Parameters `[k, P]`."""
    statistics: Tensor
    """Running statistics `[k, b]`, written by forwards."""

    @classmethod
    def of(cls, net: Network, rows: Tensor) -> Side:
        """A side that may be written."""
        return cls(net, rows, rows[:, net.weights].clone(), rows[:, net.statistics].clone())

    def at(self, rows: slice | Tensor) -> Side:
        """The side of some of the clients."""
        return Side(self.net, *(field[rows] for field in self[1:]))

    def put(self, rows: slice | Tensor, w: Tensor, statistics: Tensor) -> None:
        """Write back what some of the clients have become."""
        self.w[rows], self.statistics[rows] = w, statistics

    def rows_of(self, w: Tensor) -> Tensor:
        """Models as wide as they began, with parameters `[k, P]` and the statistics of this side."""
        rows = self.rows.clone()
        rows[:, self.net.weights], rows[:, self.net.statistics] = w, self.statistics
        return rows


class Point:
    """Models of one side, somewhere on their way through a batch."""

    def __init__(self, side: Side, w: Tensor, batch: Batch) -> None:
        self.side, self.w, self.batch = side, w.detach().requires_grad_(), batch

    @cached_property
    def logits(self) -> Tensor:
        """`[k, B, C]`; computed once, when they are first asked for."""
        side = self.side
        return side.net.bind(side.rows, side.statistics, leaf=self.w)(self.batch.x)

    @cached_property
    def log_p(self) -> Tensor:
        """Logarithms of the probabilities of all classes, `[k, C, B]`."""
        return log_probabilities(self.logits)

    def slope(self, peer: Point, labels: float = 1.0, teaching: float = 1.0) -> tuple[Tensor, Tensor]:
        """Gradient `[k, P]` and value `[k]` of `labels CE(self) + teaching KL(peer || self)`, peer fixed."""
        taught = divergence_of_logs(peer.log_p, self.log_p)
        told = cross_entropy_per_sample(self.logits, self.batch.y)
        loss = self.batch.mean(labels * told + teaching * taught)
        # Kept, since a peer may be asked for its own slope again.
        (slope,) = self.side.net.slopes(loss, [self.w], keep=True)
        return slope, loss.detach()
