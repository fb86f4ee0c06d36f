"""UA-PDFL by hand: the round's mixing, its degenerate cases, its ledger, broken peers."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
import torch
from pydantic import ValidationError
from test_peers import rounds
from torch import nn

from raypfl.errors import ConfigError
from raypfl.methods.peer_fedavg import Config as FedAvgConfig
from raypfl.methods.peer_fedavg import PeerFedAvg
from raypfl.methods.peer_fedper import Config as FedPerConfig
from raypfl.methods.peer_fedper import PeerFedPer
from raypfl.methods.ua_pdfl import UAPDFL, Config, Published
from raypfl.methods.ua_pdfl_decision import draw_peer
from raypfl.models import BatchNorm1d
from raypfl.topology import Full, KOut
from raypfl.training import SGD, Network, TrainingConfig, cross_entropy

MOMENTUM = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.5))
UNMOVED = TrainingConfig(epochs=1, batch_size=3, optimizer=SGD(lr=1e-300))
"""Steps too small to change a number."""
PULLS = KOut(k=2)
SIZES = (7, 4, 10, 5, 6, 8)


def normalised():
    layers = [("fc1", nn.Linear(4, 2)), ("norm1", BatchNorm1d(2)), ("fc2", nn.Linear(2, 3))]
    return nn.Sequential(OrderedDict([*layers, ("norm2", BatchNorm1d(3)), ("head", nn.Linear(3, 3))]))


def normalised_net(head="norm2", buffers="average"):
    return Network(normalised, head, buffers=buffers, input_shape=(4,), dtype=torch.float64)


@pytest.fixture
def deep(make_toy):
    return make_toy(SIZES, hidden=4, training=MOMENTUM, dtype=torch.float64)


@pytest.fixture
def layered(make_toy):
    """Normalisation in the extractor and in the head."""
    toy = make_toy(SIZES, training=MOMENTUM, dtype=torch.float64)
    toy.net = normalised_net()
    return toy


def method(seed=0, topology=PULLS, **options):
    return UAPDFL(Config(topology=topology, **options), seed)


def plan_of(toy, ua, hub, round=2):
    return ua.plan(toy.net, hub, toy.clients, round, lambda round: toy.clients.ids)


def hub_of(toy, p, seed=0, features=4):
    """Published models that differ, with answers `p` `[N, 3]`."""
    rows = toy.rows(seed=seed)
    used = toy.net.statistics.stop
    draw = torch.Generator().manual_seed(seed + 7)
    rows[:, :used] = torch.randn(len(rows), used, generator=draw, dtype=rows.dtype)
    a = torch.randn(len(rows), features, generator=draw, dtype=rows.dtype)
    return Published(rows[:, toy.net.shared], p.double().log(), a)


def skewed():
    """Two peers a class, each sure of its own: a pair differs by 0.001, others by 0.4."""
    p = torch.full((6, 3), 0.05, dtype=torch.float64)
    p[torch.arange(6), torch.arange(6) % 3] = torch.tensor([0.9] * 3 + [0.88] * 3, dtype=torch.float64)
    return p / p.sum(1, keepdim=True)


@pytest.mark.parametrize("kind", ["deep", "layered"])
def test_without_close_peers_and_term_it_is_fedper_bit_for_bit(kind, request):
    toy = request.getfixturevalue(kind)
    theirs = rounds(toy, PeerFedPer(FedPerConfig(topology=PULLS)), 4)
    mine = rounds(toy, method(tau=-1.0, mu=0.0), 4)
    for (_, down, hub, state), (_, other_down, other_hub, other) in zip(mine, theirs, strict=True):
        assert torch.equal(state.w, other.w)
        assert torch.equal(down.w[:, toy.net.body], other_down.w)
        assert torch.equal(hub.w[:, toy.net.body], other_hub.w)
        assert (down.pick == -1).all()


@pytest.mark.parametrize("kind", ["deep", "layered"])
@pytest.mark.parametrize("options", [{"tau": 1.0, "mu": 0.0}, {"tau": 0.0, "use_lp": False}])
def test_without_dropout_and_all_close_it_is_fedavg_bit_for_bit(kind, options, request):
    """Without layers whole models are averaged whatever the divergences; there is no term, either."""
    toy = request.getfixturevalue(kind)
    theirs = rounds(toy, PeerFedAvg(FedAvgConfig(topology=PULLS)), 4)
    mine = rounds(toy, method(use_cd=False, **options), 4)
    for (_, down, hub, state), (_, other_down, other_hub, other) in zip(mine, theirs, strict=True):
        assert torch.equal(state.w, other.w)
        assert torch.equal(down.w, other_down.w) and torch.equal(hub.w, other_hub.w)


def test_where_all_are_close_everyone_takes_a_peers_published_model(layered):
    ua = method(tau=1.0, init="independent")
    found = rounds(layered, ua, 4)
    hub = ua.init_hub(layered.net, layered.clients)
    for plan, down, after, _ in found:
        for peer in range(6):
            heard = plan.graph.sources_of(peer)
            pick = draw_peer(0, plan.round, peer, heard)
            assert pick in heard.tolist() and down.pick[peer] == pick
            assert torch.equal(down.w[peer], hub.w[pick])
        messages = ua.sent_down(layered.net, plan, down)
        assert sum(m.values for m in messages if m.kind == "full") == 6 * layered.net.shared.stop
        hub = after


def test_first_round_after_a_common_start(deep):
    """All answers are equal in every bit: everyone drops, which changes nothing; strictly, nobody does."""
    start = method().init_state(deep.net, deep.clients).w[:, deep.net.shared]
    for strict in (False, True):
        (_, down, _, _) = rounds(deep, method(tau=0.0, drop_strict=strict), 1)[0]
        assert (down.pick >= 0).tolist() == [not strict] * 6
        torch.testing.assert_close(down.w, start, rtol=1e-15, atol=0)
        assert strict or torch.equal(down.w, start)
        assert not (down.asked == 2).any()


def test_two_peers_that_are_close_swap(make_toy):
    toy = make_toy((5, 8), hidden=4, training=MOMENTUM, dtype=torch.float64)
    ua = method(topology=KOut(k=1), tau=1.0)
    (_, _, hub, _), (_, down, _, _) = rounds(toy, ua, 2)
    assert torch.equal(down.w, hub.w[[1, 0]]) and (hub.w[0] != hub.w[1]).any()


def test_mixing_by_hand_with_statistics_in_their_layers_group(layered):
    """Peer by peer: the extractor over Q_i, the head over B_i, statistics with their layer."""
    ua, net = method(tau=0.1), layered.net
    hub = hub_of(layered, skewed(), features=3)
    plan = plan_of(layered, ua, hub)
    down, sizes = ua.download(net, hub, plan), layered.clients.sizes.double()
    body, head = list(range(*net.body.indices(net.width))), list(range(*net.head.indices(net.width)))
    head += range(net.body.stop, net.shared.stop)
    assert len(body) == 10 + 4 + 9 + 4 and len(head) == 6 + 12 + 6
    seen = Counter()
    for peer in range(6):
        heard = plan.graph.sources_of(peer).tolist()
        close = [other for other in heard if other % 3 == peer % 3]
        seen[len(close)] += 1
        for columns, group in ((body, [peer, *heard]), (head, [peer, *close])):
            share = sizes[group] / sizes[group].sum()
            expected = share @ hub.w[group][:, columns]
            torch.testing.assert_close(down.w[peer, columns], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(down.abar[peer], hub.a[[peer, *heard]].mean(0), rtol=1e-12, atol=1e-14)
        if not close:
            assert torch.equal(down.w[peer, head], hub.w[peer, head])
    assert set(seen) == {0, 1}


def test_target_of_the_code_is_the_peers_mean_by_samples(deep):
    hub, sizes = hub_of(deep, skewed()), deep.clients.sizes.double()
    ua = method(tau=0.1, aux_avg="samplesize_peers")
    plan = plan_of(deep, ua, hub)
    down = ua.download(deep.net, hub, plan)
    for peer in range(6):
        heard = plan.graph.sources_of(peer)
        expected = (sizes[heard] / sizes[heard].sum()) @ hub.a[heard]
        torch.testing.assert_close(down.abar[peer], expected, rtol=1e-12, atol=1e-14)
    for rule in ("uniform_self", "samplesize_peers"):
        alone = method(topology=KOut(k=0), aux_avg=rule, tau=1.0)
        down = alone.download(deep.net, hub, plan_of(deep, alone, hub))
        assert torch.equal(down.abar, hub.a) and torch.equal(down.w, hub.w)
        assert (down.pick == -1).all() and down.asked.shape == (6, 0)


def test_without_the_term_targets_have_no_influence(deep):
    """With it they have; answers, and so decisions, stay."""
    for mu, same in ((0.0, True), (1.0, False)):
        ua = method(tau=0.1, mu=mu)
        hub, state = hub_of(deep, skewed()), ua.init_state(deep.net, deep.clients)
        plan = plan_of(deep, ua, hub)
        one, other = (deep.round(ua, hub._replace(a=a), state, plan).state.w for a in (hub.a, hub.a + 1))
        assert torch.equal(one, other) == same


def test_steps_of_no_length_change_nothing(deep):
    deep.training = UNMOVED
    start = method().init_state(deep.net, deep.clients).w
    for _, _, hub, state in rounds(deep, method(tau=0.1, mu=10.0), 3):
        torch.testing.assert_close(state.w, start, rtol=1e-14, atol=0)
        torch.testing.assert_close(hub.a, hub.a[:1].expand(6, -1), rtol=1e-14, atol=0)


def test_momentum_survives_being_replaced(make_toy):
    """Round 2 trains the picked model with the peer's own velocity of round 1."""
    kept = MOMENTUM.model_copy(update={"momentum_state": "keep"})
    toy = make_toy((5, 8), hidden=4, training=kept, dtype=torch.float64)
    toy.velocity = torch.zeros(2, toy.net.num_weights, dtype=torch.float64)
    ua = method(topology=KOut(k=1), tau=1.0, mu=0.0)
    hub, state = ua.init_hub(toy.net, toy.clients), ua.init_state(toy.net, toy.clients)
    first = toy.round(ua, hub, state, plan_of(toy, ua, hub, 1))
    velocity = toy.velocity.clone()
    second = toy.round(ua, first.hub, first.state, plan_of(toy, ua, first.hub, 2))
    cohort = toy.cohort(toy.plan(2))
    cohort.velocity = velocity
    assert torch.equal(cohort.fit(first.state.w[[1, 0]], cross_entropy).w, second.state.w)
    assert velocity.abs().min(1).values.max() < velocity.abs().max(1).values.min()
    assert (velocity[0] != velocity[1]).any()


