from collections.abc import Callable

import numpy as np
import pytest

from raypfl.data import Pool, partition
from raypfl.data.partitions.fedpac import PUBLISHED_GROUPS, FedPac, group_counts
from raypfl.errors import PartitionError

MakePool = Callable[..., Pool]


def test_counts_of_the_papers_code() -> None:
    assert group_counts(600, 20, (2, 3, 4), 10).tolist() == [12, 12, 172, 172, 172, 12, 12, 12, 12, 12]
    assert group_counts(300, 20, (8, 9, 0), 10).tolist() == [86, 6, 6, 6, 6, 6, 6, 6, 86, 86]


def test_last_classes_take_the_remainders() -> None:
    # 101 * 20 // 100 = 20 over three classes: 6, 6, 8; the other 81 over two: 40, 41.
    assert group_counts(101, 20, (2, 0), 3).tolist() == [6 + 41, 6, 8 + 40]


def test_emnist_groups_are_digits_capitals_and_small_letters() -> None:
    assert [(group[0], group[-1], len(group)) for group in PUBLISHED_GROUPS[62]] == [
        (0, 9, 10),
        (10, 35, 26),
        (36, 61, 26),
    ]


def test_twenty_cifar_clients_use_1520_or_880_of_a_class_and_share_none(make_pool: MakePool) -> None:
    pool = make_pool([5000] * 10, [1000] * 10)
    federation = partition(FedPac(), pool, seed=0)
    used = federation.label_counts(pool.y, 10).sum(0)
    assert used.tolist() == [1520, 880] * 5
    for i, client in enumerate(federation.clients):
        dominant = list(PUBLISHED_GROUPS[10][i % 5])
        test = np.bincount(pool.y[client.test], minlength=10)
        assert (test[dominant].tolist(), test.sum()) == ([86, 86, 86], 300)
    for split in ("train", "test"):
        rows = np.concatenate([getattr(client, split) for client in federation.clients])
        assert len(np.unique(rows)) == len(rows)


def test_a_hundred_cifar_clients_need_more_than_there_is(make_pool: MakePool) -> None:
    """7,600 of 5,000; class 0 goes first, at the client that finds less than its share."""
    pool = make_pool([5000] * 10, [5000] * 10)
    with pytest.raises(PartitionError) as error:
        partition(FedPac(num_clients=100), pool, seed=0)
    # Five clients use 2 * 172 + 3 * 12 = 380 of class 2; thirteen rounds use 4,940 of 5,000.
    message = "class 0 has 5000 train samples and 60 of them left, client 65 needs 172"
    assert message in str(error.value)
    assert "partition.wrap=true" in str(error.value)


def test_wrapping_lets_clients_share_but_no_client_holds_a_sample_twice(make_pool: MakePool) -> None:
    """Fashion-MNIST's test split: up to 1,520 of 1,000 of a class."""
    pool = make_pool([6000] * 10, [1000] * 10)
    with pytest.raises(PartitionError, match="has 1000 test samples"):
        partition(FedPac(test_size=600), pool, seed=0)
    clients = partition(FedPac(test_size=600, wrap=True), pool, seed=0).clients
    everything = np.concatenate([client.test for client in clients])
    assert len(everything) == 20 * 600
    assert np.bincount(np.unique(everything) >= 60_000).tolist() == [0, 9400]
    for client in clients:
        assert len(np.unique(client.test)) == 600


def test_a_client_cannot_wrap_around_itself(make_pool: MakePool) -> None:
    with pytest.raises(PartitionError, match=r"class 0 has 100 train samples, client 0 needs 172"):
        partition(FedPac(wrap=True), make_pool([100] * 10, [100] * 10), seed=0)


def test_groups_must_fit_the_data(make_pool: MakePool) -> None:
    pool = make_pool([500] * 7, [100] * 7)
    with pytest.raises(PartitionError, match="published groups for 10 and 62 classes, the data have 7"):
        partition(FedPac(), pool, seed=0)
    with pytest.raises(PartitionError, match=r"names class 7, the data have classes 0\.\.6"):
        partition(FedPac(groups=((0, 7),)), pool, seed=0)
    counts = partition(
        FedPac(groups=((0, 1), (5, 6)), num_clients=2, train_size=70, test_size=7), pool, seed=0
    ).label_counts(pool.y, 7)
    assert counts.tolist() == [[30, 30, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 30, 30]]
