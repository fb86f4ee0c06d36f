"""Sparse weights: what is stored, what is refused."""

import pytest
import torch
from sparse_cases import mixing

from raypfl.algebra import (
    csr_copying,
    csr_degrees,
    csr_from_dense,
    csr_from_pairs,
    csr_row_sums,
    csr_take,
    csr_to_dense,
)


def pairs(*entries: tuple[int, int, float], receivers: int = 3):
    rows, columns, values = zip(*entries, strict=True)
    return csr_from_pairs(
        torch.tensor(rows), torch.tensor(columns), torch.tensor(values, dtype=torch.float64), receivers
    )


def test_entries_are_sorted_and_zeros_left_out():
    weights = pairs((2, 1, 0.5), (0, 3, 0.25), (2, 0, 0.5), (0, 1, 0.75), (0, 2, 0.0))
    assert weights.offsets.tolist() == [0, 2, 2, 4]
    assert weights.columns.tolist() == [1, 3, 0, 1]
    assert weights.values.tolist() == [0.75, 0.25, 0.5, 0.5]
    assert csr_degrees(weights).tolist() == [2, 0, 2]
    assert csr_row_sums(weights).tolist() == [1.0, 0.0, 1.0]


def test_dense_and_back():
    dense = csr_to_dense(mixing(7, 3), 7)
    assert [int(count) for count in (dense != 0).sum(1)] == [4] * 7
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(csr_from_dense(dense), mixing(7, 3), strict=True)
    )


@pytest.mark.parametrize("ids", [[], [2], [5, 0, 0, 3], list(range(7))])
def test_taken_receivers(ids):
    weights, ids = mixing(7, 3), torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(csr_to_dense(csr_take(weights, ids), 7), csr_to_dense(weights, 7)[ids])


def test_taken_receivers_that_hear_nobody():
    weights = pairs((2, 1, 1.0), (0, 3, 1.0))
    assert csr_to_dense(csr_take(weights, torch.tensor([1, 2, 1])), 4).tolist() == [
        [0] * 4,
        [0, 1, 0, 0],
        [0] * 4,
    ]


def test_copies_are_one_hot():
    assert csr_to_dense(csr_copying(torch.tensor([2, 0])), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
