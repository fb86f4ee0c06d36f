"""Linear maps over rows are exact, keep dtype and device, and leave what they were given alone."""

# K models, P parameters.

from fractions import Fraction

import pytest
import torch

from raypfl.algebra import columns, pull_together, replace_rows, weighted_mean


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attraction(num_models: int, scale: float = 1.0):
    return scale * normal(num_models, num_models, seed=1).fill_diagonal_(0.0)


def coefficients(attraction_KK):
    """`C = A + diag(1 - A 1)`."""
    return attraction_KK + torch.diag(1 - attraction_KK.sum(1))


def test_known_numbers():
    """Row 0 goes half the way to row 1, row 1 goes twice its difference to row 0 away from it."""
    a_KK = torch.tensor([[0.0, 0.5], [-2.0, 0.0]], dtype=torch.float64)
    found = pull_together(a_KK, torch.tensor([[1.0, 0.0], [3.0, 8.0]]))
    assert found.tolist() == [[2.0, 4.0], [7.0, 24.0]]


@pytest.mark.parametrize("block", [1, 4, 16384])
def test_equals_multiplication_by_c(block, monkeypatch):
    a_KK, w_KP = attraction(5), normal(5, 9)
    monkeypatch.setattr(columns, "COLUMN_BLOCK", block)
    torch.testing.assert_close(pull_together(a_KK, w_KP), coefficients(a_KK) @ w_KP, rtol=1e-13, atol=1e-13)


def test_large_entries_do_not_cancel_in_float32():
    """FedAMP's defaults give entries near 1e4: `C W` in float32 is off by 0.1, the differences are not."""
    a_KK = attraction(6, 1e4)
    w_KP = (10 + 1e-4 * normal(6, 50)).float()
    true = w_KP.double() + a_KK @ w_KP.double() - a_KK.sum(1, keepdim=True) * w_KP.double()
    naive = coefficients(a_KK).float() @ w_KP
    assert (naive - true).abs().max() > 1e-2
    torch.testing.assert_close(pull_together(a_KK, w_KP).double(), true, rtol=2e-7, atol=0)


def test_large_entries_do_not_cancel_in_float64():
    """Around 1000, a thousandth apart, entries near 1e8: uncentred products are off by 1e-9."""
    a_KK, w_KP = attraction(4, 1e8), 1000 + 1e-3 * normal(4, 3)
    a, w = ([[Fraction(value) for value in row] for row in rows.tolist()] for rows in (a_KK, w_KP))

    def exact(i, p):
        return float(w[i][p] + sum(a[i][j] * (w[j][p] - w[i][p]) for j in range(4)))

    expected = torch.tensor([[exact(i, p) for p in range(3)] for i in range(4)], dtype=torch.float64)
    torch.testing.assert_close(pull_together(a_KK, w_KP), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_equal_rows_stay(scale):
    row = normal(1, 200).float()
    w_KP = row.expand(7, -1)
    torch.testing.assert_close(pull_together(attraction(7, scale), w_KP), w_KP, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestTypes:
    def test_dtype_and_device_follow_the_rows(self, dtype):
        w_KP = normal(3, 4).to(dtype)
        mixed, mean = pull_together(attraction(3), w_KP), weighted_mean(torch.tensor([1, 2, 3]), w_KP)
        assert mixed.dtype == mean.dtype == dtype
        assert mixed.device == mean.device == w_KP.device
        assert mixed.shape == (3, 4)
        assert mean.shape == (1, 4)

    def test_arguments_are_not_modified(self, dtype):
        given = [attraction(3), normal(3, 4).to(dtype), torch.tensor([1, 2, 3])]
        before = [tensor.clone() for tensor in given]
        a_KK, w_KP, weights_K = given
        pull_together(a_KK, w_KP)
        weighted_mean(weights_K, w_KP)
        replace_rows(w_KP, torch.tensor([2, 0]), w_KP[:2])
        assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))

    def test_the_result_shares_no_memory_with_the_rows(self, dtype):
        w_KP = normal(3, 4).to(dtype)
        mixed = pull_together(torch.zeros(3, 3, dtype=torch.float64), w_KP)
        assert torch.equal(mixed, w_KP)
        assert mixed.untyped_storage().data_ptr() != w_KP.untyped_storage().data_ptr()


def test_mean_weighted_by_samples():
    mean = weighted_mean(torch.tensor([1, 3]), torch.tensor([[4.0, 0.0], [8.0, 1.0]]))
    assert mean.tolist() == [[7.0, 0.75]]


@pytest.mark.parametrize("sizes", [[1], [300] * 40, [1, 3, 7, 11, 13], list(range(1, 101))])
def test_mean_of_equal_rows_is_the_row_bit_for_bit(sizes):
    row = normal(1, 500).float()
    assert torch.equal(weighted_mean(torch.tensor(sizes), row.expand(len(sizes), -1)), row)


def test_mean_only_sees_the_ratio_of_weights():
    w_KP = normal(3, 5)
    counts, shares = torch.tensor([2, 3, 5]), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    torch.testing.assert_close(weighted_mean(counts, w_KP), weighted_mean(shares, w_KP), rtol=1e-13, atol=0)


def test_mean_over_several_blocks(monkeypatch):
    w_KP, weights = normal(3, 10), torch.tensor([2, 3, 5])
    whole = weighted_mean(weights, w_KP)
    monkeypatch.setattr(columns, "COLUMN_BLOCK", 3)
    torch.testing.assert_close(weighted_mean(weights, w_KP), whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize("ids", [[1, 3], [3, 0, 2], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_replaced_rows(ids):
    w_NP = torch.arange(8.0).reshape(4, 2)
    new_SP = -1 - torch.arange(2.0 * len(ids)).reshape(-1, 2)
    expected = w_NP.clone()
    for at, row in zip(ids, new_SP, strict=True):
        expected[at] = row
    assert torch.equal(replace_rows(w_NP, torch.tensor(ids), new_SP), expected)


def test_rows_of_an_expanded_start_are_replaced_one_by_one():
    """All clients share one row in memory before the first round."""
    w_NP = torch.zeros(1, 2).expand(3, -1)
    assert replace_rows(w_NP, torch.tensor([1]), torch.ones(1, 2)).tolist() == [[0, 0], [1, 1], [0, 0]]
