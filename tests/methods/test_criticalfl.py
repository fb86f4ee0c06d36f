"""CriticalFL: when a period is critical, how many peers are pulled from, and what is sent in it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.methods.contract import Plan
from raypfl.methods.criticalfl import Config, CriticalFL, Up, heard_mean
from raypfl.methods.peer_fedavg import Config as FedAvgConfig
from raypfl.methods.peer_fedavg import PeerFedAvg
from raypfl.topology import KOut, Ring, graph_of
from raypfl.training import SGD, TrainingConfig

SMALL = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.5), lr_decay=0.9)
SIZES = (7, 4, 10, 5, 6)


@pytest.fixture
def deep(make_toy):
    return make_toy(SIZES, hidden=4, training=SMALL, dtype=torch.float64)


def rounds(toy, method, count, sample=None):
    """Rounds with the method's own plans: (plan, down, up, hub, state) of each."""
    hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
    found = []
    for number in range(1, count + 1):
        there = toy.clients.ids if sample is None else torch.tensor(sample(number))
        plan = method.plan(toy.net, hub, toy.clients, number, lambda round, there=there: there)
        done = toy.round(method, hub, state, plan)
        hub, state = done.hub, done.state
        found.append((plan, done.down, done.up, hub, state))
    return found


def pulled(f_of_round, count, *, peers=30, **options):
    """How many peers each one pulls from in rounds 1, 2, ..., if training in round r has f_of_round(r)."""
    method = CriticalFL(Config(topology=KOut(k=5), **options))
    net = SimpleNamespace(device=torch.device("cpu"), shared=slice(0, 1), weights=slice(0, 1), num_weights=1)
    method.starts = lambda net, ids: torch.zeros(len(ids), 1)
    ids = torch.arange(peers)
    clients = SimpleNamespace(ids=ids, sizes=torch.ones(peers, dtype=torch.int64))
    hub, found = method.init_hub(net, clients), []
    for number in range(1, count + 1):
        plan = method.plan(net, hub, clients, number, lambda round: ids)
        degrees = plan.graph.degree.unique().tolist()
        assert len(degrees) == 1
        found.append(degrees[0])
        f = torch.full((peers,), float(f_of_round(number)), dtype=torch.float64)
        hub = method.aggregate(net, hub, Up(hub.w, f, hub.mask), plan)
    return found


CONSTANT = [5, 5, *(k for k in (10, 20, *[22] * 8, 11, 6, 5, 5) for _ in range(2))]


def test_trace_of_a_constant_statistic():
    """Ten checks see a window that still fills; the eleventh and on do not. Checked in every second round."""
    assert pulled(lambda round: 3.0, 30) == CONSTANT


@pytest.mark.parametrize("ratio, last", [(1.05, 22), (1.005, 5)])
def test_traces_of_geometric_statistics(ratio, last):
    """The ratio is of one check's statistic to the one before; growth above delta = 0.01 stays critical."""
    found = pulled(lambda round: ratio ** (round / 2), 40)
    assert found[:22] == CONSTANT[:22]
    assert found[-1] == last
    assert min(found) == 5 and max(found) == 22


def test_nothing_is_critical_with_a_growth_out_of_reach_and_no_warm_up():
    assert pulled(lambda round: 2.0**round, 12, delta=1e300, warmup=0) == [5] * 12
    assert pulled(lambda round: 2.0**round, 8, delta=1e300, warmup=1) == [5, 5, 10, 10, 5, 5, 5, 5]


def test_at_its_maximum_once_it_only_falls():
    """The maximum is noticed by the check after; what is critical from then on doubles no more."""
    rounds_of = [(1, 2.0), (13, 0.5), (21, 2.0)]

    def growing_falling_growing(number):
        value = 1.0
        for step in range(1, number):
            value *= [factor for start, factor in rounds_of if start <= step][-1]
        return value

    found = pulled(growing_falling_growing, 40, window=1, warmup=0)
    assert found[:16] == [5, 5, 10, 10, 20, 20, *[22] * 10]
    assert found[16:22] == [11, 11, 6, 6, 5, 5] and set(found[22:]) == {5}


def test_a_single_value_is_compared_where_the_window_is_one():
    """Growth by half, then a fall, then growth again: K_max = 22 is never reached, so K rises again."""
    values = {1: 1.0, 3: 1.5, 5: 0.5, 7: 0.6, 9: 0.6}
    found = pulled(lambda round: values.get(round, 0.0), 11, window=1, warmup=0)
    assert found == [5, 5, 10, 10, 20, 20, 10, 10, 20, 20, 10]


