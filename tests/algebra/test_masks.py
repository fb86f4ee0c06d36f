"""Masks: exactly so many, ties by place, and bits that survive being sent."""

import pytest
import torch

from raypfl.algebra import largest, overlaps, pack_bits, unpack_bits
from raypfl.algebra.columns import COLUMN_BLOCK


def test_largest_entries_of_every_row():
    score = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert largest(score, 2).tolist() == [[True, False, True], [False, True, True]]


@pytest.mark.parametrize("count", range(7))
def test_equal_entries_are_taken_by_place(count):
    """Taking all from the k-th largest on would take six of the first row, whatever the count."""
    score = torch.tensor([[0.0] * 6, [1.0, 0.0, 2.0, 1.0, 0.0, 1.0]])
    order = [[0, 1, 2, 3, 4, 5], [2, 0, 3, 5, 1, 4]]
    expected = [[place in first[:count] for place in range(6)] for first in order]
    assert largest(score, count).tolist() == expected


def test_largest_agrees_with_a_stable_sort():
    score = torch.randint(0, 9, (5, 300), generator=torch.Generator().manual_seed(0)).float()
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :120]
    expected = torch.zeros_like(score, dtype=torch.bool).scatter(1, order, True)
    assert torch.equal(largest(score, 120), expected)


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 121])
def test_bits_survive(columns):
    mask = torch.rand(4, columns, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8 and packed.shape == (4, -(-columns // 8))
    assert torch.equal(unpack_bits(packed, columns), mask)


@pytest.mark.parametrize("columns", [5, 64, COLUMN_BLOCK + 11])
def test_overlaps_are_counts(columns):
    mask = torch.rand(6, columns, generator=torch.Generator().manual_seed(0)) < 0.4
    expected = torch.tensor([[int((one & other).sum()) for other in mask] for one in mask])
    assert overlaps(pack_bits(mask)).tolist() == expected.tolist()
