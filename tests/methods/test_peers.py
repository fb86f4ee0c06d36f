"""What methods without a server share, and FedAvg and FedPer between peers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.methods.peer_fedavg import Config, PeerFedAvg
from raypfl.methods.peer_fedper import Config as FedPerConfig
from raypfl.methods.peer_fedper import PeerFedPer
from raypfl.methods.peers import State
from raypfl.methods.start import common_start
from raypfl.topology import Full, KOut, Regular, Ring
from raypfl.training import SGD, TrainingConfig

UNEVEN = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1))


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, training=UNEVEN, dtype=torch.float64)


def rounds(toy, method, count, sample=None):
    """Rounds with the method's own plans: (plan, down, hub, state) of each."""
    hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
    found = []
    for number in range(1, count + 1):
        everyone = toy.clients.ids if sample is None else torch.tensor(sample(number))
        plan = method.plan(toy.net, hub, toy.clients, number, lambda round, chosen=everyone: chosen)
        done = toy.round(method, hub, state, plan)
        hub, state = done.hub, done.state
        found.append((plan, done.down, hub, state))
    return found


def test_everyone_hears_everyone_is_fedavg(deep):
    """Mixing comes before training, so what peers receive in round t + 1 is the server's model of round t."""
    theirs = deep.run(FedAvg(FedAvgConfig()), 3)
    mine = rounds(deep, PeerFedAvg(Config(topology=Full(weights="samplesize"))), 4)
    for (_, down, _, _), served in zip(mine[1:], theirs, strict=True):
        assert (down.w - down.w[:1]).abs().max() < 1e-12
        torch.testing.assert_close(
            down.w[:, deep.net.weights], served.hub.w.expand(4, -1), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize(
    "method", [PeerFedAvg(Config(topology=KOut(k=0))), PeerFedAvg(Config(topology=KOut(k=1)))]
)
def test_peers_that_hear_nobody_train_alone(deep, method):
    alone = deep.run(Local(LocalConfig()), 3)[-1].state.w
    found = rounds(deep, method, 3)[-1][3].w
    assert torch.equal(found, alone) == (method.topology.k == 0)


def test_peers_hear_what_was_published_before_this_round(deep):
    """By hand, over a ring: the snapshot of the round before, own included, by training samples."""
    method = PeerFedAvg(Config(topology=Ring(weights="samplesize")))
    first, second = rounds(deep, method, 2)
    sizes, before = deep.clients.sizes.double(), first[2].w
    for peer in range(4):
        group = [(peer - 1) % 4, peer, (peer + 1) % 4]
        share = sizes[group] / sizes[group].sum()
        torch.testing.assert_close(second[1].w[peer], share @ before[group], rtol=1e-12, atol=1e-14)


def test_relations_are_the_mixing_matrix(deep):
    """Of those who are there, without what is not heard: `A` times what was published is received."""
    method = PeerFedAvg(Config(topology=KOut(k=1)))
    (_, _, hub, _), (plan, down, _, _) = rounds(deep, method, 2, lambda number: [0, 2, 3])
    pairs = method.relations(deep.net, hub, plan, down)["weight"]
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix[pairs.receivers, pairs.sources] = pairs.values
    assert (matrix.sum(1)[[0, 2, 3]] - 1).abs().max() < 1e-12 and matrix[1].sum() == 0
    assert len(pairs.values) == 3 + plan.graph.num_edges
    torch.testing.assert_close((matrix @ hub.w)[[0, 2, 3]], down.w, rtol=1e-12, atol=1e-14)


def test_heads_of_fedper_are_never_published(deep):
    method = PeerFedPer(FedPerConfig(topology=Full(weights="uniform")))
    (_, _, hub, first), (_, down, _, _) = rounds(deep, method, 2)
    net = deep.net
    assert hub.w.shape[1] == down.w.shape[1] == net.body.stop - net.body.start
    received = method.personalised(net, first, down)
    assert torch.equal(received[:, net.head], first.w[:, net.head])
    torch.testing.assert_close(
        received[:, net.body], hub.w.mean(0, keepdim=True).expand(4, -1), rtol=1e-12, atol=0
    )


def test_a_peer_that_is_away_neither_sends_nor_hears_nor_trains(deep):
    method = PeerFedAvg(Config(topology=Full(weights="samplesize")))
    first, second = rounds(deep, method, 2, lambda round: [0, 1, 2, 3] if round == 1 else [0, 2, 3])
    plan, down, hub, state = second
    assert plan.ids.tolist() == [0, 2, 3]
    assert torch.equal(state.w[1], first[3].w[1]) and torch.equal(hub.w[1], first[2].w[1])
    here = [0, 2, 3]
    share = deep.clients.sizes[here].double() / deep.clients.sizes[here].sum()
    torch.testing.assert_close(down.w[1], share @ first[2].w[here], rtol=1e-12, atol=1e-14)
    ends = {end for message in method.sent_down(deep.net, plan, down) for end in (message.src, message.dst)}
    assert ends == {0, 2, 3}


def test_availability_of_the_topology_is_drawn_per_peer_and_round(deep):
    method = PeerFedAvg(Config(topology=KOut(k=2, p_active=0.5)))
    hub, everyone = method.init_hub(deep.net, deep.clients), deep.clients.ids
    there = [
        method.plan(deep.net, hub, deep.clients, number, lambda round: everyone).ids.tolist()
        for number in range(1, 13)
    ]
    assert len({tuple(ids) for ids in there}) > 3
    assert 12 < sum(map(len, there)) < 36


def test_messages_are_the_edges_of_the_round(deep):
    method = PeerFedAvg(Config(topology=KOut(k=2)))
    plan, down, *_ = rounds(deep, method, 1)[0]
    messages = method.sent_down(deep.net, plan, down)
    full = [(m.src, m.dst, m.values, m.bytes) for m in messages if m.kind == "full"]
    size = deep.net.num_weights
    edges = zip(plan.graph.sources.tolist(), plan.graph.receivers.tolist(), strict=True)
    assert sorted(full) == sorted((j, i, size, 8 * size) for j, i in edges)
    assert Counter(m.kind for m in messages) == {"full": 8, "meta": 8}
    assert method.sent_up(deep.net, plan.ids, None) == []


def test_independent_starts_belong_to_the_peer(deep):
    method = PeerFedAvg(Config(init="independent"))
    w = method.init_state(deep.net, deep.clients).w
    some = method.init_state(deep.net, deep.clients.take(torch.tensor([2, 0]))).w
    assert torch.equal(some, w[[2, 0]])
    assert len(torch.unique(w[:, 0])) == 4
    assert torch.equal(method.init_hub(deep.net, deep.clients).w, w[:, deep.net.shared])
    common = PeerFedAvg(Config()).init_state(deep.net, deep.clients)
    assert torch.equal(common.w, common_start(deep.net, 0, 4)) and isinstance(common, State)


def test_own_topology_goes_before_the_runs_before_the_papers():
    assert PeerFedAvg(Config()).topology == KOut(k=5)
    assert PeerFedAvg(Config(), 0, Ring()).topology == Ring()
    assert PeerFedAvg(Config(topology=Full()), 0, Ring()).topology == Full()


def test_impossible_topologies_are_refused(deep):
    with pytest.raises(ConfigError, match=r"topology.k = 5: each of 4 peers has only 3 others"):
        PeerFedAvg(Config(topology=Regular())).check(deep.net, deep.clients, UNEVEN)
