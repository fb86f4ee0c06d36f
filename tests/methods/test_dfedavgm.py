"""DFedAvgM: heavy ball, mixing matrices it may have, and both ways of sending quantised changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.methods import dfedavgm
from raypfl.methods.dfedavgm import Config, DFedAvgM, quantised, quantised_bytes
from raypfl.methods.peer_fedavg import Config as FedAvgConfig
from raypfl.methods.peer_fedavg import PeerFedAvg
from raypfl.rng import key
from raypfl.topology import ErdosRenyi, Full, KOut, Regular, Ring, Star, sample, spectral_gap
from raypfl.training import SGD, Adam, TrainingConfig

SMALL = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1))
STAR = Star(weights="metropolis")
RING = Ring(weights="metropolis")


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


@pytest.fixture
def deep(make_toy):
    return make_toy((6, 6, 6, 6, 6), hidden=4, training=SMALL, dtype=torch.float64)


def matrix(method, plan):
    return method.weights(plan).dense()


def centred(w):
    return w - w.mean(0)


def test_without_momentum_everyone_hearing_everyone_it_is_fedavg(deep):
    theirs = rounds(deep, PeerFedAvg(FedAvgConfig(topology=Full(weights="samplesize"))), 3)
    mine = rounds(deep, DFedAvgM(Config(topology=Full(weights="uniform"), momentum=0.0, epochs_mult=1)), 3)
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours[-1].w, other[-1].w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum_state", ["reset", "keep"])
def test_local_training_is_the_heavy_ball_recursion(make_toy, monkeypatch, momentum_state):
    """`F = ||w - x||^2 / 2`, by hand over two rounds of 2 x 3 steps: y^-1 = y^0 in each of them."""
    monkeypatch.setattr(
        dfedavgm,
        "cross_entropy",
        lambda m, batch: batch.mean(0.5 * (m.w[:, None] - batch.x).square().sum(2)),
    )
    training = TrainingConfig(
        epochs=3,
        batch_size=100,
        optimizer=SGD(lr=0.1, momentum=0.3, nesterov=True),
        lr_decay=0.5,
        momentum_state=momentum_state,
    )
    toy = make_toy(features=2, classes=2, training=training, dtype=torch.float64)
    toy.velocity = torch.full((4, toy.net.num_weights), 7.0, dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    toy.x = torch.randn(len(toy.x), toy.net.num_weights, generator=draw, dtype=torch.float64)
    method = DFedAvgM(Config(topology=RING, momentum=0.8))
    target = toy.targets()
    for number, (_, down, _, _, state) in enumerate(rounds(toy, method, 2)):
        before = y = down.w[:, toy.net.weights]
        for _ in range(6):
            before, y = y, y - 0.1 * 0.5**number * (y - target) + 0.8 * (y - before)
        torch.testing.assert_close(toy.weights(state.w), y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("topology", [Regular(k=2), STAR, ErdosRenyi(p=0.6)], ids=lambda t: t.name)
def test_mixing_keeps_the_mean_of_all_models(deep, topology):
    found = rounds(deep, DFedAvgM(Config(topology=topology)), 3)
    for (_, _, _, hub, _), (_, down, *_) in zip(found, found[1:], strict=False):
        assert centred(hub.w).norm() > centred(down.w).norm() > 0
        torch.testing.assert_close(down.w.mean(0), hub.w.mean(0), rtol=1e-12, atol=1e-14)


def test_disagreement_shrinks_by_the_second_eigenvalue_without_training(deep, monkeypatch):
    method = DFedAvgM(Config(topology=RING, init="independent"))
    monkeypatch.setattr(method, "train", lambda cohort, w: w)
    graph = sample(RING, 5, 1, 0)
    bound = 1 - spectral_gap(RING.mixing(graph, None)).value
    apart = [centred(method.init_hub(deep.net, deep.clients).w).norm()]
    apart += [centred(down.w).norm() for _, down, *_ in rounds(deep, method, 6)]
    for before, after in zip(apart, apart[1:], strict=False):
        assert 0 < after <= bound * before * (1 + 1e-9)


def test_exact_updates_of_the_paper_leave_peers_as_far_apart_as_they_were(deep):
    """Theta_T = Theta_0 + A sum_t Q_t: what has come apart is not mixed again, as models would be."""
    method = DFedAvgM(Config(topology=RING, quant="paper", bits=32))
    found = rounds(deep, method, 4)
    weights, start = deep.net.weights, method.starts(deep.net, deep.clients.ids)
    total, averaging = torch.zeros(5, deep.net.num_weights, dtype=torch.float64), matrix(method, found[0][0])
    for number, (_, down, _, hub, state) in enumerate(found):
        before = found[number - 1][4] if number else method.init_state(deep.net, deep.clients)
        theta = deep.weights(method.personalised(deep.net, before, down))
        torch.testing.assert_close(theta, start[:, weights] + averaging @ total, rtol=1e-9, atol=1e-12)
        if number:
            mixed = averaging @ deep.weights(before.w)
            assert torch.allclose(theta, mixed, rtol=0, atol=1e-7) == (number == 1)
        torch.testing.assert_close(hub.w[:, weights], deep.weights(state.w) - theta, rtol=0, atol=1e-7)
        total += hub.w[:, weights]


def test_exact_changes_of_copies_are_plain_mixing(deep):
    plain = rounds(deep, DFedAvgM(Config(topology=RING)), 4)
    exact = rounds(deep, DFedAvgM(Config(topology=RING, quant="replica", bits=32)), 4)
    for one, other in zip(plain, exact, strict=True):
        torch.testing.assert_close(other[-1].w, one[-1].w, rtol=0, atol=1e-7)


@pytest.mark.parametrize("bits", [3, 8, 12])
def test_copies_are_the_same_bits_at_sender_and_receivers_and_follow_the_model(deep, bits):
    found = rounds(deep, DFedAvgM(Config(topology=RING, quant="replica", bits=bits)), 4)
    for _, _, up, hub, state in found:
        assert torch.equal(hub.w[:, deep.net.weights], state.reference)
        error = (state.reference - deep.weights(state.w)).abs().amax(1)
        assert (error <= up.scale).all() and (error > 0).all()
        assert int(up.integers.abs().max()) <= 2 ** (bits - 1) - 1
    scales = torch.stack([up.scale for _, _, up, _, _ in found])
    assert (scales > 0).all() and len(scales.unique()) == scales.numel()


def test_noise_belongs_to_round_and_client():
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = [key(0, "quantizer", 1, client) for client in range(3)]
    integers, scale = quantised(x, 4, keys)
    alone, own = quantised(x[2:], 4, keys[2:])
    assert torch.equal(integers[2:], alone) and torch.equal(scale[2:], own)
    later, _ = quantised(x, 4, [key(0, "quantizer", 2, client) for client in range(3)])
    assert (later != integers).any(1).all()
    beside, _ = quantised(x[:1].expand(3, -1), 4, keys)
    assert (beside[1:] != beside[:1]).any(1).all()


def test_a_peer_that_is_away_keeps_its_model_and_its_copy(deep):
    for quant in ("paper", "replica"):
        method = DFedAvgM(Config(topology=RING, quant=quant))
        there = [[0, 1, 2, 3, 4], [0, 2, 3], [0, 1, 2, 3, 4]]
        first, second, third = rounds(deep, method, 3, lambda number, there=there: there[number - 1])
        assert torch.equal(second[4].w[[1, 4]], first[4].w[[1, 4]])
        assert torch.equal(second[4].reference[[1, 4]], first[4].reference[[1, 4]])
        averaging = matrix(method, second[0])
        assert averaging[1, 1] == 1 and averaging[0, 1] == 0
        mixed = matrix(method, third[0])[1] @ second[3].w
        torch.testing.assert_close(third[1].w[1], mixed, rtol=1e-12, atol=1e-14)


def test_messages_are_models_on_every_edge(deep):
    method = DFedAvgM(Config(topology=STAR))
    plan, down, *_ = rounds(deep, method, 1)[0]
    messages = method.sent_down(deep.net, plan, down)
    size = deep.net.num_weights
    assert {(m.kind, m.values, m.bytes) for m in messages} == {("full", size, 8 * size)}
    assert Counter(m.dst for m in messages) == {0: 4, 1: 1, 2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize("bits", [2, 5, 8, 16, 32])
def test_quantised_messages_are_a_scale_and_packed_bits(make_toy, bits):
    toy = make_toy((6, 6, 6), hidden=4, training=SMALL)
    method = DFedAvgM(Config(topology=Ring(), quant="paper", bits=bits))
    plan, down, *_ = rounds(toy, method, 1)[0]
    values = toy.net.num_weights
    packed = 4 + (bits * values + 7) // 8
    found = [(m.kind, m.values, m.bytes) for m in method.sent_down(toy.net, plan, down)]
    assert found == [("quant", 1 + values, packed)] * 6
    assert packed == quantised_bytes(values, bits)


def test_who_was_away_gets_the_messages_that_were_missed(deep):
    """Over a ring of 5; peer 1 is away in rounds 2 and 3, peer 2 in round 3."""
    method = DFedAvgM(Config(topology=RING, quant="replica"))
    there = {2: [0, 2, 3, 4], 3: [0, 3, 4]}
    found = rounds(deep, method, 5, lambda number: there.get(number, [0, 1, 2, 3, 4]))
    counts = [
        Counter((m.src, m.dst) for m in method.sent_down(deep.net, plan, down) if m.kind == "quant")
        for plan, down, *_ in found
    ]
    edges = {(peer, (peer + step) % 5) for peer in range(5) for step in (1, -1)}
    assert counts[0] == dict.fromkeys(edges, 1)
    assert counts[1] == dict.fromkeys([edge for edge in edges if 1 not in edge], 1)
    assert counts[2] == dict.fromkeys([(0, 4), (4, 0), (3, 4), (4, 3)], 1)
    assert counts[3] == {**dict.fromkeys(edges, 1), (0, 1): 3, (2, 1): 2, (3, 2): 2}
    assert counts[4] == dict.fromkeys(edges, 1)
    latest = found[3][3].w
    torch.testing.assert_close(found[4][1].w, matrix(method, found[4][0]) @ latest, rtol=1e-12, atol=1e-14)


RING_LINES = "0 1 0.5\n1 2 0.5\n2 3 0.5\n3 0"


def check(toy, training=SMALL, **options):
    DFedAvgM(Config(**options)).check(toy.net, toy.clients, training)


def test_assumptions_are_checked_before_the_run(deep, make_toy, tmp_path):
    uneven = make_toy((7, 4, 10, 5, 6), hidden=4, training=SMALL)
    check(deep, topology=Full(weights="samplesize"))
    with pytest.raises(ConfigError, match=r"not symmetric: peer \d gives peer \d's model the weight"):
        check(uneven, topology=Full(weights="samplesize"))
    with pytest.raises(ConfigError, match=r"not symmetric: peer \d gives peer \d's"):
        check(deep, topology=KOut(k=2, weights="uniform"))
    with pytest.raises(ConfigError, match=r"not symmetric: peer \d gives peer \d's"):
        check(deep, topology=Star(weights="uniform"))
    check(deep, topology=RING)
    check(deep, topology=Ring(weights="uniform"))
    check(deep, topology=Ring(weights="metropolis", p_active=0.5))
    with pytest.raises(ConfigError, match=r"not symmetric"):
        check(deep, topology=Ring(weights="uniform", p_active=0.5))
    with pytest.raises(ConfigError, match=r"training.optimizer.name = adam. Use sgd"):
        check(deep, TrainingConfig(optimizer=Adam()), topology=RING)
    four = make_toy((6, 6, 6, 6), training=SMALL)
    edges = tmp_path / "edges.txt"
    for lines, message in (
        ("0 1\n2 3", "the graph falls apart into 2 pieces: peer 2 is not joined to peer 0"),
        (f"{RING_LINES} 0.5", "the mixing matrix has the eigenvalue -1"),
        (f"{RING_LINES} 0.7", "row 0"),
    ):
        edges.write_text(lines)
        with pytest.raises(ConfigError, match=message):
            check(four, topology={"name": "file", "file": str(edges)})


def test_copies_need_neighbours_that_stay(deep):
    check(deep, topology=RING, quant="replica")
    check(deep, topology=Regular(k=2, refresh="static"), quant="replica")
    for options, message in (
        ({"topology": Regular(k=2)}, "topology regular draws other neighbours every round"),
        ({"topology": Ring(weights="metropolis", p_active=0.5)}, r"topology.p_active = 0.5 takes"),
        ({"topology": RING, "init": "independent"}, r"method.init = independent leaves nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(deep, quant="replica", **options)
        check(deep, quant="paper", **options)


def test_default_graph_is_five_regular_with_metropolis_weights():
    assert DFedAvgM(Config()).topology == Regular(k=5, weights="metropolis")
    assert DFedAvgM(Config()).topology.changes
