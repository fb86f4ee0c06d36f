"""Class pairs, pFedMe's CIFAR-10 and natural clients."""

from collections.abc import Callable

import numpy as np
import pytest

from raypfl.data import Pool, partition
from raypfl.data.partitions.pfml import Natural, Pairs, PfmlCifar10, uneven_shares
from raypfl.errors import PartitionError
from raypfl.rng import numpy_generator

MakePool = Callable[..., Pool]


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool([600] * 10, [101] * 10)


@pytest.mark.parametrize("shares", ["equal", "pfedme"])
def test_client_i_holds_pair_i_mod_five_and_all_is_dealt(pool: Pool, shares: str) -> None:
    clients = partition(Pairs.model_validate({"shares": shares}), pool, seed=0).clients
    for i, client in enumerate(clients):
        labels = np.unique(pool.y[np.concatenate(client)])
        assert labels.tolist() == [2 * (i % 5), 2 * (i % 5) + 1]
    assert sum(len(client.train) + len(client.test) for client in clients) == 7010


def test_equal_shares_differ_by_one_at_most(pool: Pool) -> None:
    """701 of a class by four clients: 176, 175, 175, 175."""
    clients = partition(Pairs(), pool, seed=0).clients
    sizes = [len(client.train) + len(client.test) for client in clients]
    assert sizes == [352] * 5 + [350] * 15


def test_random_shares_stay_in_their_range() -> None:
    for draw in range(200):
        shares = uneven_shares(7000, 4, numpy_generator(draw), label=0)
        assert shares.sum() == 7000
        rest = 7000
        for share in shares[:-1]:
            assert rest // 5 <= share < rest // 2
            rest -= share


def test_random_shares_of_too_few_samples() -> None:
    with pytest.raises(PartitionError, match="class 3 has 1 samples, too few for random shares of 4"):
        uneven_shares(1, 4, numpy_generator(0), label=3)


def test_an_odd_number_of_classes_has_no_pairs(make_pool: MakePool) -> None:
    with pytest.raises(PartitionError, match="even number of classes, the data have 9"):
        partition(Pairs(), make_pool([50] * 9, [50] * 9), seed=0)


def test_cifar10_clients_hold_three_consecutive_classes(make_pool: MakePool) -> None:
    pool = make_pool([5000] * 10, [1000] * 10)
    for i, client in enumerate(partition(PfmlCifar10(), pool, seed=0).clients):
        train, test = (np.bincount(pool.y[rows], minlength=10) for rows in (client.train, client.test))
        held = train + test
        assert set(np.flatnonzero(held)) == {i % 10, (i + 1) % 10, (i + 2) % 10}
        np.testing.assert_allclose(train, 0.75 * held, atol=1)


def test_cifar10_extra_samples_are_granted_whole_or_not_at_all() -> None:
    sizes = np.full(10, 6000)
    refused = 0
    for seed in range(20):
        counts = PfmlCifar10().counts(sizes, numpy_generator(seed))
        extra = counts[counts > 0] - 10
        # Twice a number of at least 300, or nothing; a class is never used up.
        assert len(extra) == 60
        assert ((extra == 0) | (extra >= 600)).all()
        assert (extra % 2 == 0).all()
        assert (counts.sum(0) < 6000).all()
        refused += (extra == 0).sum()
    assert refused


def test_cifar10_needs_ten_classes_of_sixty(make_pool: MakePool) -> None:
    with pytest.raises(PartitionError, match="deals 10 classes, the data have 9"):
        partition(PfmlCifar10(), make_pool([500] * 9, [100] * 9), seed=0)
    with pytest.raises(PartitionError, match="class 4 has 59 samples, its clients need 60"):
        partition(PfmlCifar10(), make_pool([500] * 4 + [50] + [500] * 5, [9] * 10), seed=0)


def test_natural_clients_must_be_there(make_pool: MakePool) -> None:
    with pytest.raises(PartitionError, match="toy has no natural clients"):
        partition(Natural(), make_pool([5, 5], [5, 5]), seed=0)
    owned = make_pool([8, 8], [0, 0], owner=np.arange(16) % 4)
    with pytest.raises(PartitionError, match=r"toy has 4 natural clients, partition\.num_clients = 5"):
        partition(Natural(num_clients=5), owned, seed=0)
    assert partition(Natural(num_clients=3), owned, seed=0).sizes.tolist() == [3, 3, 3]
