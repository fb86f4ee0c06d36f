"""Sparse training: densities that meet their budget, and masks that keep their number of ones."""

import math

import pytest
import torch
from sparse_cases import normal

from raypfl.algebra import erk_counts, erk_densities, exchange_counts, prune_and_regrow
from raypfl.errors import ConfigError

CNN = [(32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (512, 16384), (512,), (10, 512), (10,)]


def test_published_cnn():
    densities = erk_densities(CNN, 0.5)
    assert [density == 1 for density in densities] == [True, True, True, True, False, True, True, True]
    assert densities[4] == pytest.approx(0.49851, abs=5e-6)
    assert abs(erk_counts(CNN, 0.5)[4] - 4_181_787) <= 1
    assert erk_counts(CNN, 0.5)[0] == 32 * 27


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "shapes", [CNN, [(5, 7)], [(40, 40), (40, 40), (7,)], [(64, 64, 3, 3), (64,), (10, 64)]]
)
def test_densities_meet_the_budget(shapes, density, power):
    sizes = [math.prod(shape) for shape in shapes]
    densities = erk_densities(shapes, density, power)
    kept = sum(part * size for part, size in zip(densities, sizes, strict=True))
    assert kept == pytest.approx(density * sum(sizes), rel=1e-12)
    assert all(0 < part <= 1 for part in densities)


def test_power_zero_is_uniform_and_power_one_follows_the_sides():
    assert erk_densities([(4, 5), (30, 30)], 0.25, power=0.0) == [0.25, 0.25]
    one, other = erk_densities([(10, 10), (30, 30)], 0.1)
    assert one / other == pytest.approx((20 / 100) / (60 / 900))


def test_full_density_is_dense():
    assert erk_densities(CNN, 1.0) == pytest.approx([1.0] * 8, rel=1e-12)


def test_full_density_trains_every_weight():
    """A share of 11 / 11 comes out as 0.9999999999999999, which must not cost a weight."""
    assert erk_counts([(1, 11)], 1.0) == [11]
    assert erk_counts(CNN, 1.0) == [math.prod(shape) for shape in CNN]


@pytest.mark.parametrize("density", [0.0, -0.5, 1.01, float("nan")])
def test_density_out_of_range(density):
    with pytest.raises(ConfigError, match="density"):
        erk_densities(CNN, density)


def test_counts_to_exchange_are_ceilings():
    mask = torch.arange(10)[None] < torch.tensor([0, 1, 4, 9])[:, None]
    assert exchange_counts(mask, 0.5).tolist() == [0, 1, 2, 5]
    assert exchange_counts(mask, 0.0).tolist() == [0, 0, 0, 0]
    assert exchange_counts(mask, 1e-30).tolist() == [0, 1, 1, 1]
    assert exchange_counts(mask, 1.0).tolist() == [0, 1, 4, 9]


def test_a_share_that_is_rounded_up_takes_no_entry_more():
    """A quarter of (1 + cos(pi / 3)) is 0.37500000000000006: three eighths of 8 are 3."""
    assert exchange_counts(
        torch.ones(1, 8, dtype=torch.bool), 0.25 * (1 + math.cos(math.pi / 3))
    ).tolist() == [3]


def test_known_exchange():
    """|w| 1 and 2 are dropped; of the rest, 0.9 and 0.8 promise most, and one of them was just dropped."""
    w = torch.tensor([[5.0, -1.0, 2.0, -4.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()
    promise = torch.tensor([[9.0, 0.8, 0.1, 9.0, 0.9, 0.2]])
    assert prune_and_regrow(w, mask, promise, torch.tensor([2])).int().tolist() == [[1, 1, 0, 1, 1, 0]]


def test_ties_go_by_the_lowest_index():
    zeros, mask = torch.zeros(1, 6), torch.tensor([[0, 1, 1, 0, 1, 1]]).bool()
    # Drops 1 and 2; all promise the same, so 0 and 1 are taken.
    assert prune_and_regrow(zeros, mask, zeros, torch.tensor([2])).int().tolist() == [[1, 1, 0, 0, 1, 1]]


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.3, 1.0])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_as_many_are_trained_as_before(share, levels):
    """Rows of different density, with many equal weights and gradients, one row dense."""
    density = torch.tensor([0.0, 0.2, 0.5, 0.5, 0.8, 1.0])[:, None]
    mask = torch.rand(6, 400, generator=torch.Generator().manual_seed(0)) < density
    w, promise = ((normal(6, 400, seed=seed) * levels).round() for seed in (1, 2))
    w, promise = w * mask, promise.abs()
    counts = exchange_counts(mask, share)
    new = prune_and_regrow(w, mask, promise, counts)
    assert torch.equal(new.sum(1), mask.sum(1))
    assert torch.equal(new[5], mask[5])
    dropped = (mask & ~new).sum(1)
    assert (dropped <= counts).all()
    if share == 0.0:
        assert torch.equal(new, mask)


def test_rows_do_not_notice_each_other():
    mask = (
        torch.rand(5, 90, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.1, 0.9, 5)[:, None]
    )
    w, promise = normal(5, 90) * mask, normal(5, 90, seed=1).abs()
    counts = exchange_counts(mask, 0.25)
    together = prune_and_regrow(w, mask, promise, counts)
    for i in range(5):
        row = slice(i, i + 1)
        assert torch.equal(prune_and_regrow(w[row], mask[row], promise[row], counts[row]), together[row])


def test_the_smallest_are_dropped_and_the_most_promising_taken():
    mask = torch.arange(200)[None] < 120
    w, promise = normal(1, 200), normal(1, 200, seed=1).abs()
    new = prune_and_regrow(w, mask, promise, torch.tensor([30]))
    kept = mask[0] & (w[0].abs() > w[0, :120].abs().sort().values[29])
    assert int(kept.sum()) == 90 and bool(new[0][kept].all())
    grown = new[0] & ~kept
    assert promise[0][grown].min() > promise[0][~new[0]].max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_changes_no_count(bad):
    mask = torch.arange(20)[None] < 12
    w, promise = normal(1, 20).float() * mask, normal(1, 20, seed=1).float().abs()
    w[0, :5], promise[0, 3:16] = bad, bad
    new = prune_and_regrow(w, mask, promise, torch.tensor([6]))
    assert int(new.sum()) == 12 and bool(new[0, :5].all())