def test_rule_of_the_paper_looks_every_round_from_the_third_on():
    values = [1.0, 1.01, 1.5, 1.5, 4.0, 1.0, 1.0, 1.0]
    found = pulled(lambda round: values[round - 1], 8, rule="paper")
    # K of round r + 1 from training of rounds r - 1 and r - 2; growth of exactly delta counts.
    assert found == [5, 5, 5, 10, 20, 10, 20, 10]
    assert pulled(lambda round: 2.0**round, 9, rule="paper") == [5, 5, 5, 10, 20, 22, 22, 22, 22]
    assert set(pulled(lambda round: 0.5**round, 9, rule="paper")) == {5}


@pytest.mark.parametrize(
    "peers, share, bounds", [(30, 0.75, (5, 22)), (4, 0.75, (3, 3)), (100, 0.29, (5, 29)), (8, 1.0, (5, 7))]
)
def test_bounds(peers, share, bounds):
    assert CriticalFL(Config(kmax_frac=share)).bounds(peers) == bounds
    assert CriticalFL(Config(kmax_frac=0.0)).bounds(peers)[1] == bounds[0]


def test_a_peer_hears_statistics_of_those_it_pulls_from():
    graph = graph_of(4, torch.tensor([0, 0, 2]), torch.tensor([1, 3, 0]))
    plan = Plan(2, torch.arange(4), torch.ones(4), graph=graph)
    found = heard_mean(torch.tensor([1.0, 2.0, 4.0, 9.0]), plan)
    assert found.tolist() == [4.0, 2.0, 2.5, 9.0] and found.dtype == torch.float64


def test_statistics_and_counts_differ_between_peers_and_are_those_of_the_round_before(deep):
    method = CriticalFL(Config(topology=KOut(k=1), kmax_frac=1.0))
    found = rounds(deep, method, 5)
    assert [plan.graph.degree.tolist() for plan, *_ in found[:3]] == [[1] * 5, [1] * 5, [2] * 5]
    old, history = found[0][3].f.double(), found[1][3].history
    for peer in range(5):
        group = [peer, *found[1][0].graph.sources_of(peer).tolist()]
        assert history[peer, -1].item() == pytest.approx(old[group].mean().item(), rel=1e-12)
    assert (history[:, :-1] == 0).all() and len(history[:, -1].unique()) > 1
    for one, other in zip(found[1::2], found[2::2], strict=False):
        assert torch.equal(one[3].history, other[3].history) and torch.equal(one[3].k, other[3].k)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_statistic_is_of_the_gradient_of_every_step(make_toy, clip):
    """A plain loop over the same batches with torch's own clipping."""
    toy = make_toy(SIZES, training=SMALL.model_copy(update={"epochs": 3}), dtype=torch.float64)
    toy.x = 20 * toy.x
    method = CriticalFL(Config(topology=KOut(k=2), clip=clip))
    (_, _, first, _, _), (_, down, up, _, state) = rounds(toy, method, 2)
    cap, above, below = clip or 10.0, 0, 0
    for client in range(5):
        w = down.w[client : client + 1, toy.net.weights].clone().requires_grad_()
        optimizer, total = torch.optim.SGD([w], 0.1 * 0.9, momentum=0.5), 0.0
        for batch in toy.batches(2, client):
            optimizer.zero_grad()
            rows = torch.nn.functional.pad(w, (0, toy.net.width - w.shape[1]))
            torch.nn.functional.cross_entropy(toy.net.bind(rows)(batch.x)[0], batch.y[0]).backward()
            norm = w.grad.norm().item()
            above, below = above + (norm > cap), below + (norm < cap)
            total += min(norm, cap) ** 2
            if clip:
                torch.nn.utils.clip_grad_norm_([w], clip)
            optimizer.step()
        assert up.f[client].item() == pytest.approx(0.1 * 0.9 * total / 3, rel=1e-9)
        torch.testing.assert_close(toy.weights(state.w)[client], w.detach()[0], rtol=1e-9, atol=1e-12)
    assert above and below and not torch.equal(first.f, up.f)


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_with_one_number_of_peers_it_is_fedavg_bit_for_bit(deep, rule):
    topology = KOut(k=2)
    theirs = rounds(deep, PeerFedAvg(FedAvgConfig(topology=topology)), 5)
    mine = rounds(deep, CriticalFL(Config(topology=topology, kmax_frac=0.4, rule=rule)), 5)
    for ours, other in zip(mine, theirs, strict=True):
        assert torch.equal(ours[-1].w, other[-1].w) and torch.equal(ours[1].w, other[1].w)
    more = rounds(deep, CriticalFL(Config(topology=topology, kmax_frac=0.8, rule="code")), 5)
    assert not torch.equal(more[-1][-1].w, theirs[-1][-1].w)


def test_more_peers_are_the_same_and_others_besides(deep):
    theirs = rounds(deep, PeerFedAvg(FedAvgConfig(topology=KOut(k=1))), 4)
    mine = rounds(deep, CriticalFL(Config(topology=KOut(k=1), kmax_frac=1.0)), 4)
    for (plan, *_), (other, *_) in zip(mine, theirs, strict=True):
        for peer in range(5):
            assert set(other.graph.sources_of(peer).tolist()) <= set(plan.graph.sources_of(peer).tolist())


