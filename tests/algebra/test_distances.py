"""Distances must be right where models are close together, far from the origin, or both at once."""

# K models, P parameters.

import pytest
import torch

from raypfl.algebra import all_rows_equal, columns, pairwise_distances, pairwise_similarities, row_distances

LENET5 = 62_006
"""Parameters of the network behind the numbers in this file."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_subtraction(w_KP):
    """The definition, pair by pair in float64."""
    return torch.stack([(w_KP.double() - row.double()).norm(dim=1) for row in w_KP])


def around(offset_norm: float, distance: float, num_models: int = 8):
    """Float32 rows about `distance` apart around a point `offset_norm` from the origin."""
    offset = normal(1, LENET5, seed=1)
    noise = normal(num_models, LENET5, seed=2)
    return (offset * (offset_norm / offset.norm()) + noise * (distance / (2 * LENET5) ** 0.5)).float()


def relative_error(found, w_KP):
    true = by_subtraction(w_KP)
    off_diagonal = ~torch.eye(len(w_KP), dtype=torch.bool)
    return float(((found - true).abs() / true)[off_diagonal].max())


@pytest.mark.parametrize("distance", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_close_models_far_from_the_origin(distance):
    w_KP = around(12.5, distance)
    assert by_subtraction(w_KP)[0, 1] == pytest.approx(distance, rel=0.05)
    assert relative_error(pairwise_distances(w_KP), w_KP) < 1e-6


def test_an_uncentred_float32_gram_matrix_loses_them():
    """Why rows are centred: a hundredth apart at norm 12.5 everything is lost, so the test above can fail."""
    w_KP = around(12.5, 1e-2)
    gram_KK = w_KP @ w_KP.T
    norms_K = gram_KK.diagonal()
    naive = (norms_K[:, None] + norms_K[None] - 2 * gram_KK).clamp_min(0).sqrt()
    assert relative_error(naive, w_KP) > 0.1


def test_rows_are_centred():
    """Multiples of 2^-11 around 4096: every number is exact, and an uncentred float64 Gram matrix is not."""
    unit = 2.0**-11
    w_KP = 4096 + unit * torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
    expected = unit * torch.tensor([[0.0, 5.0, 10.0], [5.0, 0.0, 5.0], [10.0, 5.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(pairwise_distances(w_KP), expected, rtol=1e-12, atol=0)


def test_a_close_pair_among_models_thirty_apart():
    """Float32, even centred, gives 5.5e-3 for this pair; float64 has it to about 1e-5 of itself."""
    w_KP = around(12.5, 30.0)
    w_KP[1] = w_KP[0] + (normal(LENET5, seed=3) * (2e-4 / LENET5**0.5)).float()
    found = pairwise_distances(w_KP)
    assert found[0, 1] == pytest.approx(2e-4, rel=0.1)
    assert relative_error(found, w_KP) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_with_a_zero_diagonal_in_float64(dtype):
    found = pairwise_distances(normal(7, 50).to(dtype))
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    assert not found.diagonal().any()


def test_known_triangle():
    found = pairwise_distances(torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]))
    expected = torch.tensor([[0.0, 3.0, 4.0], [3.0, 0.0, 5.0], [4.0, 5.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_a_single_model():
    assert torch.equal(pairwise_distances(torch.ones(1, 3)), torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("compute", [pairwise_distances, pairwise_similarities])
@pytest.mark.parametrize("block", [1, 3, 10])
def test_columns_may_come_in_any_number_of_blocks(compute, block, monkeypatch):
    w_KP = 5 + normal(4, 10)
    whole = compute(w_KP)
    monkeypatch.setattr(columns, "COLUMN_BLOCK", block)
    torch.testing.assert_close(compute(w_KP), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compute", [pairwise_distances, pairwise_similarities])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_not_modified(compute, dtype):
    w_KP = normal(4, 10).to(dtype)
    before = w_KP.clone()
    compute(w_KP)
    assert torch.equal(w_KP, before)


def test_equal_rows_are_seen_bitwise():
    w_KP = torch.full((5, 100), 0.1)
    assert all_rows_equal(w_KP)
    w_KP[3, 70] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    assert not all_rows_equal(w_KP)
    assert all_rows_equal(w_KP[:1])


def test_equal_rows_have_no_distance_that_would_count():
    """The mean of 40 equal rows may be off by a rounding; what is left is far below any true distance."""
    w_KP = normal(1, LENET5).float().expand(40, -1)
    assert pairwise_distances(w_KP).max() < 1e-10


def test_cosines_of_angles():
    w_KP = torch.tensor([[1.0, 0.0], [2.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])
    found = pairwise_similarities(w_KP)
    half = 0.5**0.5
    expected = torch.tensor(
        [[1.0, half, -1.0, 0.0], [half, 1.0, -half, 0.0], [-1.0, -half, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("order", [1, 2])
def test_distances_of_rows_beside_each_other(order):
    """Also of float32 rows that are close together and far from the origin, over several column blocks."""
    w_KP = around(100.0, 1e-3)
    found_K = row_distances(w_KP[:4], w_KP[4:], order)
    expected_K = torch.linalg.vector_norm(w_KP[:4].double() - w_KP[4:].double(), order, dim=1)
    torch.testing.assert_close(found_K, expected_K, rtol=1e-12, atol=0)
    assert found_K.dtype == torch.float64 and (row_distances(w_KP, w_KP, order) == 0).all()
