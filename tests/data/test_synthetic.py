"""Check values of synthetic(0.5, 0.5) from pFedMe's generator, seed 0."""

import numpy as np
import pytest

from raypfl.data import Pool, load, partition
from raypfl.data.partitions.pfml import Natural
from raypfl.data.sources.synthetic import SyntheticConfig

HISTOGRAM_CLIENT_0 = [9352, 187, 0, 0, 0, 0, 6, 0, 0, 0]


@pytest.fixture(scope="module")
def pool() -> Pool:
    return load(SyntheticConfig(), seed=123)


def test_sizes(pool: Pool) -> None:
    assert pool.owner is not None
    sizes = np.bincount(pool.owner)
    assert sizes[:8].tolist() == [9545, 855, 2180, 24380, 11685, 285, 2075, 450]
    assert (len(sizes), sizes.min(), sizes.max(), sizes.sum()) == (100, 250, 25_810, 205_795)
    assert np.median(sizes) == 577.5
    assert pool.x.shape == (205_795, 60)


def test_first_draws_of_means_and_shifts() -> None:
    """The order of draws up to here, with the generator's own calls."""
    legacy = np.random.RandomState(0)
    legacy.lognormal(4, 2, 100)
    assert legacy.normal(0, 0.5, 100)[0] == pytest.approx(0.941575, abs=1e-6)
    assert legacy.normal(0, 0.5, 100)[0] == pytest.approx(-0.184591, abs=1e-6)


def test_label_histograms_of_the_first_two_clients(pool: Pool) -> None:
    assert np.bincount(pool.y[:9545], minlength=10).tolist() == HISTOGRAM_CLIENT_0
    assert set(pool.y[9545 : 9545 + 855].tolist()) == {2}


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    load(SyntheticConfig(num_clients=2), seed=0)
    assert np.random.rand() == expected


def test_seed_null_follows_the_run() -> None:
    config = SyntheticConfig(num_clients=2, seed=None)
    assert load(config, 1).fingerprint == load(config, 1).fingerprint != load(config, 2).fingerprint


def test_natural_partition_keeps_three_quarters_for_training(pool: Pool) -> None:
    federation = partition(Natural(), pool, seed=0)
    assert federation.sizes.sum() == 154_314
    assert federation.sizes[:2].tolist() == [int(0.75 * 9545), int(0.75 * 855)]
    assert pool.owner is not None
    for i, client in enumerate(federation.clients):
        rows = np.concatenate(client)
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(pool.owner == i))
