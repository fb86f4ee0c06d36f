"""Dirichlet over clients with the size cap, in its two published forms."""

from collections.abc import Callable

import numpy as np
import pytest

from raypfl.data import Pool, partition
from raypfl.data.partitions.classes import ClassRows
from raypfl.data.partitions.dirichlet_clients import DirichletClients, DirichletMerged, deal_capped
from raypfl.errors import PartitionError
from raypfl.rng import numpy_generator

MakePool = Callable[..., Pool]


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool([500] * 10, [100] * 10)


def test_training_pool_is_covered(pool: Pool) -> None:
    clients = partition(DirichletClients(), pool, seed=0).clients
    rows = np.concatenate([np.concatenate(client) for client in clients])
    np.testing.assert_array_equal(np.sort(rows), np.arange(5000))
    assert min(len(client.train) + len(client.test) for client in clients) >= 15


def test_merged_pool_is_covered(pool: Pool) -> None:
    clients = partition(DirichletMerged(alpha=0.1), pool, seed=0).clients
    rows = np.concatenate([np.concatenate(client) for client in clients])
    np.testing.assert_array_equal(np.sort(rows), np.arange(6000))
    assert min(len(client.train) + len(client.test) for client in clients) >= 40


def test_smallest_client_of_the_merged_form() -> None:
    """min(10 / 0.25, N / m / 2)."""
    assert DirichletMerged(num_clients=10).smallest(60_000) == 40
    assert DirichletMerged(num_clients=10).smallest(600) == 30


def test_shares_become_even_as_alpha_grows(pool: Pool) -> None:
    federation = partition(DirichletMerged(alpha=1e6), pool, seed=0)
    totals = [np.bincount(pool.y[np.concatenate(c)], minlength=10) for c in federation.clients]
    np.testing.assert_allclose(np.stack(totals) / 600, 0.1, atol=0.005)


def test_a_client_at_the_average_gets_no_further_class(pool: Pool) -> None:
    """Tested before a class is dealt, so what a client held before its last class is below the average."""
    clients = deal_capped(ClassRows.of(pool, "train"), 10, 0.1, numpy_generator(1))
    above = 0
    for rows in clients:
        counts = np.bincount(pool.y[rows], minlength=10)
        assert counts.sum() - counts[np.flatnonzero(counts)[-1]] < 500
        above += counts.sum() > 500
    assert above


def test_a_draw_that_cannot_succeed_says_which_rule_and_what_to_do(pool: Pool) -> None:
    with pytest.raises(PartitionError) as error:
        partition(DirichletClients(alpha=0.01, num_clients=100), pool, seed=0)
    message = str(error.value)
    assert "1000 draws of dirichlet_clients with alpha = 0.01 over 100 clients" in message
    assert "needed 15. Raise partition.alpha" in message


def test_underflow_is_drawn_again(make_pool: MakePool) -> None:
    """At such an alpha one client takes a whole class; ten clients, ten classes: each gets one."""
    pool = make_pool([50] * 10, [1] * 10)
    clients = partition(DirichletClients(alpha=1e-4, num_clients=10), pool, seed=0).clients
    assert [len(client.train) + len(client.test) for client in clients] == [50] * 10
