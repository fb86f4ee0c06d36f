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
    num_rows = len(support_RK)
    support_RK = support_RK.scatter(1, problem.receiver_R[:, None], False)
    y_RK = torch.zeros_like(support_RK, dtype=torch.float64)
    solves_R = problem.receiver_R.new_zeros(num_rows)
    fewest_R = solves_R + support_RK.shape[1]
    patience_R = solves_R + PATIENCE
    rows = torch.arange(num_rows, device=support_RK.device)
    for _ in range(max_solves):
        part = problem.narrow(rows)
        y_RK[rows] = found = solve_on(part, support_RK[rows])
        solves_R[rows] += 1
        wrong = _infeasible(part, found, support_RK[rows])
        count = wrong.sum(1)
        fewer = count < fewest_R[rows]
        patience_R[rows] = torch.where(fewer, PATIENCE, patience_R[rows] - 1)
        fewest_R[rows] = torch.minimum(count, fewest_R[rows])
        single = _last(wrong)
        exchange = torch.where((patience_R[rows] < 0)[:, None], single, _worth_exchanging(part, found, wrong))
        support_RK[rows] ^= exchange
        rows = rows[(count > 0) & found.isfinite().all(1)]
        if len(rows) == 0:
            break
    return Pivoted(_weights(problem, y_RK.clamp_min(0.0)), solves_R)
