"""What every method promises under a virtual clock: a barrier changes no bit, turns and own paces few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypfl.engine.local import LocalEngine
from raypfl.methods import METHODS
from raypfl.testing.contract_engine import commit, layout
from raypfl.testing.harness import NETS, SIZES, Net, Toy, records_of, same, toy, trace, world
from raypfl.testing.row import Row
from raypfl.testing.table import only

N = len(SIZES)
SLOW = (1, 4)
SPEEDS = [1000.0 if client in SLOW else 1.0 for client in range(N)]
served = only(lambda row: not row.without_server)
in_turn = only(lambda row: METHODS[row.options.name].by_turns)
ORDERS = [
    {"order": "gs_index"},
    {"order": "gs_random", "drop_out": 0.3},
    {
        "mode": "async",
        "compute": {"name": "given", "values": [1.0, 0.3, 2.0, 1.0, 0.7, 5.0]},
        "drop_out": 0.2,
    },
]
each_order = pytest.mark.parametrize("clock", ORDERS, ids=["index", "random", "own pace"])


@pytest.fixture(scope="module")
def federation() -> Toy:
    return toy()


def engine_of(row: Row, federation: Toy, net: Net = NETS["mlp"], **settings: Any) -> LocalEngine:
    return LocalEngine(*world(row, federation, net, **settings))


def stays(engine: LocalEngine, round: int) -> list[dict[str, Any]]:
    """The clock's rows of a round."""
    found = engine.round(round, evaluate_pre=False, evaluate_post=False).clock
    assert found is not None
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def test_a_barrier_and_equal_speeds_change_no_bit(row: Row, federation: Toy) -> None:
    some: dict[str, Any] = {"participation": {"fraction": 0.67}}
    expected = trace(engine_of(row, federation, **some), (1, 2))
    engine = engine_of(row, federation, clock={}, **some)
    assert same(trace(engine, (1, 2)), expected)
    (whole,) = (stay for stay in stays(engine, 3) if stay["client"] == -1)
    passes = {engine.hub.method.passes(engine.hub.world.config.training, size) for size in SIZES}
    if len(passes) == 1 and row.trains == "sampled":
        assert (whole["start"], whole["end"]) == pytest.approx((2 * max(passes), 3 * max(passes)))


@served
@pytest.mark.parametrize("net", [NETS["mlp"], NETS["conv"]], ids=["mlp", "conv"])
def test_what_will_be_uploaded_is_known_before(row: Row, net: Net, federation: Toy) -> None:
    engine = engine_of(row, federation, net)
    found = trace(engine, (1, 2))
    sent = [0] * N
    for src, dst, _, _, size in found.messages:
        if dst == -1:
            sent[src] += size
    known = engine.hub.method.upload_bytes(engine.hub.net, engine.hub.clients)
    assert known is not None and known.dtype == torch.int64
    assert (2 * known).tolist() == sent


@served
def test_who_is_late_is_as_if_it_had_not_taken_part(row: Row, federation: Toy) -> None:
    clock = {"deadline": 100.0, "compute": {"name": "given", "values": SPEEDS}}
    engine = engine_of(row, federation, clock=clock)
    began = [torch.cat(parts) for parts in zip(*engine.hosts[0].state.values(), strict=True)]
    found = trace(engine, (1, 2))
    trained = {client for _, client, _, _, split in found.records if split == "train"}
    assert trained == set(range(N)) - set(SLOW)
    assert {src for src, dst, *_ in found.messages if dst == -1} <= trained
    received = {dst for _, dst, *_ in found.messages} - {-1}
    assert received in (set(range(N)), set()), "what was sent to those who are late was sent"
    for old, new in zip(began, found.state, strict=False):
        assert torch.equal(old[list(SLOW)], new[list(SLOW)])


@in_turn
def test_alone_each_gets_its_row_of_what_all_get(row: Row, federation: Toy) -> None:
    engine = engine_of(row, federation, NETS["conv"])
    trace(engine, (1, 2))
    hub = engine.hub
    plan = hub.method.plan(hub.net, hub.hub, hub.clients, 3, hub.sample)
    together = hub.method.download(hub.net, hub.hub, plan)
    messages = hub.method.sent_down(hub.net, plan, together)
    for place, client in enumerate(plan.ids.tolist()):
        own = plan.among(plan.ids == client)
        down = hub.method.download(hub.net, hub.hub, own)
        for name, whole, field in zip(down._fields, together, down, strict=True):
            expected = whole if name in hub.method.shared else whole[place : place + 1]
            assert torch.equal(field, expected), name
        sent = [message for message in hub.method.sent_down(hub.net, own, down) if message.dst == client]
        assert sorted(sent) == sorted(message for message in messages if message.dst == client)


@in_turn
@pytest.mark.parametrize("net", [NETS["mlp"], NETS["conv with local statistics"]], ids=["mlp", "conv"])
def test_equally_fast_peers_without_a_barrier_are_synchronous(row: Row, net: Net, federation: Toy) -> None:
    alone: dict[str, Any] = {"engine": {"width": 1}}
    plain = engine_of(row, federation, net, **alone)
    engine = engine_of(row, federation, net, clock={"mode": "async"}, **alone)
    assert same(trace(engine, (1, 2, 3)), trace(plain, (1, 2, 3)))
    found, expected = (sorted(records_of(each.evaluate(3))) for each in (engine, plain))
    assert repr(found) == repr(expected) and len(found) >= N


@only(lambda row: row.method().by_turns and not row.method().snapshot)
def test_offsets_and_a_period_are_gauss_seidel(row: Row, federation: Toy) -> None:
    """Peer i trains in the i-th of N slots, over and over."""
    alone: dict[str, Any] = {"engine": {"width": 1}}
    expected = trace(engine_of(row, federation, clock={"order": "gs_index"}, **alone), (1,))
    slots = [2.0 * client for client in range(N)]
    staggered: dict[str, Any] = {
        "mode": "async",
        "offset": {"name": "given", "values": slots},
        "compute": 1.0,
        "period": 2.0 * N,
    }
    engine = engine_of(row, federation, clock=staggered, **alone)
    found = trace(engine, (1,))
    for one, other in zip((*found.state, *found.hub), (*expected.state, *expected.hub), strict=True):
        assert torch.equal(one, other)
    jacobi = trace(engine_of(row, federation, **alone), (1,))
    assert not torch.equal(expected.hub[0], jacobi.hub[0])


@each_order
@in_turn
def test_turns_do_not_depend_on_hosts_and_resume_to_the_same_bits(
    row: Row, clock: dict[str, Any], federation: Toy, tmp_path: Path
) -> None:
    one, three = (
        engine_of(row, federation, clock=clock, **layout(hosts, block=block, width=1))
        for hosts, block in ((1, N), (3, 2))
    )
    first = trace(one, (1, 2))
    assert same(first, trace(three, (1, 2)))
    checkpoint = commit(three, tmp_path, 2)
    expected = trace(one, (3, 4))
    assert same(trace(three, (3, 4)), expected)

    resumed = engine_of(row, federation, clock=clock, **layout(2, block=2, width=1))
    resumed.restore(checkpoint)
    assert same(trace(resumed, (3, 4)), expected)
    resumed.restore(None)
    assert same(trace(resumed, (1, 2)), first)


__all__ = ["federation", *(name for name in dir() if name.startswith("test_"))]