@pytest.mark.parametrize("value", [torch.nan, 5.0])
def test_models_that_nobody_hears_have_no_influence(layered, value):
    ua = method(tau=0.1)
    hub = hub_of(layered, skewed(), features=3)
    plan = plan_of(layered, ua, hub)
    before = ua.download(layered.net, hub, plan)
    for peer in range(6):
        changed = Published(*(field.clone() for field in hub))
        for field in changed:
            field[peer] = value if field is not changed.u else torch.tensor([value, 0.0, 0.0])
        after = ua.download(layered.net, changed, plan)
        hears = [i == peer or peer in plan.graph.sources_of(i).tolist() for i in range(6)]
        for one, other in zip(before, after, strict=True):
            same = [torch.equal(one[i], other[i]) for i in range(6)]
            assert all(same[i] for i in range(6) if not hears[i])
        assert (before.w != after.w).any(1).tolist() == hears


def test_a_broken_peer_is_missing_and_stays_broken(deep):
    """It counts neither for dropout nor for means; what it sent before that was seen is counted."""
    ua = method(topology=Full(weights="samplesize"), tau=0.0005)
    found = rounds(deep, ua, 1)[0]
    state = found[3]._replace(w=found[3].w.clone())
    state.w[2, 5] = torch.inf
    plan = plan_of(deep, ua, found[2])
    down = found[1]._replace(w=state.w[:, deep.net.shared])
    _, up = ua.local_update(deep.cohort(plan), state, down)
    for field in (up.u, up.a):
        assert field.isnan().all(1).tolist() == field.isnan().any(1).tolist() == [i == 2 for i in range(6)]

    hub = hub_of(deep, skewed())
    hub.u[2], hub.a[2], hub.w[2] = torch.nan, torch.nan, torch.inf
    down = ua.download(deep.net, hub, plan)
    sizes = deep.clients.sizes.double()
    others = [0, 1, 3, 4, 5]
    share = (sizes[others] / sizes[others].sum())[None]
    body = deep.net.body
    torch.testing.assert_close(
        down.w[others][:, body], (share @ hub.w[others][:, body]).expand(5, -1), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(down.abar[others], hub.a[others].mean(0).expand(5, -1), rtol=1e-12, atol=1e-14)
    assert not down.w[2].isfinite().any() and not down.abar[2].isfinite().any()
    counted = Counter((m.kind, m.src == 2, m.dst == 2) for m in ua.sent_down(deep.net, plan, down))
    assert counted["unit_rep", True, False] == counted["unit_rep", False, True] == 5
    assert {(src, dst) for kind, src, dst in counted if kind in ("extractor", "head", "full")} == {
        (False, False)
    }
    assert ua.diagnose(deep.net, hub, plan, down)["missing_peers"] == 1


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("aux", ["uniform_self", "samplesize_peers"])
def test_ledger_is_the_closed_form(layered, buffers, aux):
    """Section by section of Algorithm 2: answers of all, then a model, or extractors and close heads."""
    layered.net = net = normalised_net(buffers=buffers)
    ua = method(tau=0.1, aux_avg=aux)
    p = skewed()
    p[[1, 3, 4, 5]] = p[0].clone()
    hub = hub_of(layered, p, features=3)
    plan = plan_of(layered, ua, hub)
    down = ua.download(net, hub, plan)
    messages = ua.sent_down(net, plan, down)
    travelling = buffers == "average"
    body, head = 10 + 4 + 9 + 4 * travelling, 6 + 12 + 6 * travelling
    runs = aux == "samplesize_peers" and travelling
    kinds = [message.kind for message in messages]
    assert kinds[: 12 * (2 if runs else 3)].count("meta") == 12
    assert not {"extractor", "head", "full"} & set(kinds[: 12 * (2 if runs else 3)])
    dropped = 0
    for peer in range(6):
        heard = plan.graph.sources_of(peer).tolist()
        close = [other for other in heard if (p[other] - p[peer]).abs().max() < 0.1]
        own = Counter()
        for message in messages:
            if message.dst == peer:
                assert message.src in heard
                assert message.bytes == 8 * message.values
                own[message.kind] += message.values
        expected = {"unit_rep": 2 * 3, "meta": 2, "aux_rep": 0 if runs else 2 * 3}
        if len(close) == 2:
            dropped += 1
            expected |= {"extractor": 2 * body, "head": head} if runs else {"full": body + head}
        else:
            expected |= {"extractor": 2 * body, "head": len(close) * head}
        assert own == {kind: values for kind, values in expected.items() if values}
    assert 0 < dropped < 6
    assert ua.sent_up(net, plan.ids, None) == []


def test_full_models_are_sent_where_layers_are_not_told_apart(layered):
    ua = method(tau=0.0, use_lp=False)
    hub = hub_of(layered, skewed(), features=3)
    plan = plan_of(layered, ua, hub)
    messages = ua.sent_down(layered.net, plan, ua.download(layered.net, hub, plan))
    assert Counter(m.kind for m in messages) == dict.fromkeys(("unit_rep", "aux_rep", "meta", "full"), 12)


def test_diagnostics_say_what_was_decided(deep):
    ua = method(tau=0.1, topology=Full(weights="samplesize"))
    hub = hub_of(deep, skewed())
    plan = plan_of(deep, ua, hub)
    found = ua.diagnose(deep.net, hub, plan, ua.download(deep.net, hub, plan))
    assert found["frac_drop"] == 0 and found["mean_heads"] == 1 and found["missing_peers"] == 0
    assert found["divergence_05"] < 0.01 < 0.3 < found["divergence_50"] <= found["divergence_95"] < 0.6932
    assert ua.diagnose(deep.net, hub, plan._replace(round=1), ua.download(deep.net, hub, plan)) == {}
    together = method(tau=1.0)
    plan = plan_of(deep, together, hub)
    found = together.diagnose(deep.net, hub, plan, together.download(deep.net, hub, plan))
    assert found["frac_drop"] == 1 and found["mean_heads"] == 2


def test_reported_is_the_personalised_model_as_received():
    assert UAPDFL.reported == ("personalised", "pre")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"tau": 1.2}, "tau = 1.2 is no threshold of js; use 0 to 1, or -1 for never"),
        ({"tau": -0.5}, "tau = -0.5 is no threshold of js"),
        ({"tau": -2.0, "divergence": "jeffreys"}, "no threshold of jeffreys; use 0 or more, or -1"),
        ({"unit": "mean"}, "'mean' is none of ones, zeros and const:NUMBER"),
        ({"unit": "const:inf"}, "'const:inf' is none of"),
        ({"unit": []}, "lists for unit hold finite numbers"),
        ({"unit": [[1.0], [1.0, 2.0]]}, "and have one length at each depth"),
        ({"unit": [float("nan")]}, "lists for unit hold finite numbers"),
        ({"unit": ["one"]}, "lists for unit hold finite numbers"),
        ({"mu": -1.0}, "greater than or equal to 0"),
    ],
)
def test_settings_out_of_range_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        Config(**options)


