"""The exact end of the programmes: find which weights are positive, by solving for them.

Row and column i of P_i are zero but for V_i, so with `y_j = a_j / (a_i V_i)` a programme is one over the
other clients without the constraint on the sum, and without V_i:

    y >= 0,   w = P_i y - 1 >= 0,   y_j w_j = 0      (for j other than i),
    a_i = 1 / (1 + V_i sum y),   a_j = V_i y_j a_i.

Two active-set methods solve it. Block principal pivoting (Judice and Pires, 1994; Kim and Park, 2011) drops
all that came out negative and adds what is missing: a few systems for nearly every row, but it can cycle.
Rows that do not settle change one client at a time with the step cut short at the boundary (Lawson and
Hanson, 1974): the objective falls, so no support comes twice.
"""

# K clients, R of them receivers, S the largest support in a chunk of c of them.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.simplex_qp_problem import Problem

CHUNK_ENTRIES = 4_000_000
"""Entries of the systems solved at once: 32 MB."""

MAX_EXCHANGES = 15
"""Systems a row may take with many clients exchanged at once; 1 to 9 are the rule."""

ADD_FRACTION = 0.6
"""Clients are added that are missed by this part of the most missed one or more: a cluster, not everyone."""

ACCURACY = 1e-12
"""Largest `-w_j` of a client that is left out, apart from rounding."""


class Solved(NamedTuple):
    """Outcome of an active-set method."""

    y_RK: Tensor
    """Not negative; 0 for the receiver itself; not a number in a row whose system cannot be solved."""
    open_R: Tensor
    """Rows that did not settle."""
    solves_R: Tensor
    """Linear systems solved for each row, int64."""


def solve_exactly(problem: Problem, weights_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Optimal weights `[R, K]`, from feasible ones, and the linear systems solved for each row.

    A row whose system is numerically singular holds what is not a number.
    """
    guess_RK = _unscaled(problem, weights_RK)
    y_RK, open_R, solves_R = exchange(problem, guess_RK > 0.0)
    if bool(open_R.any()):
        slow = descend(problem.narrow(open_R), guess_RK[open_R])
        y_RK[open_R] = slow.y_RK
        solves_R[open_R] += slow.solves_R
    receiver_R1 = problem.receiver_R[:, None]
    own_variance_R1 = problem.variance_K[receiver_R1]
    own_R1 = 1.0 / (1.0 + own_variance_R1 * y_RK.sum(1, keepdim=True))
    return (own_variance_R1 * own_R1 * y_RK).scatter_(1, receiver_R1, own_R1), solves_R


def exchange(problem: Problem, support_RK: Tensor) -> Solved:
    """Block principal pivoting from a guess of the support (false for the receiver itself)."""
    support_RK = support_RK.clone()
    y_RK = torch.zeros_like(support_RK, dtype=torch.float64)
    solves_R = torch.zeros_like(problem.receiver_R)
    rows = torch.arange(len(support_RK), device=support_RK.device)
    for _ in range(MAX_EXCHANGES):
        part = problem.narrow(rows)
        found_RK = solve_on(part, support_RK[rows])
        missed_RK = _missed(part, found_RK).masked_fill_(support_RK[rows], 0.0)
        y_RK[rows] = found_RK
        solves_R[rows] += 1
        worst_R1 = missed_RK.amax(1, keepdim=True)
        change_RK = (found_RK < 0.0) | ((missed_RK > 0.0) & (missed_RK >= ADD_FRACTION * worst_R1))
        support_RK[rows] ^= change_RK
        # Not a number compares false: a row that cannot be solved leaves too.
        rows = rows[change_RK.any(1)]
        if len(rows) == 0:
            break
    return Solved(y_RK.clamp_min_(0.0), _marked(rows, solves_R), solves_R)


def descend(problem: Problem, start_RK: Tensor) -> Solved:
    """The method of Lawson and Hanson, from a feasible `y` (0 for the receiver itself)."""
    y_RK = start_RK.clone()
    support_RK = y_RK > 0.0
    solves_R = torch.zeros_like(problem.receiver_R)
    rows = torch.arange(len(y_RK), device=y_RK.device)
    for _ in range(10 + 3 * y_RK.shape[1]):
        part, before_RK, active_RK = problem.narrow(rows), y_RK[rows], support_RK[rows]
        found_RK = solve_on(part, active_RK)
        solves_R[rows] += 1
        negative_RK = found_RK < 0.0
        stopped_R1 = negative_RK.any(1, keepdim=True)
        reach_RK = torch.where(negative_RK, before_RK / (before_RK - found_RK), torch.inf)
        step_R1 = reach_RK.amin(1, keepdim=True).clamp_max(1.0)
        leave_RK = negative_RK & (reach_RK == step_R1)
        moved_RK = torch.where(stopped_R1, before_RK + step_R1 * (found_RK - before_RK), found_RK)
        y_RK[rows] = moved_RK.masked_fill(leave_RK, 0.0).clamp_min_(0.0)

        missed_RK = _missed(part, found_RK).masked_fill_(active_RK | stopped_R1, 0.0)
        worst_R1 = missed_RK.amax(1, keepdim=True)
        enter_RK = (missed_RK > 0.0) & (missed_RK == worst_R1)
        change_RK = leave_RK | enter_RK
        support_RK[rows] ^= change_RK
        rows = rows[change_RK.any(1)]
        if len(rows) == 0:
            break
    return Solved(y_RK, _marked(rows, solves_R), solves_R)


def _unscaled(problem: Problem, weights_RK: Tensor) -> Tensor:
    """The best `y` in the direction of the others' weights: `s a` with `s = sum a / a' P a`."""
    others_RK = weights_RK.scatter(1, problem.receiver_R[:, None], 0.0)
    cost_R1 = (others_RK * problem.costs(others_RK)).sum(1, keepdim=True)
    mass_R1 = others_RK.sum(1, keepdim=True)
    return torch.where((mass_R1 > 0.0) & (cost_R1 > 0.0), others_RK * (mass_R1 / cost_R1), 0.0)


def _missed(problem: Problem, y_RK: Tensor) -> Tensor:
    """`-w_j` where it is more than rounding explains, else 0; 0 for the receiver itself."""
    rounding = 4.0 * torch.finfo(torch.float64).eps * problem.gram_KK.diagonal().amax()
    allowed_R1 = ACCURACY + rounding * y_RK.abs().sum(1, keepdim=True)
    missed_RK = (1.0 - problem.costs(y_RK)).scatter_(1, problem.receiver_R[:, None], 0.0)
    return torch.where(missed_RK > allowed_R1, missed_RK, 0.0)


def _marked(rows: Tensor, like_R: Tensor) -> Tensor:
    return torch.zeros_like(like_R, dtype=torch.bool).index_fill_(0, rows, True)


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
