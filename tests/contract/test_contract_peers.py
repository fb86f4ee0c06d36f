"""Methods whose clients hear some others' models only: whom a tie or a draw leaves out depends on labels."""

from __future__ import annotations

import pytest
import torch

from raypfl.config import StrictModel
from raypfl.engine.local import LocalEngine
from raypfl.methods.apple import Config as APPLE
from raypfl.methods.fedfomo import Config as FedFomo
from raypfl.testing.harness import NETS, SIZES, Simulation, same, toy, trace, world
from raypfl.testing.row import Row, nothing

N = len(SIZES)
OPTIONS: dict[str, StrictModel] = {
    "fedfomo": FedFomo(num_models=2),
    "fedfomo that explores": FedFomo(num_models=2, epsilon=0.5),
    "apple": APPLE(eta2=0.01),
    "apple with caches": APPLE(eta2=0.01, max_downloads=2),
}
each = pytest.mark.parametrize(
    "row", [Row(name, options, up=nothing, down=nothing) for name, options in OPTIONS.items()], ids=OPTIONS
)


def engine_of(row: Row, hosts: int) -> LocalEngine:
    layout = {"num_actors": hosts, "block": 1, "width": 1}
    return LocalEngine(*world(row, toy(), NETS["conv"], participation={"fraction": 0.67}, engine=layout))


@each
def test_hosts_that_hold_other_pools_give_the_same_bits(row):
    """Also a host that has one participant, or none."""
    traces = [trace(engine_of(row, hosts), (1, 2, 3, 4)) for hosts in (1, 2, 6)]
    assert same(traces[0], traces[1]) and same(traces[0], traces[2])


@each
def test_one_client_at_a_time_equals_all_at_once(row):
    together, alone = (
        Simulation(row, NETS["conv"].float64(), toy(), together=together).run(4) for together in (True, False)
    )
    for one, other in zip((*together.state, *together.hub), (*alone.state, *alone.hub), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@each
def test_a_host_gets_what_its_participants_receive(row):
    engine = engine_of(row, 3)
    trace(engine, (1, 2))
    _, work = engine.hub.open(3, train=True, evaluate_pre=False, evaluate_post=False)
    method, plan, net = engine.hub.method, engine.hub.plan, engine.hub.net
    assert plan.peers is not None
    for own in work:
        heard = plan.peers[torch.isin(plan.ids, own.ids)]
        needed = set(heard[heard >= 0].tolist())
        if row.name == "apple" and len(own.ids):
            needed |= set(own.ids.tolist())
        (pool,) = (getattr(own.down, name) for name in ("models", "cores") if hasattr(own.down, name))
        assert pool.shape == (1, len(needed), net.num_weights)
    messages = method.sent_down(net, plan, method.download(net, engine.hub.hub, plan))
    models = sum(message.values for message in messages if message.kind in ("models", "cores"))
    assert models == int((plan.peers >= 0).sum()) * net.num_weights


@each
def test_a_model_reaches_only_those_that_the_plan_lets_hear_it(row):
    """One client's model at the server is another one: who does not receive it trains to the same bits."""
    run = Simulation(row, NETS["mlp"].float64(), toy()).run(2)
    method, net, everyone = run.method, run.net, run.clients.ids
    plan = method.plan(net, run.hub, run.clients, 3, lambda round: everyone)
    field = run.hub._fields[0]
    changed = getattr(run.hub, field).clone()
    changed[4] += 0.5
    ups = [
        method.local_update(run.cohort(everyone), run.state, method.download(net, hub, plan))[1]
        for hub in (run.hub, run.hub._replace(**{field: changed}))
    ]
    moved = (ups[0][0] != ups[1][0]).any(1)
    assert plan.peers is not None
    hears = (plan.peers == 4).any(1)
    assert not (moved & ~hears).any()
    assert moved.any()
