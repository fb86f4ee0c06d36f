"""Optimizers over rows: one step moves K models, each by its own gradient, in place.

Moments are rows with one step count a row, so a method that keeps them over rounds keeps them as state,
and a row that pauses continues where it stopped.
"""

# K models, P trained columns.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raypfl.config import StrictModel


class Moments(NamedTuple):
    """What an optimizer remembers. Fields that an optimizer does not use have no columns."""

    first: Tensor
    """Momentum (SGD) or the mean of gradients (Adam), [K, P]."""
    second: Tensor
    """Mean of squared gradients (Adam), [K, P]."""
    steps: Tensor
    """Steps taken by each row, float32 [K]."""


def _moments(w_KP: Tensor, first: bool, second: bool) -> Moments:
    empty = w_KP.new_zeros(len(w_KP), 0)
    # Not zeros_like: rows may be a column slice, moments are contiguous.
    zeros = w_KP.new_zeros
    count = torch.zeros(len(w_KP), dtype=torch.float32, device=w_KP.device)
    return Moments(zeros(w_KP.shape) if first else empty, zeros(w_KP.shape) if second else empty, count)


class Pull(NamedTuple):
    """Adds `rho / 2 ||w - anchor||^2` to the loss, by its gradient `rho (w - anchor)`."""

    rho: float
    anchor: Tensor
    """`[K, P]`, or `[1, P]` for all."""

    def added(self, g_KP: Tensor, w_KP: Tensor) -> Tensor:
        """The gradient with the pull's, in place."""
        return g_KP.add_(w_KP, alpha=self.rho).sub_(self.anchor, alpha=self.rho)


class SGD(StrictModel):
    """Stochastic gradient descent as `torch.optim.SGD` defines it (no dampening)."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.01, gt=0.0, description="learning rate")
    momentum: float = Field(0.0, ge=0.0, lt=1.0)
    weight_decay: float = Field(0.0, ge=0.0)
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SGD:
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def moments(self, w_KP: Tensor) -> Moments:
        """Moments of models that have not moved yet."""
        return _moments(w_KP, self.momentum > 0.0, False)

    def step(self, w_KP: Tensor, g_KP: Tensor, moments: Moments, lr: float, pull: Pull | None = None) -> None:
        """Move `w_KP` against `g_KP` and the pull, in place; `g_KP` is overwritten."""
        if pull is not None:
            pull.added(g_KP, w_KP)
        if self.weight_decay:
            g_KP.add_(w_KP, alpha=self.weight_decay)
        if self.momentum:
            moments.first.mul_(self.momentum).add_(g_KP)
            g_KP = g_KP.add_(moments.first, alpha=self.momentum) if self.nesterov else moments.first
        w_KP.sub_(g_KP, alpha=lr)
        moments.steps.add_(1.0)


class Adam(StrictModel):
    """Adam as `torch.optim.Adam` defines it."""

    name: Literal["adam"] = "adam"
    lr: float = Field(1e-3, gt=0.0, description="learning rate")
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0, description="added to the gradient")

    def moments(self, w_KP: Tensor) -> Moments:
        """Moments of models that have not moved yet."""
        return _moments(w_KP, True, True)

    def step(self, w_KP: Tensor, g_KP: Tensor, moments: Moments, lr: float, pull: Pull | None = None) -> None:
        """Move `w_KP` against `g_KP` and the pull, in place; `g_KP` is overwritten."""
        weight_decay = self.weight_decay
        if pull is not None:
            # rho w is a decay of weights, which costs the kernel nothing: one pass over memory less.
            g_KP.sub_(pull.anchor, alpha=pull.rho)
            weight_decay += pull.rho
        _fused(torch._fused_adam_, self, w_KP, g_KP, moments, lr, weight_decay)


class AdamW(StrictModel):
    """Adam with decoupled weight decay as `torch.optim.AdamW` defines it."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0.0, description="learning rate")
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(1e-2, ge=0.0, description="shrinks the weights directly")

    def moments(self, w_KP: Tensor) -> Moments:
        """Moments of models that have not moved yet."""
        return _moments(w_KP, True, True)

    def step(self, w_KP: Tensor, g_KP: Tensor, moments: Moments, lr: float, pull: Pull | None = None) -> None:
        """Move `w_KP` against `g_KP` and the pull, in place; `g_KP` is overwritten."""
        if pull is not None:
            pull.added(g_KP, w_KP)
        _fused(torch._fused_adamw_, self, w_KP, g_KP, moments, lr, self.weight_decay)


def _fused(  # type: ignore[no-untyped-def]
    kernel,
    config: Adam | AdamW,
    w_KP: Tensor,
    g_KP: Tensor,
    moments: Moments,
    lr: float,
    weight_decay: float,
) -> None:
    """One pass over memory a row, with torch's own kernel (the one behind `fused=True`).

    The kernel is given each row as a tensor of its own. A row of a column slice is contiguous; the slice
    itself is not, and the kernel would silently write into the columns beside it.
    """
    count = moments.steps.add_(1.0)
    kernel(
        list(w_KP.unbind()),
        list(g_KP.unbind()),
        list(moments.first.unbind()),
        list(moments.second.unbind()),
        [],
        list(count.unbind()),
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )
