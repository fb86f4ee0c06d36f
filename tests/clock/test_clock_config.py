"""Options of virtual time: what they mean, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest
from small_runs import CONFIG

from raypfl.clock import VirtualClock, drops_out, random_order, speeds_of
from raypfl.configuration import load
from raypfl.errors import ConfigError

N = 2000
SIZES = np.full(N, 10)


def speeds(**options: object) -> np.ndarray:
    return speeds_of(VirtualClock(compute=options), np.ones(N), SIZES, seed=3).compute


def test_one_value_is_for_everybody() -> None:
    found = speeds_of(VirtualClock(compute=2, latency=0.5, bandwidth=8.0), np.full(3, 5.0), SIZES[:3], 0)
    assert found.compute.tolist() == [10.0] * 3
    assert found.latency.tolist() == [0.5] * 3 and found.bandwidth.tolist() == [8.0] * 3
    free = speeds_of(VirtualClock(), np.ones(3), SIZES[:3], 0)
    assert free.bandwidth.tolist() == [np.inf] * 3 and free.latency.tolist() == [0.0] * 3


def test_by_the_sample() -> None:
    clock = VirtualClock(compute={"name": "given", "values": [1.0, 0.5]}, unit="sample")
    found = speeds_of(clock, np.array([2.0, 3.0]), np.array([10, 100]), seed=0)
    assert found.compute.tolist() == [20.0, 150.0]


def test_laws_have_their_parameters() -> None:
    drawn = speeds(name="lognormal", median=4.0, sigma=0.5)
    assert np.median(drawn) == pytest.approx(4.0, rel=0.05)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)
    slow = speeds(name="two", value=1.0, other=10.0, share=0.2)
    assert set(slow.tolist()) == {1.0, 10.0}
    assert (slow == 10.0).mean() == pytest.approx(0.2, abs=0.03)


def test_draws_belong_to_seed_client_and_purpose() -> None:
    law = {"name": "lognormal", "median": 1.0, "sigma": 1.0}
    clock = VirtualClock(compute=law, latency=law)
    one = speeds_of(clock, np.ones(8), SIZES[:8], seed=3)
    assert np.array_equal(one.compute, speeds_of(clock, np.ones(8), SIZES[:8], seed=3).compute)
    # More clients do not move those who were there.
    assert np.array_equal(one.compute, speeds_of(clock, np.ones(9), SIZES[:9], seed=3).compute[:8])
    assert not np.isin(one.compute, speeds_of(clock, np.ones(8), SIZES[:8], seed=4).compute).any()
    assert not np.isin(one.compute, one.latency).any()


def test_who_fails_also_does_at_a_higher_probability() -> None:
    ids = np.arange(N)
    few, many = (drops_out(VirtualClock(drop_out=share), 3, 7, ids) for share in (0.1, 0.4))
    assert few.mean() == pytest.approx(0.1, abs=0.02) and many.mean() == pytest.approx(0.4, abs=0.03)
    assert not (few & ~many).any()
    assert np.array_equal(few[5:9], drops_out(VirtualClock(drop_out=0.1), 3, 7, ids[5:9]))
    assert not np.array_equal(few, drops_out(VirtualClock(drop_out=0.1), 3, 8, ids))


def test_a_random_order_is_new_every_round() -> None:
    ids = np.array([1, 4, 6, 8, 9])
    orders = [tuple(random_order(3, round, ids).tolist()) for round in range(1, 9)]
    assert all(sorted(order) == ids.tolist() for order in orders)
    assert len(set(orders)) > 4
    assert orders[0] == tuple(random_order(3, 1, ids).tolist())


@pytest.mark.parametrize(
    ("method", "clock", "says"),
    [
        (
            "fedavg",
            {"mode": "async"},
            ["clock.mode = async", "without a server", "not for fedavg", "ua_pdfl"],
        ),
        ("fedavg", {"order": "gs_index"}, ["clock.order = gs_index", "not for fedavg"]),
        ("fedamp", {"timeout": 2.0}, ["clock.timeout = 2.0", "not for fedamp"]),
        ("ua_pdfl", {"deadline": 2.0}, ["clock.deadline = 2.0", "with a server", "not for ua_pdfl"]),
        ("peer_fedavg", {"over_selection": 1.5}, ["clock.over_selection = 1.5", "not for peer_fedavg"]),
        ("fedavg", {"over_selection": 0.9}, ["clock.over_selection", "0.9", "1"]),
        ("fedavg", {"deadlin": 3}, ["clock.deadlin: unknown key", "Did you mean deadline?"]),
        ("fedavg", {"deadline": 0}, ["clock.deadline", "0"]),
        ("fedavg", {"drop_out": 1.0}, ["clock.drop_out", "1"]),
        ("fedavg", {"compute": -1.0}, ["clock.compute", "-1"]),
        (
            "fedavg",
            {"compute": {"name": "lognorml", "median": 1}},
            ["clock.compute", "lognorml", "Did you mean lognormal?"],
        ),
        (
            "fedavg",
            {"latency": {"name": "given", "values": [1.0, 2.0]}},
            ["clock.latency.values", "2", "4 clients"],
        ),
        ("fedavg", {"bandwidth": {"name": "given", "values": [1, 1, 0, 1]}}, ["bandwidth", "more than 0"]),
        ("ua_pdfl", {"mode": "async", "order": "gs_index"}, ["order = gs_index", "mode = async"]),
        ("ua_pdfl", {"period": 3.0}, ["offset and period are for mode = async"]),
    ],
)
def test_what_cannot_be_is_refused(method: str, clock: dict[str, object], says: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load({**CONFIG, "method": {"name": method}, "clock": clock})
    for words in says:
        assert words in str(refused.value)


def test_options_on_the_command_line() -> None:
    config = load(CONFIG, ["clock.deadline=4", "clock.compute={name: two, value: 1, other: 9, share: 0.25}"])
    assert config.clock is not None and config.clock.deadline == 4.0
    assert load(CONFIG).clock is None
