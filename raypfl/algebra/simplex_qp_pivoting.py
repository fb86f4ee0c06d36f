"""The exact end of the programmes: find which weights are positive, by solving for them.

Row and column i of P_i are zero but for V_i, so with `y_j = a_j / (a_i V_i)` a programme is one over the
other clients without the constraint on the sum, and without V_i:

    y >= 0,   w = P_i y - 1 >= 0,   y_j w_j = 0      (for j other than i),
    a_i = 1 / (1 + V_i sum y),   a_j = V_i y_j a_i.

Block principal pivoting (Judice and Pires, 1994; Kim and Park, 2011) solves on a support, drops what came
out negative, adds what is missing, a few times for all rows at once. A row that makes no progress changes
one client at a time, the last infeasible one (Murty, 1974), which cannot cycle.
"""

# K clients, R of them receivers, S the largest support in a chunk of c of them.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.simplex_qp_problem import Problem

CHUNK_ENTRIES = 4_000_000
"""Entries of the systems solved at once: 32 MB."""

PATIENCE = 3
"""Exchanges of many clients that a row may make without fewer of them being infeasible than ever before."""

ADD_FRACTION = 0.6
"""Clients are added that are missed by at least this part of the most missed one: all of a cluster, not all."""

ACCURACY = 1e-12
"""Largest `-w_j` of a client that is left out, apart from rounding."""


class Pivoted(NamedTuple):
    """Outcome of pivoting."""

    weights_RK: Tensor
    """Weights on the simplex; not a number in a row whose system could not be solved."""
    solves_R: Tensor
    """Linear systems solved for each row, int64."""


def pivot(problem: Problem, support_RK: Tensor, max_solves: int) -> Pivoted:
    """Optimal weights from a guess of which are positive; a row that takes too long keeps its last ones.

    Args:
        problem: the programmes.
        support_RK: Boolean; whether a receiver's own is set does not matter.
        max_solves: of one row.
    """
    receiver_R1 = problem.receiver_R[:, None]
    support_RK = support_RK.scatter(1, receiver_R1, False)
    y_RK = torch.zeros_like(support_RK, dtype=torch.float64)
    solves_R = torch.zeros_like(problem.receiver_R)
    fewest_R = solves_R + support_RK.shape[1]
    patience_R = solves_R + PATIENCE
    rows = torch.arange(len(support_RK), device=support_RK.device)
    for _ in range(max_solves):
        part, supported = problem.narrow(rows), support_RK[rows]
        found = solve_on(part, supported)
        y_RK[rows] = found
        solves_R[rows] += 1

        negative = found < 0.0
        missed = _missed(part, found).masked_fill_(supported, 0.0)
        wrong = negative | (missed > 0.0)
        count = wrong.sum(1)
        progress = count < fewest_R[rows]
        patience_R[rows] = torch.where(progress, PATIENCE, patience_R[rows] - 1)
        fewest_R[rows] = torch.minimum(count, fewest_R[rows])
        many = negative | (wrong & (missed >= ADD_FRACTION * missed.amax(1, keepdim=True)))
        support_RK[rows] ^= torch.where((patience_R[rows] < 0)[:, None], _last(wrong), many)

        # Not a number compares false: a row that cannot be solved ends here too.
        rows = rows[count > 0]
        if len(rows) == 0:
            break
    y_RK.clamp_min_(0.0)
    own_variance_R1 = problem.variance_K[receiver_R1]
    own_R1 = 1.0 / (1.0 + own_variance_R1 * y_RK.sum(1, keepdim=True))
    return Pivoted((own_variance_R1 * own_R1 * y_RK).scatter_(1, receiver_R1, own_R1), solves_R)


def _missed(problem: Problem, y_RK: Tensor) -> Tensor:
    """`-w_j` where it is more than rounding explains, else 0; 0 for the receiver itself."""
    rounding = 4.0 * torch.finfo(torch.float64).eps * problem.gram_KK.diagonal().amax()
    allowed_R1 = ACCURACY + rounding * y_RK.sum(1, keepdim=True)
    missed_RK = (1.0 - problem.costs(y_RK)).scatter_(1, problem.receiver_R[:, None], 0.0)
    return torch.where(missed_RK > allowed_R1, missed_RK, 0.0)


def _last(wrong_RK: Tensor) -> Tensor:
    """The last marked entry of every row alone."""
    position = torch.arange(1, wrong_RK.shape[1] + 1, device=wrong_RK.device)
    place_RK = wrong_RK * position
    return wrong_RK & (place_RK == place_RK.amax(1, keepdim=True))


def solve_on(problem: Problem, support_RK: Tensor) -> Tensor:
    """`y` with `P_i y = 1` on the support and 0 elsewhere, `[R, K]`, of any sign.

    Rows of about equal support are stacked and padded with rows of the identity.

    Args:
        problem: the programmes.
        support_RK: Boolean, false for the receiver itself.
    """
    y_RK = torch.zeros_like(support_RK, dtype=torch.float64)
    size_R = support_RK.sum(1)
    order_R = size_R.argsort()
    sizes = size_R[order_R].tolist()
    end = len(sizes)
    while end > 0 and sizes[end - 1] > 0:
        largest = sizes[end - 1]
        start = max(0, end - max(1, CHUNK_ENTRIES // largest**2))
        rows_c = order_R[start:end]
        member_cS = support_RK[rows_c].byte().sort(dim=1, descending=True, stable=True).indices[:, :largest]
        real_cS = support_RK[rows_c].gather(1, member_cS)
        solution_cS = _solve_systems(problem.narrow(rows_c), member_cS, real_cS)
        y_RK[rows_c[:, None].expand_as(member_cS)[real_cS], member_cS[real_cS]] = solution_cS[real_cS]
        end = start
    return y_RK


def _solve_systems(problem: Problem, member_cS: Tensor, real_cS: Tensor) -> Tensor:
    own_cK, square_c1 = problem.own_gram()
    own_cS = own_cK.gather(1, member_cS)
    system_cSS = problem.gram_KK[member_cS[:, :, None], member_cS[:, None, :]]
    system_cSS -= own_cS[:, :, None] + (own_cS - square_c1)[:, None, :]
    system_cSS *= real_cS[:, :, None] & real_cS[:, None, :]
    system_cSS.diagonal(dim1=1, dim2=2).add_(torch.where(real_cS, problem.variance_K[member_cS], 1.0))
    one_cS1 = real_cS.double()[:, :, None]
    factor_cSS, failed_c = torch.linalg.cholesky_ex(system_cSS)
    y_cS1 = torch.cholesky_solve(one_cS1, factor_cSS)
    y_cS1 += torch.cholesky_solve(one_cS1 - system_cSS @ y_cS1, factor_cSS)
    return torch.where(failed_c[:, None] == 0, y_cS1[:, :, 0], torch.nan)
