"""Projection onto the simplex: known numbers, the optimality conditions, and far points."""

# R rows, K entries.

import math

import pytest
import torch

from raypfl.algebra import project_onto_simplex


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([3.0], [1.0]),
        ([0.25, 0.75], [0.25, 0.75]),
        ([0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([2.0, 0.0], [1.0, 0.0]),
        ([1.0, 0.5, -1.0], [0.75, 0.25, 0.0]),
        ([0.5, -1.0, 1.0], [0.25, 0.0, 0.75]),
        ([-7.0, -7.0], [0.5, 0.5]),
    ],
)
def test_known_numbers(point, nearest):
    assert project_onto_simplex(row(*point)).tolist() == [nearest]


def test_a_metric_moves_cheap_entries_further():
    """From 0, the sum 1 is shared as 1 / m: 1/1 to 1/3 is 3/4 to 1/4."""
    assert project_onto_simplex(row(0.0, 0.0), row(1.0, 3.0)).tolist() == [[0.75, 0.25]]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_optimality_conditions(scale):
    """`m_j (v_j - x_j)` is one number `tau` where x is positive and no more than that elsewhere."""
    v_RK, m_RK = scale * normal(50, 17), normal(50, 17, seed=1).mul(3).exp()
    x_RK = project_onto_simplex(v_RK, m_RK)
    pull_RK = m_RK * (v_RK - x_RK)
    positive = x_RK > 0
    tau_R1 = torch.where(positive, pull_RK, -torch.inf).amax(1, keepdim=True)
    slack = 1e-12 * max(scale, 1.0) * m_RK.amax(1, keepdim=True)
    assert (x_RK >= 0).all()
    torch.testing.assert_close(x_RK.sum(1), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (torch.where(positive, tau_R1 - pull_RK, 0.0) <= slack).all()
    assert (torch.where(positive, -torch.inf, pull_RK - tau_R1) <= slack).all()


def test_a_far_point_keeps_its_digits():
    """A common shift changes nothing; naively 1e12 leaves four digits of the sum."""
    v_RK = row(0.5, 0.25, 0.25)
    assert project_onto_simplex(v_RK + 2.0**40).tolist() == v_RK.tolist()


def test_rows_do_not_know_each_other():
    v_RK = normal(6, 5)
    together = project_onto_simplex(v_RK)
    assert torch.equal(together, torch.cat([project_onto_simplex(one) for one in v_RK.split(1)]))


def test_ties_are_shared():
    x_RK = project_onto_simplex(row(1.0, 1.0, 1.0, -5.0))
    assert all(math.isclose(value, 1 / 3, rel_tol=1e-15) for value in x_RK[0, :3].tolist())
    assert x_RK[0, 3] == 0
