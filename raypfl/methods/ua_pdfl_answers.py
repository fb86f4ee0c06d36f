"""How models answer the unit input of UA-PDFL, the same constant for everybody, in evaluation mode."""

# K models, O logits, A features.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raypfl.training import Batch, Network, Rows, cross_entropy, cross_entropy_per_sample

Objective = Callable[[Rows, Batch, Tensor], Tensor]
Reduction = Literal["mean", "sum"]
Value = float | list[Any]
"""X_u in normalised space: one number everywhere, or nested lists, repeated to a sample's shape."""


class Answers(NamedTuple):
    """What peers publish beside their models; NaN where a model is not finite."""

    u: Tensor
    """Unit representation: logarithms of `softmax(h(g(X_u)))`, `[K, O]`."""
    a: Tensor
    """Auxiliary representation: `g(X_u)`, flat, `[K, A]`."""


def unit_input(net: Network, value: Value, num_models: int) -> Tensor:
    """`X_u`: one sample a model, `[K, 1, ...]`.

    Raises:
        RuntimeError: lists whose shape cannot be repeated to a sample's.
    """
    assert net.input_shape, "the network of a run knows the shape of its samples"
    x = torch.tensor(value, dtype=net.dtype, device=net.device)
    return x.expand(net.input_shape).expand(num_models, 1, *net.input_shape)


def answers(net: Network, w_KP: Tensor, value: Value) -> Answers:
    """Answers of models `[K, width]`, without gradient."""
    with torch.no_grad():
        m = net.bind(w_KP)
        z = m.features(unit_input(net, value, len(w_KP)))
        u = m.classify(z)[:, 0].double().log_softmax(1).to(w_KP.dtype)
        a = z.flatten(1)
        finite_K1 = w_KP[:, : net.statistics.stop].isfinite().all(1, keepdim=True)
        return Answers(u.where(finite_K1, torch.nan), a.where(finite_K1, torch.nan))


def answers_one_by_one(net: Network, w_NP: Tensor, value: Value) -> Answers:
    """The same; what a model answers does not depend on how many others there are, in no bit."""
    every = [answers(net, w_1P, value) for w_1P in w_NP.split(1)]
    return Answers(*(torch.cat(field) for field in zip(*every, strict=True)))


def unit_term(value: Value, mu: float, reduction: Reduction) -> Objective:
    """`F_i + mu ||g(X_u) - abar_i||^2`: an objective with the targets `[K, A]` as its further rows.

    The term is of the features alone, so it never reaches the head. The features are those of evaluation
    mode: what peers report, and no running statistic moves.
    """

    def objective(m: Rows, batch: Batch, target: Tensor) -> Tensor:
        z = m.evaluating().features(unit_input(m.net, value, len(batch.x))).flatten(1)
        return cross_entropy(m, batch) + mu * _reduced((z - target).square(), reduction)

    return objective


def batch_term(mu: float, reduction: Reduction) -> Objective:
    """`F_i + mu` times the mean of `||g(x) - abar_i||^2` over the batch, as in the released code.

    On the features of the one forward that the cross-entropy is of.
    """

    def objective(m: Rows, batch: Batch, target: Tensor) -> Tensor:
        z, logits = m.features_and_logits(batch.x)
        term = batch.mean(_reduced((z.flatten(2) - target[:, None]).square(), reduction))
        return batch.mean(cross_entropy_per_sample(logits, batch.y)) + mu * term

    return objective


def _reduced(values: Tensor, reduction: Reduction) -> Tensor:
    return values.mean(-1) if reduction == "mean" else values.sum(-1)