def test_a_peer_that_was_away_counts_its_own_rounds(deep):
    method = CriticalFL(Config(topology=KOut(k=1), kmax_frac=1.0))
    there = {2: [0, 2, 3, 4], 3: [0, 1, 2]}
    found = rounds(deep, method, 4, lambda number: there.get(number, [0, 1, 2, 3, 4]))
    assert [hub.turns.tolist() for *_, hub, _ in found] == [
        [1, 1, 1, 1, 1], [2, 1, 2, 2, 2], [3, 2, 3, 2, 2], [4, 3, 4, 3, 3]
    ]  # fmt: skip
    assert [hub.checks.tolist() for *_, hub, _ in found] == [
        [0, 0, 0, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1], [2, 1, 2, 1, 1]
    ]  # fmt: skip


@pytest.mark.parametrize("sparse", [False, True])
def test_messages_are_models_or_parts_of_them_with_two_numbers(make_toy, sparse):
    """K_i (P + 2) values a peer; in a critical period a fifth of P and a bit for each."""
    toy = make_toy(SIZES, hidden=4, training=SMALL)
    method = CriticalFL(Config(topology=KOut(k=1), kmax_frac=1.0, warmup=2, delta=1e9, sparse_upload=sparse))
    size, sent_parts = toy.net.num_weights, []
    kept = sum(place >= 0.8 * (size - 1) for place in range(size))
    hub = method.init_hub(toy.net, toy.clients)
    for plan, down, _, after, _ in rounds(toy, method, 7):
        messages = method.sent_down(toy.net, plan, down)
        values, parts = Counter(), Counter(m.kind for m in messages)
        for m in messages:
            values[m.dst] += m.values
            assert m.bytes == {"full": 4 * m.values, "meta": 8, "fgn": 4, "mask": m.values}[m.kind]
        critical = hub.critical & sparse
        for peer in range(5):
            heard = plan.graph.sources_of(peer)
            assert len(heard) == hub.k[peer]
            some = int(critical[heard].sum())
            expected = len(heard) * (size + 2) - some * (size - kept) + some * -(-size // 8)
            assert values[peer] == expected
        assert parts["fgn"] == parts["meta"] == parts["full"] == plan.graph.num_edges
        sent_parts.append(parts["mask"])
        hub = after
    assert [count > 0 for count in sent_parts] == [sparse] * 6 + [False]


def test_each_coordinate_is_averaged_over_those_that_sent_it(deep):
    method = CriticalFL(Config(topology=KOut(k=2), sparse_upload=True, kmax_frac=0.4))
    (_, _, up, hub, after), (plan, down, *_) = rounds(deep, method, 2)
    before = method.init_state(deep.net, deep.clients).w
    change = deep.weights(after.w - before).abs()
    size = deep.net.num_weights
    cut = torch.quantile(change, 0.8, dim=1, keepdim=True)
    sent = change >= cut
    sizes = deep.clients.sizes.double()
    partly = 0
    for peer in range(5):
        for column in range(size):
            group = [j for j in plan.graph.sources_of(peer).tolist() if sent[j, column]]
            partly += 0 < len(group) < 2
            share = sizes[[peer, *group]] / sizes[[peer, *group]].sum()
            expected = float(share @ hub.w[[peer, *group], column])
            assert down.w[peer, column].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert partly and hub.critical.all()


def test_after_its_critical_period_a_peer_sends_everything(deep):
    """Without a warm-up and with a growth out of reach the first check ends it."""
    options = {"topology": KOut(k=2), "kmax_frac": 0.4, "delta": 1e12, "warmup": 0}
    found = rounds(deep, CriticalFL(Config(sparse_upload=True, **options)), 3)
    (_, down, _, hub, _) = found[2]
    assert not found[1][3].critical.any() and not down.sparse.any() and found[1][1].sparse.all()
    matrix = CriticalFL(Config(**options)).weights(found[2][0]).dense()
    torch.testing.assert_close(down.w, matrix @ found[1][3].w, rtol=1e-12, atol=1e-14)
    assert hub.checks.tolist() == [1] * 5


@pytest.mark.parametrize(
    "topology, message",
    [
        (Ring(), "topology is ring"),
        (KOut(k=2, refresh="static"), "topology is kout with k = 2 that stays the same"),
        (KOut(k=0), "topology is kout with k = 0"),
    ],
)
def test_other_topologies_are_refused(deep, topology, message):
    with pytest.raises(ConfigError, match=message):
        CriticalFL(Config(topology=topology)).check(deep.net, deep.clients, SMALL)
    CriticalFL(Config(topology=KOut(k=2))).check(deep.net, deep.clients, SMALL)
