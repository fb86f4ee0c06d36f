"""Gradient clipping over rows: one client's gradient never scales another's."""

# K models, P trained columns.

from __future__ import annotations

from torch import Tensor

_AGAINST_ZERO = 1e-6
"""Added to norms, as torch does."""


def clip_by_norm(g_KP: Tensor, largest: float) -> None:
    """Scale each row down, in place, to an L2 norm of at most `largest`; shorter rows stay.

    For each row what `torch.nn.utils.clip_grad_norm_` makes of one model's gradients.
    """
    norm_K1 = g_KP.norm(dim=1, keepdim=True)
    g_KP.mul_((largest / (norm_K1 + _AGAINST_ZERO)).clamp_max(1.0))
