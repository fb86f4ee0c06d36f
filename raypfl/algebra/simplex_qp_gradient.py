"""Accelerated projected gradient steps for all programmes at once: a start for the exact solver.

FISTA (Beck and Teboulle, 2009) with gradient restart (O'Donoghue and Candes, 2015), both per row. A step
goes down in the metric `diag(V) + c_i`: the variances, which may differ by many decades, are met exactly,
and `c_i` follows the curvature of G that row i has seen, far below the largest eigenvalue of G once the
weights keep to a cluster. A step whose curvature turns out larger is taken back. One matrix product a step.
"""

# K clients, R of them receivers.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.simplex import project_onto_simplex
from raypfl.algebra.simplex_qp_problem import Problem

CURVATURE_GROWTH = 1.5
CURVATURE_DECAY = 0.9
"""Factors on `c_i` after a step that was taken back (at least; the curvature it met is known) or kept."""


class Iterate(NamedTuple):
    """Where each row stands."""

    x_RK: Tensor
    """Weights, on the simplex."""
    gram_x_RK: Tensor
    """`x G`."""
    before_RK: Tensor
    """Weights one step earlier."""
    gram_before_RK: Tensor
    momentum_R1: Tensor
    """The `t` of FISTA."""
    curvature_R1: Tensor
    """`c_i`."""

    def narrow(self, rows: Tensor) -> Iterate:
        """These rows alone."""
        return Iterate(*(field[rows] for field in self))


def begin(problem: Problem, x_RK: Tensor) -> Iterate:
    """Stand at weights, without momentum."""
    gram_x_RK = x_RK @ problem.gram_KK
    momentum_R1 = x_RK.new_ones(len(x_RK), 1)
    curvature_R1 = problem.gram_KK.diagonal().mean() * momentum_R1
    return Iterate(x_RK, gram_x_RK, x_RK, gram_x_RK, momentum_R1, curvature_R1)


def first_guess(problem: Problem) -> Tensor:
    """Weights that would be optimal if the others' differences to the receiver were orthogonal, `[R, K]`."""
    own_RK, square_R1 = problem.own_gram()
    distance_RK = (problem.gram_KK.diagonal() + square_R1 - 2.0 * own_RK).clamp_min(0.0)
    distance_RK.scatter_(1, problem.receiver_R[:, None], 0.0)
    guess_RK = 1.0 / (problem.variance_K + distance_RK)
    return guess_RK / guess_RK.sum(1, keepdim=True)


def accelerate(problem: Problem, iterate: Iterate, steps: int) -> Iterate:
    """Take some steps with every row."""
    own_RK, _ = problem.own_gram()
    for _ in range(steps):
        iterate = _step(problem, own_RK, iterate)
    return iterate


def _step(problem: Problem, own_RK: Tensor, iterate: Iterate) -> Iterate:
    x_RK, gram_x_RK, before_RK, gram_before_RK, t_R1, curvature_R1 = iterate
    t_next_R1 = 0.5 * (1.0 + (1.0 + 4.0 * t_R1.square()).sqrt())
    push_R1 = (t_R1 - 1.0) / t_next_R1
    y_RK = x_RK + push_R1 * (x_RK - before_RK)
    gram_y_RK = gram_x_RK + push_R1 * (gram_x_RK - gram_before_RK)

    metric_RK = problem.variance_K + curvature_R1
    half_gradient_RK = problem.variance_K * y_RK + gram_y_RK - own_RK
    new_RK = project_onto_simplex(y_RK - half_gradient_RK / metric_RK, metric_RK)
    gram_new_RK = new_RK @ problem.gram_KK

    moved_RK = new_RK - y_RK
    square_R1 = moved_RK.square().sum(1, keepdim=True)
    bend_R1 = (moved_RK * (gram_new_RK - gram_y_RK)).sum(1, keepdim=True)
    too_far_R1 = bend_R1 > curvature_R1 * square_R1
    uphill_R1 = (moved_RK * metric_RK * (new_RK - x_RK)).sum(1, keepdim=True) < 0.0

    met_R1 = bend_R1 / square_R1.clamp_min(torch.finfo(torch.float64).tiny)
    return Iterate(
        torch.where(too_far_R1, x_RK, new_RK),
        torch.where(too_far_R1, gram_x_RK, gram_new_RK),
        x_RK,
        gram_x_RK,
        torch.where(too_far_R1 | uphill_R1, 1.0, t_next_R1),
        torch.where(
            too_far_R1, torch.maximum(CURVATURE_GROWTH * curvature_R1, met_R1), CURVATURE_DECAY * curvature_R1
        ),
    )
