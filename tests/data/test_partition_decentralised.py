"""IID, shards and fixed numbers of classes."""

from collections.abc import Callable

import numpy as np
import pytest

from raypfl.data import Pool, partition
from raypfl.data.partitions.decentralised import FixedClasses, Iid, Shards
from raypfl.errors import PartitionError

MakePool = Callable[..., Pool]

PATHMNIST = [9366, 9509, 10360, 10401, 8006, 12182, 7886, 9401, 12885]


@pytest.fixture
def pathmnist(make_pool: MakePool) -> Pool:
    return make_pool(PATHMNIST, [1] * 9)


def labels_per_client(pool: Pool, clients: tuple[tuple[np.ndarray, ...], ...]) -> list[int]:
    return [len(np.unique(pool.y[np.concatenate(client)])) for client in clients]


def test_iid_is_equal_and_like_the_whole(pathmnist: Pool) -> None:
    federation = partition(Iid(), pathmnist, seed=0)
    size = 89_996 // 30
    assert {(len(c.train), len(c.test)) for c in federation.clients} == {(size - size // 5, size // 5)}
    expected = np.array(PATHMNIST) / 89_996 * (size - size // 5)
    deviations = (federation.label_counts(pathmnist.y, 9) - expected) / np.sqrt(expected)
    assert np.abs(deviations).max() < 5


def test_shards_cover_the_pool_and_mostly_hold_two_classes(pathmnist: Pool) -> None:
    clients = partition(Shards(), pathmnist, seed=0).clients
    rows = np.concatenate([np.concatenate(client) for client in clients])
    np.testing.assert_array_equal(np.sort(rows), np.arange(89_996))
    # 60 shards of 1,499 or 1,500, two each.
    assert {len(c.train) + len(c.test) for c in clients} <= {2998, 2999, 3000}
    held = labels_per_client(pathmnist, clients)
    assert max(held) <= 4
    assert np.median(held) == 2


def test_fixclass_has_exactly_its_classes_and_counts(pathmnist: Pool) -> None:
    clients = partition(FixedClasses(), pathmnist, seed=0).clients
    assert labels_per_client(pathmnist, clients) == [2] * 30
    for client in clients:
        rows = np.concatenate([client.train, client.test])
        assert np.unique(np.bincount(pathmnist.y[rows], minlength=9)).tolist() == [0, 1499]


def test_fixclass_that_does_not_fit_names_class_and_shortage(make_pool: MakePool) -> None:
    with pytest.raises(PartitionError, match=r"class [01] has 50 train samples, client 0 needs 100\. Raise"):
        partition(FixedClasses(num_clients=1, classes_per_client=2), make_pool([50, 50, 100], [1] * 3), 0)
    with pytest.raises(PartitionError, match="every client needs 4 classes, the data have 3"):
        partition(FixedClasses(classes_per_client=4), make_pool([50] * 3, [1] * 3), 0)
