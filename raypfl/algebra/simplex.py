"""Projection onto the probability simplex, exact and for many rows at once."""

# R rows, K entries of a row.

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.algebra.phases import phase


@phase("qp")
def project_onto_simplex(point_RK: Tensor, metric_RK: Tensor | None = None) -> Tensor:
    """Nearest point of the simplex to every row: `argmin sum_j m_j (x_j - v_j)^2`, `x >= 0`, `sum x = 1`.

    The solution is `x_j = max(v_j - tau / m_j, 0)`. Sorting the break points `m_j v_j` gives `tau` without
    iterating (Held, Wolfe and Crowder, 1974, for equal `m`).

    Args:
        point_RK: finite rows `[R, K]`, `K >= 1`.
        metric_RK: positive weights of the squared distance, `[R, K]` or one that expands to it; all equal
            where none is given.
    """
    metric_RK = torch.ones_like(point_RK) if metric_RK is None else metric_RK.expand_as(point_RK)
    breaks_RK = metric_RK * point_RK
    # A shift of all break points moves tau alone; without it a far point loses its digits to the shift.
    breaks_RK = breaks_RK - breaks_RK.amax(1, keepdim=True)
    sorted_RK, order_RK = breaks_RK.sort(1, descending=True)
    share_RK = metric_RK.reciprocal().gather(1, order_RK)
    tau_RK = ((sorted_RK * share_RK).cumsum(1) - 1.0) / share_RK.cumsum(1)
    last_R1 = (sorted_RK > tau_RK).sum(1, keepdim=True).clamp_min(1) - 1
    return ((breaks_RK - tau_RK.gather(1, last_R1)) / metric_RK).clamp_min_(0.0)
