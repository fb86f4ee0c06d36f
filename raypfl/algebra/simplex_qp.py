"""Whose classifiers to combine, and how much of each: one quadratic programme over the simplex per client.

All programmes share one Gram matrix, so they are solved together (`simplex_qp_problem` states them):
accelerated projected gradient finds about which weights are positive, pivoting solves for them to rounding,
and every answer is judged by its duality gap, whatever produced it. Everything is float64, on the device of
the statistics; memory is a few matrices `[K, K]`.
"""

# K clients, R of them receivers, P entries of a statistic.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.algebra.simplex_qp_gradient import accelerate, begin, first_guess
from raypfl.algebra.simplex_qp_pivoting import solve_exactly
from raypfl.algebra.simplex_qp_problem import Problem, certify, read_statistics
from raypfl.errors import RaypflError, ShapeError

TOLERANCE = 1e-8
"""Scaled residual up to which weights count as certified; solved rows are mostly below 1e-12."""

STEPS = 20
"""Gradient steps between two looks at the rows."""

MAX_STEPS = 200
"""Gradient steps after which pivoting decides, however large the support."""

CHEAP_SUPPORT = 512
"""Positive weights up to which solving is cheaper than more gradient steps. Larger supports are of clients
that are about as close as their variances are large: there gradient steps converge fast."""

SOLVED = 1e-12
"""Gap, over the objective, at which nothing is left to solve for."""


class Combination(NamedTuple):
    """Weights of classifier collaboration with their proof."""

    weights_RK: Tensor
    """One row a receiver: non-negative, sum 1."""
    objective_R: Tensor
    """Variance plus squared bias of the combination."""
    gap_R: Tensor
    """Duality gap: the objective is at most this far above its minimum."""
    residual_R: Tensor
    """Scaled residual of the optimality conditions, see `certify`."""
    iterations_R: Tensor
    """Gradient steps and linear systems that the row took, int64."""


@phase("qp")
def combination_weights(
    mean_KP: Tensor,
    variance_K: Tensor,
    *,
    receivers_R: Tensor | None = None,
    start_RK: Tensor | None = None,
) -> Combination:
    """Weights with which each receiver best estimates its own statistic from everyone's.

    Args:
        mean_KP: class-weighted feature means `h_k = p_k mu_k` of every client, `[K, P]` or `[K, C, D]`.
        variance_K: total variance of each statistic, already divided by the client's sample count, `[K]`.
        receivers_R: rows of `mean_KP` to find weights for, int64; all where none are given.
        start_RK: a guess `[R, K]`, such as the weights of the round before; what is positive in a row is
            scaled to sum 1. It saves time; the answer does not depend on it.

    Returns:
        float64 weights with certificates. Also weights that are not certified are returned:
        `require_certified` refuses them.

    Raises:
        ShapeError: no client, or arguments that disagree in K or R.
        DataError: an entry that is not finite or a negative variance; names the row.
    """
    gram_KK, positive_K = read_statistics(mean_KP, variance_K)
    if receivers_R is None:
        receivers_R = torch.arange(len(positive_K), device=gram_KK.device)
    problem = Problem(gram_KK, positive_K, receivers_R)
    weights_RK, iterations_R = _solve(problem, None if start_RK is None else _weights_from(problem, start_RK))
    return Combination(weights_RK, *certify(problem, weights_RK), iterations_R)


def require_certified(
    found: Combination, *, names: Sequence[object] | None = None, tolerance: float = TOLERANCE
) -> Tensor:
    """The weights, if every row's residual is at most the tolerance.

    Args:
        found: the solution.
        names: what to call the rows in the error, such as client ids; their numbers where none are given.
        tolerance: largest scaled residual.

    Raises:
        RaypflError: a row is not certified; names the worst one, its residual and its gap.
    """
    bad_R = ~(found.residual_R <= tolerance)
    if bool(bad_R.any()):
        row = int(torch.where(bad_R, found.residual_R.nan_to_num(torch.inf), -1.0).argmax())
        name = row if names is None else names[row]
        raise RaypflError(
            f"classifier collaboration: the weights of client {name} are not certified: scaled residual "
            f"{float(found.residual_R[row]):.3g} after {int(found.iterations_R[row])} iterations, gap "
            f"{float(found.gap_R[row]):.3g} (allowed residual {tolerance:g}; {int(bad_R.sum())} of "
            f"{len(bad_R)} clients fail). Look for statistics many decades apart."
        )
    return found.weights_RK


def _weights_from(problem: Problem, start_RK: Tensor) -> Tensor:
    """Rows on the simplex near the start; zeros stay zero. A row with nothing positive starts at itself."""
    expected = (len(problem.receiver_R), len(problem.variance_K))
    if start_RK.shape != expected or not bool(start_RK.isfinite().all()):
        raise ShapeError(
            f"classifier collaboration: start has shape {list(start_RK.shape)}; expected {list(expected)}, "
            "one finite row for each receiver."
        )
    weights_RK = start_RK.to(problem.gram_KK).clamp_min(0.0)
    alone_R1 = (weights_RK.sum(1, keepdim=True) == 0.0).to(weights_RK)
    weights_RK = weights_RK.scatter_add(1, problem.receiver_R[:, None], alone_R1)
    return weights_RK / weights_RK.sum(1, keepdim=True)


def _solve(problem: Problem, start_RK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, and the iterations that each row took.

    Rounds of gradient steps; after each, rows of small support are solved exactly. A row leaves when it is
    solved; a start may be so good that no step is needed.
    """
    iterate = begin(problem, first_guess(problem) if start_RK is None else start_RK)
    weights_RK = iterate.x_RK.clone()
    iterations_R = torch.zeros_like(problem.receiver_R)
    rows = torch.arange(len(weights_RK), device=weights_RK.device)
    for done in range(0 if start_RK is None else -STEPS, MAX_STEPS, STEPS):
        part = problem.narrow(rows)
        if done >= 0:
            iterate = accelerate(part, iterate, STEPS)
            iterations_R[rows] += STEPS
        weights_RK[rows] = iterate.x_RK
        proof = certify(part, iterate.x_RK)
        open_R = proof.gap_R > SOLVED * proof.objective_R
        cheap_R = (iterate.x_RK > 0.0).sum(1) <= CHEAP_SUPPORT
        exact_R = open_R & (cheap_R | (done + STEPS >= MAX_STEPS))
        improved_RK, solves_R, certified_R = _improve(part.narrow(exact_R), iterate.x_RK[exact_R])
        weights_RK[rows[exact_R]] = improved_RK
        iterations_R[rows[exact_R]] += solves_R
        open_R[exact_R] = ~certified_R
        rows, iterate = rows[open_R], iterate.narrow(open_R)
        if len(rows) == 0:
            break
    return weights_RK, iterations_R


def _improve(problem: Problem, x_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The better of old and exact weights, the systems solved for them, and which rows are certified."""
    exact_RK, solves_R = solve_exactly(problem, x_RK)
    before_R, after_R = (certify(problem, weights_RK).residual_R for weights_RK in (x_RK, exact_RK))
    # False where the exact weights are not a number.
    better_R = after_R < before_R
    weights_RK = torch.where(better_R[:, None], exact_RK, x_RK)
    return weights_RK, solves_R, torch.where(better_R, after_R, before_R) <= TOLERANCE