def test_defaults_follow_divergence_and_term():
    assert (Config().threshold, Config().weight, Config().unit_value) == (0.12, 1.0, 1.0)
    other = Config(divergence="jeffreys", prox_input="batch", unit="const:-0.5")
    assert (other.threshold, other.weight, other.unit_value) == (0.6, 0.01, -0.5)
    assert (
        Config(tau=40.0, divergence="jeffreys").threshold == 40 and Config(use_lp=False, mu=3.0).weight == 0
    )


def test_a_model_without_layers_to_tell_apart_is_refused(make_toy):
    toy = make_toy(SIZES)
    with pytest.raises(ConfigError, match="method ua_pdfl .*covers every layer"):
        method().check(toy.net, toy.clients, MOMENTUM)


def test_a_unit_input_of_another_shape_than_a_sample_is_refused(deep):
    shape = list(deep.net.input_shape)
    told = rf"unit has the shape \[{shape[-1] + 1}\], .* that of a sample, \{shape}"
    with pytest.raises(ConfigError, match=told):
        method(unit=[0.5] * (shape[-1] + 1)).check(deep.net, deep.clients, MOMENTUM)


@pytest.mark.parametrize("tau", [0.1, 1.0], ids=["some heads", "everyone drops"])
def test_relations_are_what_peers_do(deep, tau):
    """Both mixing matrices, applied to what was published, give what each peer receives."""
    ua = method(tau=tau)
    hub = hub_of(deep, skewed())
    plan = plan_of(deep, ua, hub)
    down = ua.download(deep.net, hub, plan)
    found = ua.relations(deep.net, hub, plan, down)
    net, w = deep.net, hub.w
    for name, columns in (("extractor weight", net.body), ("head weight", net.head)):
        matrix = torch.zeros(6, 6, dtype=w.dtype)
        matrix[found[name].receivers, found[name].sources] = found[name].values
        torch.testing.assert_close((matrix @ w)[:, columns], down.w[:, columns], rtol=1e-12, atol=1e-14)
    pairs = found["divergence"]
    assert torch.equal(pairs.receivers, plan.graph.receivers) and torch.equal(
        pairs.sources, plan.graph.sources
    )
    close = pairs.values < tau
    heads = set(
        zip(found["head weight"].receivers.tolist(), found["head weight"].sources.tolist(), strict=True)
    )
    if tau < 1:
        edges = zip(pairs.receivers[close].tolist(), pairs.sources[close].tolist(), strict=True)
        assert heads == {*edges, *((peer, peer) for peer in range(6))}
    assert ua.relations(net, hub, plan._replace(round=1), down) == {}


def test_relations_of_a_peer_in_its_turn_are_its_own_rows(deep):
    ua = method(tau=0.1)
    hub = hub_of(deep, skewed())
    plan = plan_of(deep, ua, hub)
    whole = ua.relations(deep.net, hub, plan, ua.download(deep.net, hub, plan))
    own = plan.among(plan.ids == 3)
    alone = ua.relations(deep.net, hub, own, ua.download(deep.net, hub, own))
    for name, pairs in whole.items():
        mine = pairs.receivers == 3
        assert all(torch.equal(field[mine], got) for field, got in zip(pairs, alone[name], strict=True))
