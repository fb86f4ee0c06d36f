"""Batch normalisation whose running statistics follow every model of a stack, and the choice of a norm.

`torch.nn.BatchNorm2d` under `torch.func.vmap` silently updates a *copy* of its running statistics when they
are strided slices of a matrix with one model per row, which is how this package keeps models. The layers
here compute the same numbers, write the statistics with plain in-place operations, and so always reach the
rows. They also notice, as an autograd error, a second forward that would disturb the first one's gradient.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group"]

_GROUPS = 32


class _RowBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Forward shared by the dimensions; a subclass brings only the check of its input's rank."""

    rows_safe: ClassVar[bool] = True
    """Tells whoever binds models to rows that the running statistics reach them."""
    momentum: float
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        """Affine, with running statistics that move by the fraction `momentum` a step."""
        super().__init__(num_features, eps=eps, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [B, C, ...] by its batch in training, by the running statistics in evaluation."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        y, mean, inverse = torch.native_batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps)
        with torch.no_grad():
            n = x.numel() // x.shape[1]
            biased = inverse.detach().square().reciprocal() - self.eps
            self.running_mean.mul_(1 - self.momentum).add_(mean.detach(), alpha=self.momentum)
            self.running_var.mul_(1 - self.momentum).add_(biased * (n / max(n - 1, 1)), alpha=self.momentum)
        return y


class BatchNorm1d(_RowBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` for models that are rows: input [B, C] or [B, C, L]."""


class BatchNorm2d(_RowBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` for models that are rows: input [B, C, H, W]."""


def make_norm(kind: Norm, channels: int) -> nn.Module:
    """A normalisation of `channels` feature maps: batch statistics, or 32 groups (no buffers)."""
    return BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(_GROUPS, channels)
