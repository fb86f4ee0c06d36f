import numpy as np
import pytest

from raypfl.records.statistics import client_statistics


def test_numbers_by_hand():
    found = client_statistics(np.array([0.5, 1.0, 0.0]), np.array([1.0, 2.0, 6.0]), np.array([1, 2, 5]))
    assert found.clients == 3
    assert found.accuracy_mean == pytest.approx(0.5)
    assert found.accuracy_weighted == pytest.approx((0.5 + 2.0) / 8)
    assert found.accuracy_sd == pytest.approx((0.5 / 3) ** 0.5)  # divisor 3, not 2
    assert found.accuracy_worst_decile == 0.0
    assert found.loss_mean == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("clients", "worst"), [(1, 0.0), (9, 0.0), (19, 0.0), (20, 0.5), (39, 1.0), (40, 1.5)]
)
def test_worst_decile_rounds_down_but_has_a_client(clients, worst):
    # Values 0, 1, 2, ... in any order: the k worst have the mean (k - 1) / 2, with k = 1, 1, 1, 2, 3, 4.
    values = np.roll(np.arange(clients, dtype=float), 5)
    assert client_statistics(values, values, np.ones(clients, int)).accuracy_worst_decile == worst


def test_clients_without_samples_do_not_count():
    found = client_statistics(np.array([0.5, np.nan]), np.array([1.0, np.nan]), np.array([4, 0]))
    assert (found.clients, found.accuracy_mean, found.loss_mean) == (1, 0.5, 1.0)


def test_nobody_has_samples():
    found = client_statistics(np.array([np.nan]), np.array([np.nan]), np.array([0]))
    assert found.clients == 0
    assert np.isnan(found[1:]).all()
