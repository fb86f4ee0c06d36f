"""FedProto's partition: how many classes a client has, and how many samples of each."""

from collections.abc import Callable

import numpy as np
import pytest
from pydantic import ValidationError

from raypfl.data import Pool, partition
from raypfl.data.partitions.ways_shots import WaysShots
from raypfl.errors import PartitionError

MakePool = Callable[..., Pool]


def test_clients_have_every_allowed_number_of_classes_and_as_many_samples_of_each(
    make_pool: MakePool,
) -> None:
    pool = make_pool([130] * 10, [20] * 10)
    ways, shots = set(), set()
    for client in partition(WaysShots(num_clients=300, ways=5), pool, seed=0).clients:
        labels, counts = np.unique(pool.y[client.train], return_counts=True)
        tested, test_counts = np.unique(pool.y[client.test], return_counts=True)
        assert labels.tolist() == tested.tolist() and set(test_counts.tolist()) == {15}
        (count,) = set(counts.tolist())
        ways.add(len(labels))
        shots.add(count)
    assert ways == {3, 4, 5, 6, 7} and shots == {99, 100, 101}


@pytest.mark.parametrize(
    "options, classes, expected",
    [({"ways": 3}, 10, {2, 3, 4, 5}), ({"ways": 4}, 5, {2, 3, 4}), ({"ways": 9, "spread": 1}, 10, {8, 9})],
    ids=["at least two", "fewer than all", "at the upper end"],
)
def test_two_classes_at_least_and_never_all(
    make_pool: MakePool, options: dict[str, int], classes: int, expected: set[int]
) -> None:
    pool = make_pool([130] * classes, [20] * classes)
    clients = partition(WaysShots(num_clients=200, **options), pool, seed=1).clients
    assert {len(np.unique(pool.y[client.train])) for client in clients} == expected


def test_what_cannot_be_is_refused(make_pool: MakePool) -> None:
    with pytest.raises(ValidationError, match=r"leave clients without samples. Use spread <= 3"):
        WaysShots(shots=3, spread=4)
    with pytest.raises(PartitionError, match=r"have 8 classes at least, but fewer than all 5 of the data"):
        partition(WaysShots(ways=10), make_pool([130] * 5, [20] * 5), seed=0)
    with pytest.raises(PartitionError, match=r"Lower partition.test_shots, or set partition.when_short"):
        partition(WaysShots(), make_pool([130] * 10, [14] * 10), seed=0)
