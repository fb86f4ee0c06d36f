"""Pathological, Dirichlet and practical partitions."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raypfl.data import Pool, load, partition
from raypfl.data.partitions.base import largest_remainder
from raypfl.data.partitions.independent import Dirichlet, Pathological, Practical, sequential
from raypfl.data.sources.torchvision_sets import TorchvisionConfig
from raypfl.errors import PartitionError

MakePool = Callable[..., Pool]


def test_largest_remainder_by_hand() -> None:
    # Quotas 4.9, 1.4, 0.7: floors 4, 1, 0; the two missing go to the remainders .9 and .7.
    assert largest_remainder(np.array([0.7, 0.2, 0.1]), 7).tolist() == [5, 1, 1]
    assert largest_remainder(np.ones(4), 7000).tolist() == [1750] * 4
    assert largest_remainder(np.ones(3), 7).tolist() == [3, 2, 2]
    assert largest_remainder(np.array([0.1, 0.2, 0.7]) * 3, 10).tolist() == [1, 2, 7]


def test_sequential_rounding_by_hand() -> None:
    # 4.9 -> 5, 1.4 -> 1, the last takes 1.
    assert sequential(np.array([0.7, 0.2, 0.1]), 7).tolist() == [5, 1, 1]
    # Four times 1.5 -> 2 of 6: the third takes the last two, nothing is left for the fourth.
    assert sequential(np.array([0.25] * 4), 6).tolist() == [2, 2, 2, 0]


def test_pathological_counts_are_equal_and_of_the_same_classes(make_pool: MakePool) -> None:
    pool = make_pool([300] * 10, [60] * 10)
    config = Pathological(num_clients=200, train_size=300, test_size=100)
    classes = []
    for client in partition(config, pool, seed=1).clients:
        labels, counts = np.unique(pool.y[client.train], return_counts=True)
        assert counts.tolist() == [150, 150]
        test_labels, test_counts = np.unique(pool.y[client.test], return_counts=True)
        assert test_counts.tolist() == [50, 50]
        assert labels.tolist() == test_labels.tolist()
        classes.extend(labels.tolist())
    # 400 draws, 40 a class expected; clients draw independently, so all ten classes are about as common.
    assert np.bincount(classes, minlength=10).min() > 20


def test_pathological_clients_may_share_samples(make_pool: MakePool) -> None:
    pool = make_pool([10, 10], [10, 10])
    clients = partition(Pathological(num_clients=2, train_size=20, test_size=2), pool, seed=0).clients
    np.testing.assert_array_equal(np.sort(clients[0].train), np.sort(clients[1].train))


@pytest.mark.parametrize("rounding", ["largest_remainder", "sequential"])
def test_dirichlet_sizes_are_exact_and_test_follows_training(make_pool: MakePool, rounding: str) -> None:
    pool = make_pool([500] * 10, [500] * 10)
    config = Dirichlet.model_validate({"alpha": 0.5, "rounding": rounding, "test_size": 500})
    for client in partition(config, pool, seed=0).clients:
        train, test = (np.bincount(pool.y[rows], minlength=10) for rows in (client.train, client.test))
        assert train.sum() == 500
        np.testing.assert_array_equal(train, test)


def test_dirichlet_concentration_has_its_meaning(make_pool: MakePool) -> None:
    """Expected effective number of classes 1 / E[sum q^2] = (K alpha + 1) / (alpha + 1)."""
    pool = make_pool([500] * 10, [100] * 10)
    for alpha, effective in ((0.1, 2 / 1.1), (0.5, 4.0), (1.0, 5.5)):
        federation = partition(Dirichlet(alpha=alpha, num_clients=600), pool, seed=2)
        shares = federation.label_counts(pool.y, 10) / 500
        assert 1 / (shares**2).sum(1).mean() == pytest.approx(effective, rel=0.08)
    even = partition(Dirichlet(alpha=1e6), pool, seed=0).label_counts(pool.y, 10)
    assert even.min() >= 49 and even.max() <= 51


def test_practical_groups(make_pool: MakePool) -> None:
    pool = make_pool([500] * 9, [100] * 9)
    federation = partition(Practical(), pool, seed=0)
    groups = np.zeros(3, int)
    totals = np.zeros((3, 9))
    for client in federation.clients:
        train, test = (np.bincount(pool.y[rows], minlength=9) for rows in (client.train, client.test))
        by_group = train.reshape(3, 3).sum(1)
        group = int(by_group.argmax())
        assert (by_group[group], train.sum()) == (400, 500)
        assert (test.reshape(3, 3).sum(1)[group], test.sum()) == (80, 100)
        groups[group] += 1
        totals[group] += train
    assert groups.tolist() == [14, 13, 13]
    # Uniform within each part: 400/3 and 100/6 a client, 13 clients.
    np.testing.assert_allclose(totals[1] / 13, [100 / 6] * 3 + [400 / 3] * 3 + [100 / 6] * 3, rtol=0.15)


def test_a_shortage_names_class_split_client_and_numbers(make_pool: MakePool) -> None:
    pool = make_pool([500, 500], [380, 500])
    config = Pathological(num_clients=2, train_size=1000, test_size=1000)
    with pytest.raises(PartitionError) as error:
        partition(config, pool, seed=0)
    assert "class 0 has 380 test samples, client 0 needs 500" in str(error.value)
    assert "partition.test_size" in str(error.value)


def test_with_replacement_only_where_a_class_is_too_small(make_pool: MakePool) -> None:
    pool = make_pool([100, 500], [500, 500])
    config = Pathological(num_clients=3, train_size=800, test_size=10, when_short="replace")
    for client in partition(config, pool, seed=0).clients:
        small, large = (client.train[pool.y[client.train] == label] for label in (0, 1))
        assert len(small) == 400
        assert len(np.unique(small)) <= 100
        assert len(np.unique(large)) == 400


def test_an_empty_class_cannot_be_drawn_with_replacement_either(make_pool: MakePool) -> None:
    config = Pathological(num_clients=1, train_size=2, test_size=2, when_short="replace")
    with pytest.raises(PartitionError, match="class 1 has 0 test samples, client 0 needs 1"):
        partition(config, make_pool([5, 5], [5, 0]), seed=0)


def test_more_classes_than_there_are(make_pool: MakePool) -> None:
    pool = make_pool([50, 50], [50, 50])
    with pytest.raises(PartitionError, match="client 0 needs 4 classes, the data have 2"):
        partition(Pathological(classes_per_client=4), pool, seed=0)
    with pytest.raises(PartitionError, match="3 groups need a dominant class each, the data have 2"):
        partition(Practical(), pool, seed=0)


def test_the_papers_setting_on_fashion_mnist(real_data: Path) -> None:
    pool = load(TorchvisionConfig(name="fmnist", root=real_data, download=False), seed=0)
    for config in (
        Dirichlet(alpha=0.1, train_size=300, validation_fraction=0.1),
        Pathological(train_size=300, validation_fraction=0.1),
    ):
        federation = partition(config, pool, seed=0)
        lengths = {tuple(map(len, client)) for client in federation.clients}
        assert (federation.num_clients, lengths) == (40, {(270, 30, 100)})
