"""Intervals, by the textbook's arithmetic on numbers small enough for it."""

import numpy as np
import pytest
from scipy.stats import t

from raypfl.report.intervals import paired_interval


def test_clients_of_one_seed_are_the_sample():
    found = paired_interval([np.array([1.0, 2.0, 3.0, 6.0])], crossed=True)
    # Mean 3, variance (4 + 1 + 0 + 9) / 3.
    half = t.ppf(0.975, 3) * np.sqrt(14 / 3 / 4)
    assert found.mean == 3.0 and found.freedom == 3
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))


def test_means_of_seeds_are_the_sample_where_each_has_its_own_clients():
    seeds = [np.array([0.0, 2.0]), np.array([3.0, 1.0, 2.0]), np.array([3.0])]
    found = paired_interval(seeds, crossed=False)
    half = t.ppf(0.975, 2) * np.sqrt(1.0 / 3)
    assert found.mean == 2.0 and found.freedom == 2
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))


def test_same_clients_in_every_seed_are_a_two_way_table():
    # Seeds differ by 3 and clients by 2; nothing is left, so MS_rest = 0.
    table = np.array([[0.0, 2.0, 4.0], [3.0, 5.0, 7.0]])
    found = paired_interval(list(table), crossed=True)
    ms_seeds, ms_clients = 3 * 4.5, 2 * 4.0
    variance = (ms_seeds + ms_clients) / 6
    freedom = (ms_seeds + ms_clients) ** 2 / (ms_seeds**2 / 1 + ms_clients**2 / 2)
    assert found.mean == 3.5 and found.freedom == pytest.approx(freedom)
    assert found.high - found.mean == pytest.approx(t.ppf(0.975, freedom) * np.sqrt(variance))


def test_seeds_that_differ_less_than_chance_add_nothing():
    table = np.array([[0.0, 2.0, 4.0], [1.0, 2.0, 3.0]])
    found = paired_interval(list(table), crossed=True)
    # MS_seeds is 0; clients have means 0.5, 2 and 3.5.
    variance = 2 * 2.25 / 6
    assert found.freedom == 2
    assert found.high - found.mean == pytest.approx(t.ppf(0.975, 2) * np.sqrt(variance))


def test_covers_the_truth_as_often_as_it_says():
    """Of 400 made-up comparisons with 5 seeds of the same 8 clients, about 95 % have 0 in the interval."""
    random = np.random.Generator(np.random.PCG64(0))
    inside = 0
    for _ in range(400):
        seeds, clients = random.normal(size=(5, 1)), 2 * random.normal(size=(1, 8))
        found = paired_interval(list(seeds + clients + random.normal(size=(5, 8))), crossed=True)
        inside += not found.excludes_zero
    assert 0.92 < inside / 400 < 0.98


@pytest.mark.parametrize("differences", [[np.array([1.0])], [np.array([1.0])]])
def test_one_number_has_no_interval(differences):
    found = paired_interval(differences, crossed=True)
    assert found.mean == 1.0 and np.isnan(found.low) and not found.excludes_zero


def test_one_client_in_several_seeds():
    found = paired_interval([np.array([1.0]), np.array([3.0])], crossed=True)
    assert found.mean == 2.0 and found.freedom == 1
    assert found.high - found.mean == pytest.approx(t.ppf(0.975, 1) * 1.0)
