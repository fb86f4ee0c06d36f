"""What holds for every partition; one row a partition."""

from collections.abc import Callable

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from raypfl.data import PARTITIONS, Federation, PartitionConfig, Pool, partition
from raypfl.errors import PartitionError

MakePool = Callable[..., Pool]
CONFIG: TypeAdapter[PartitionConfig] = TypeAdapter(PartitionConfig)

# name -> options that fit 1,000 training and 203 test samples of each of ten classes
OPTIONS: dict[str, dict[str, object]] = {
    "pathological": {},
    "dirichlet": {"alpha": 0.3, "train_size": 300},
    "practical": {},
    "dirichlet_clients": {},
    "dirichlet_merged": {},
    "iid": {},
    "shards": {},
    "fixclass": {},
    "fedpac": {"train_size": 300, "test_size": 50},
    "ways_shots": {},
    "pairs": {},
    "pfml_cifar10": {},
    "natural": {},
}
PER_CLIENT = ["pathological", "dirichlet", "practical", "fedpac", "ways_shots", "natural"]
SHARES_SAMPLES = {"pathological", "dirichlet", "practical", "fixclass", "ways_shots"}


def draw(name: str, pool: Pool, seed: int = 0, **options: object) -> Federation:
    return partition(CONFIG.validate_python({"name": name, **OPTIONS[name], **options}), pool, seed)


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool([1000] * 10, [203] * 10, owner=np.arange(12_030) % 100)


def test_the_table_has_every_partition() -> None:
    assert list(PARTITIONS) == list(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_seed_decides_and_the_partitions_own_seed_goes_first(name: str, pool: Pool) -> None:
    federation = draw(name, pool, seed=3)
    assert federation.fingerprint == draw(name, pool, seed=3).fingerprint
    assert federation.fingerprint != draw(name, pool, seed=4).fingerprint
    own = CONFIG.validate_python({"name": name, **OPTIONS[name], "seed": 3})
    assert partition(own, pool, seed=4).fingerprint == federation.fingerprint


@pytest.mark.parametrize("name", OPTIONS)
def test_splits_of_a_client_are_disjoint_and_without_duplicates(name: str, pool: Pool) -> None:
    for client in draw(name, pool, validation_fraction=0.2).clients:
        rows = np.concatenate(client)
        assert len(np.unique(rows)) == len(rows)
        assert rows.dtype == np.int64
        assert min(map(len, client)) >= 1
        assert rows.min() >= 0 and rows.max() < 12_030


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - SHARES_SAMPLES))
def test_clients_are_disjoint(name: str, pool: Pool) -> None:
    rows = np.concatenate([np.concatenate(client) for client in draw(name, pool).clients])
    assert len(np.unique(rows)) == len(rows)


@pytest.mark.parametrize("name", OPTIONS)
def test_validation_is_taken_from_training_and_leaves_the_test_split(name: str, pool: Pool) -> None:
    without, with_it = draw(name, pool), draw(name, pool, validation_fraction=0.1)
    for before, after in zip(without.clients, with_it.clients, strict=True):
        assert len(before.validation) == 0
        assert len(after.validation) == max(1, int(0.1 * len(before.train) + 1e-9))
        np.testing.assert_array_equal(
            np.sort(np.concatenate([after.train, after.validation])), np.sort(before.train)
        )
        np.testing.assert_array_equal(after.test, before.test)


@pytest.mark.parametrize("name", PER_CLIENT)
def test_a_client_does_not_depend_on_how_many_others_there_are(name: str, pool: Pool) -> None:
    few = draw(name, pool, num_clients=3, validation_fraction=0.1)
    many = draw(name, pool, num_clients=7, validation_fraction=0.1)
    assert Federation(many.clients[:3]).fingerprint == few.fingerprint


@pytest.mark.parametrize("name", ["pathological", "dirichlet", "practical", "fedpac"])
def test_training_and_test_samples_come_from_their_official_splits(name: str, pool: Pool) -> None:
    for client in draw(name, pool).clients:
        assert client.train.max() < pool.num_train <= client.test.min()


@pytest.mark.parametrize("name", ["dirichlet_clients", "iid", "shards", "fixclass"])
def test_the_official_test_split_is_not_used(name: str, pool: Pool) -> None:
    for client in draw(name, pool).clients:
        assert max(map(np.max, (client.train, client.test))) < pool.num_train
        assert len(client.test) == int(0.2 * (len(client.train) + len(client.test)) + 1e-9)


@pytest.mark.parametrize("name", ["dirichlet_merged", "pairs", "pfml_cifar10", "natural"])
def test_three_quarters_of_the_merged_splits_rounded_down_are_for_training(name: str, pool: Pool) -> None:
    clients = draw(name, pool).clients
    for client in clients:
        assert len(client.train) == int(0.75 * (len(client.train) + len(client.test)))
    assert max(client.train.max() for client in clients) >= pool.num_train


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "options", [{"num_clients": 0}, {"validation_fraction": 1.0}, {"typo": 1}, {"seed": "x"}]
)
def test_options_are_checked(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CONFIG.validate_python({"name": name, **OPTIONS[name], **options})


@pytest.mark.parametrize(
    "options",
    [
        {"name": "dirichlet", "alpha": 0},
        {"name": "dirichlet", "alpha": float("nan")},
        {"name": "dirichlet", "alpha": float("inf")},
        {"name": "pathological", "train_size": 301},
        {"name": "practical", "dominant_fraction": 1.5},
        {"name": "iid", "test_fraction": 1},
        {"name": "fedpac", "uniform_percent": 101},
        {"name": "fedpac", "groups": [[0, 0]]},
        {"name": "fedpac", "groups": []},
        {"name": "pfml_cifar10", "num_clients": 10},
    ],
)
def test_ranges_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CONFIG.validate_python(options)


def test_a_client_without_samples_is_an_error(make_pool: MakePool) -> None:
    with pytest.raises(PartitionError, match="partition iid of toy: client 0 of 30 gets no train sample"):
        draw("iid", make_pool([2] * 10, [1] * 10))
    with pytest.raises(PartitionError, match="client 0 of 30 gets no test sample"):
        draw("iid", make_pool([9] * 10, [1] * 10))


def test_one_training_sample_cannot_be_divided_for_validation(make_pool: MakePool) -> None:
    pool = make_pool([5, 5], [5, 5])
    config = {"num_clients": 1, "train_size": 1, "test_size": 1, "validation_fraction": 0.1}
    with pytest.raises(PartitionError, match="client 0 has 1 training sample, too few for"):
        draw("dirichlet", pool, **config)


def test_copies_of_a_sample_never_straddle_training_and_validation(make_pool: MakePool) -> None:
    pool = make_pool([20, 20], [9, 9])
    federation = draw(
        "pathological", pool, train_size=400, test_size=2, when_short="replace", validation_fraction=0.25
    )
    for client in federation.clients:
        assert len(client.train) + len(client.validation) == 400
        assert not set(client.train) & set(client.validation)
        assert len(np.unique(client.validation)) == 10
