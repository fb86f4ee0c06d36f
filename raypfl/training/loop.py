"""The loop of local training over a chunk's batches: gradient, proximal pull, hooks, step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.training.batches import Batch
from raypfl.training.config import Optimizer
from raypfl.training.optim import Moments, Pull

if TYPE_CHECKING:
    from raypfl.training.cohort import Cohort
    from raypfl.training.network import Network, Rows

Objective = Callable[..., Tensor]
Hook = Callable[..., None]
Measure = Callable[[Tensor, Batch], Tensor]


class Loop(NamedTuple):
    """The settings of one `Cohort.fit`, which documents them."""

    objective: Objective
    optimizer: Optimizer
    lr: float
    epochs: int | None
    columns: slice
    rho: float
    on_gradient: Hook | None
    after_step: Hook | None
    measure: Measure | None
    purpose: str
    fresh: bool = False
    """The optimizer has no memory yet, whatever is handed over as such."""

    def train(
        self,
        chunk: Cohort,
        w: Tensor,
        first: Tensor,
        second: Tensor,
        steps: Tensor,
        anchor: Tensor,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """Trained rows, the optimizer's memory in three tensors, mean losses and what was measured."""
        net = chunk.net
        # Everything below is written in place, on memory made here.
        w = w.clone(memory_format=torch.contiguous_format)
        if self.fresh:
            memory = self.optimizer.moments(w[:, self.columns])
        else:
            memory = Moments(first.clone(), second.clone(), steps.clone())
        buffers = w[:, net.statistics].clone()
        loss_sum, samples = w.new_zeros(len(w)), w.new_zeros(len(w))
        measured = w.new_zeros(len(w), dtype=torch.float64)
        # Then the pull is part of the gradient that is looked at, and not left to the optimizer.
        seen = self.measure is not None or self.on_gradient is not None
        at: slice | Tensor | None = None
        for batch in chunk.batches(self.epochs, self.purpose):
            if at is None or isinstance(batch.rows, Tensor) or at != batch.rows:
                at = batch.rows
                # Of a prefix views, that stay good for as long as the same clients take part.
                leaf = w[at, self.columns].detach().requires_grad_()
                own_rows, own_buffers = w[at], buffers[at]
                moved, own = leaf.detach(), Moments(*(field[at] for field in memory))
                own_sum, own_samples = loss_sum[at], samples[at]
                extras = [batch.narrow(extra) for extra in rows]
                pull = Pull(self.rho, batch.narrow(anchor)) if self.rho else None
            m = net.bind(own_rows, own_buffers, leaf=leaf, columns=self.columns)
            loss = self._losses(m, batch, extras)
            (g,) = self._gradient(net, loss, leaf)
            # What the forward kept goes before the next one begins.
            loss = loss.detach()
            with torch.no_grad():
                if pull is not None and seen:
                    pull.added(g, leaf)
                if self.measure is not None:
                    measured[at] += self.measure(g, batch)
                if self.on_gradient is not None:
                    self.on_gradient(g, batch, *extras)
                self._step(moved, g, own, None if seen else pull)
                if self.after_step is not None:
                    self.after_step(moved, batch, *extras)
                own_sum += loss * batch.sizes
                own_samples += batch.sizes
                if not isinstance(at, slice):
                    # An index tensor gathers copies; a prefix is a view, and already in place.
                    w[at, self.columns], buffers[at] = moved, m.buffers
                    loss_sum[at], samples[at] = own_sum, own_samples
                    for field, part in zip(memory, own, strict=True):
                        field[at] = part
        w[:, net.statistics] = buffers
        return w, *memory, loss_sum / samples, measured

    @phase("forward")
    def _losses(self, m: Rows, batch: Batch, extras: list[Tensor]) -> Tensor:
        return self.objective(m, batch, *extras)

    @phase("backward")
    def _gradient(self, net: Network, loss: Tensor, leaf: Tensor) -> tuple[Tensor, ...]:
        return net.slopes(loss, [leaf])

    @phase("optimizer")
    def _step(self, w: Tensor, g: Tensor, moments: Moments, pull: Pull | None) -> None:
        self.optimizer.step(w, g, moments, self.lr, pull)
