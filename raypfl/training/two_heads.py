"""Local training of models that have a second head on the same extractor, each part at its own rate."""

# K clients, k clients of one batch.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.training.cohort import Cohort
from raypfl.training.loop import Objective
from raypfl.training.network import Network
from raypfl.training.optim import SGD, Adam, AdamW, Moments


class TwoHeads(NamedTuple):
    """What local training leaves."""

    w: Tensor
    """Rows `[K, width]`."""
    second: Tensor
    """The second heads `[K, head]`, or as they were given if they are frozen."""


def fit_two_heads(
    cohort: Cohort,
    w: Tensor,
    second: Tensor,
    objective: Objective,
    *rows: Tensor,
    head_lr: float | None = None,
    second_lr: float | None = None,
    freeze_second: bool = False,
) -> TwoHeads:
    """Train all weights of `w` and, unless it is frozen, a second head; one extractor forward a batch.

    Epochs, batches, optimizer and the decay of learning rates are the configuration's. The clients' kept
    velocity, where they keep one, is that of `w`; the optimizer of a second head is fresh every round.

    Args:
        cohort: the clients.
        w: rows `[K, width]`, not modified.
        second: second heads `[K, head]`, or `[1, head]` for everyone; not modified.
        objective: `objective(m, batch, second, *rows) -> [k]`. Which part a loss moves is its business: it
            detaches what it should not reach.
        rows: extra tensors `[K, ...]` (or `[1, ...]`, shared), narrowed to the batch.
        head_lr: learning rate of the head of `w`; the optimizer's if absent.
        second_lr: learning rate of the second head; the optimizer's if absent.
        freeze_second: the second head is data: no gradient, no momentum, no weight decay.
    """
    net, training = cohort.net, cohort.training
    optimizer = training.optimizer
    decay = training.decay(cohort.round)
    lr = optimizer.lr * decay
    head_rate = lr if head_lr is None else head_lr * decay
    second_rate = lr if second_lr is None else second_lr * decay
    moments = optimizer.moments(w[:, net.weights])
    if cohort.velocity is not None:
        moments = moments._replace(first=cohort.velocity)

    def train(
        chunk: Cohort, w: Tensor, first: Tensor, squares: Tensor, steps: Tensor, second: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        # Everything below is written in place, on memory made here.
        w = w.clone(memory_format=torch.contiguous_format)
        memory = Moments(first.clone(), squares.clone(), steps.clone())
        if not freeze_second:
            second = second.expand(len(w), -1).clone(memory_format=torch.contiguous_format)
            second_memory = optimizer.moments(second)
        buffers = w[:, net.statistics].clone()
        loss_sum, samples = w.new_zeros(len(w)), w.new_zeros(len(w))
        for batch in chunk.batches():
            at = batch.rows
            leaf = w[at, net.weights].detach().requires_grad_()
            other = batch.narrow(second).detach()
            leaves = [leaf] if freeze_second else [leaf, other.requires_grad_()]
            m = net.bind(w[at], buffers[at], leaf=leaf)
            loss = objective(m, batch, other, *(batch.narrow(extra) for extra in rows))
            gradients = net.slopes(loss, leaves)
            # What the forward kept goes before the next one begins.
            loss = loss.detach()
            with torch.no_grad():
                moved, own = leaf.detach(), Moments(*(field[at] for field in memory))
                _step(optimizer, net, moved, gradients[0], own, lr, head_rate)
                _write(at, ((w[:, net.weights], moved), (buffers, m.buffers), *zip(memory, own, strict=True)))
                if not freeze_second:
                    moved, own = other.detach(), Moments(*(field[at] for field in second_memory))
                    optimizer.step(moved, gradients[1], own, second_rate)
                    _write(at, ((second, moved), *zip(second_memory, own, strict=True)))
                loss_sum[at] += loss * batch.sizes
                samples[at] += batch.sizes
        w[:, net.statistics] = buffers
        return w, *memory, loss_sum / samples, *(() if freeze_second else (second,))

    w, first, _, _, cohort.losses, *trained = cohort.run(train, w, *moments, second, *rows)
    if cohort.velocity is not None:
        cohort.velocity = first
    return TwoHeads(w, trained[0] if trained else second)


def _step(
    optimizer: SGD | Adam | AdamW,
    net: Network,
    w: Tensor,
    g: Tensor,
    own: Moments,
    lr: float,
    head_lr: float,
) -> None:
    """One step of all weights `[k, weights]`, in place; head and extractor each at its rate."""
    if lr == head_lr:
        optimizer.step(w, g, own, lr)
        return
    # A copy for the head: the step is counted once.
    for columns, rate, steps in ((net.head, head_lr, own.steps.clone()), (net.extractor, lr, own.steps)):
        part = Moments(own.first[:, columns], own.second[:, columns], steps)
        optimizer.step(w[:, columns], g[:, columns], part, rate)


def _write(at: slice | Tensor, pairs: tuple[tuple[Tensor, Tensor], ...]) -> None:
    """Put gathered copies back; where `at` is a prefix the parts are views, and already in place."""
    if not isinstance(at, slice):
        for whole, part in pairs:
            whole[at] = part
