"""DisPFL: masks that keep their size, weights averaged where they are trained, training within masks."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from raypfl.algebra import erk_counts
from raypfl.errors import ConfigError
from raypfl.methods.dispfl import Config, DisPFL, Hub, first_gradient
from raypfl.methods.peer_fedavg import Config as PeerFedAvgConfig
from raypfl.methods.peer_fedavg import PeerFedAvg
from raypfl.methods.start import common_start
from raypfl.models import BatchNorm1d
from raypfl.rng import key, numpy_generator
from raypfl.topology import Full, KOut, Ring
from raypfl.training import SGD, Network, TrainingConfig

EVERYONE = Full(weights="uniform")
UNEVEN = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1))
MOVING = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.8, weight_decay=0.05))
KEPT = MOVING.model_copy(update={"momentum_state": "keep"})


def dispfl(**options):
    """The method over ten rounds, everyone heard unless the options say otherwise."""
    return DisPFL(Config(**{"topology": EVERYONE, "anneal_rounds": 10, **options}))


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=6, training=MOVING, dtype=torch.float64)


def rounds(toy, method, count):
    """Rounds with the method's own plans: (plan, down, hub, state) of each in which somebody is there."""
    hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
    toy.velocity = torch.zeros(len(toy.indices), toy.net.num_weights, dtype=toy.net.dtype)
    found = []
    for number in range(1, count + 1):
        plan = method.plan(toy.net, hub, toy.clients, number, lambda round: toy.clients.ids)
        if not len(plan.ids):
            assert method.download(toy.net, hub, plan).w.shape == (0, hub.w.shape[1])
            continue
        done = toy.round(method, hub, state, plan)
        hub, state = done.hub, done.state
        found.append((plan, done.down, hub, state))
    return found


def per_tensor(net, mask):
    """How many of each tensor's entries each row's mask has: `[K, tensors]`."""
    return torch.stack([mask[:, columns].sum(1) for columns in net.tensors], 1)


def drawn(toy, density=0.5, seed=0):
    """A hub with random models within random masks."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(len(toy.indices), toy.net.num_weights, generator=generator) < density
    w = toy.rows(seed=seed)[:, toy.net.shared]
    return Hub(w * mask, mask)


def received(toy, method, hub, round=1):
    """What `download` makes of a hub in a round with everyone there, and the plan."""
    plan = method.plan(toy.net, hub, toy.clients, round, lambda round: toy.clients.ids)
    return method.download(toy.net, hub, plan).w, plan


# Masks


def test_first_masks_have_the_erk_counts_at_places_of_the_peers_own(deep):
    state = dispfl(density=0.4).init_state(deep.net, deep.clients)
    expected = erk_counts(deep.net.shapes, 0.4)
    assert deep.net.shapes == [(3, 6), (3,), (6, 4), (6,)] and 0 < expected[0] < 18
    assert per_tensor(deep.net, state.mask).tolist() == [expected] * 4
    assert len(torch.unique(state.mask, dim=0)) == 4
    start = common_start(deep.net, 0, 4)[:, deep.net.weights]
    assert torch.equal(deep.weights(state.w), start * state.mask)
    some = dispfl(density=0.4).init_state(deep.net, deep.clients.take(torch.tensor([2, 0])))
    assert torch.equal(some.mask, state.mask[[2, 0]]) and torch.equal(some.w, state.w[[2, 0]])
    common = dispfl(density=0.4, init_mask="common").init_state(deep.net, deep.clients)
    assert len(torch.unique(common.mask, dim=0)) == 1


def test_places_of_first_masks_are_uniform(make_toy):
    toy = make_toy((1,) * 400, hidden=6)
    mask = dispfl(density=0.4).init_state(toy.net, toy.clients).mask
    head = toy.net.tensors[0]
    share = mask[:, head].double().mean(0)
    expected = erk_counts(toy.net.shapes, 0.4)[0] / 18
    # Five standard deviations of a mean over 400 peers.
    assert (share - expected).abs().max() < 5 * math.sqrt(expected * (1 - expected) / 400)


def test_unequal_densities_are_given_out_in_turn(deep):
    state = dispfl(density=(0.3, 0.7, 1.0), init_mask="common").init_state(deep.net, deep.clients)
    counts = per_tensor(deep.net, state.mask).tolist()
    assert counts == [erk_counts(deep.net.shapes, density) for density in (0.3, 0.7, 1.0, 0.3)]
    # From one draw: the smaller mask is within the larger one.
    assert not (state.mask[0] & ~state.mask[1]).any() and torch.equal(state.mask[0], state.mask[3])
    assert state.mask[2].all()


@pytest.mark.parametrize("regrow", ["grad", "random"])
def test_masks_move_and_keep_their_size_in_every_tensor(deep, regrow):
    method = dispfl(density=(0.4, 0.6), regrow=regrow, anneal_rounds=3)
    masks = [method.init_state(deep.net, deep.clients).mask]
    masks += [state.mask for *_, state in rounds(deep, method, 5)]
    for before, after in zip(masks, masks[1:], strict=False):
        assert torch.equal(per_tensor(deep.net, before), per_tensor(deep.net, after))
    moved = [int((a != b).sum()) for a, b in zip(masks, masks[1:], strict=False)]
    assert moved[0] > 0 and moved[2] > 0 and moved[3] == moved[4] == 0


@pytest.mark.parametrize("regrow", ["grad", "random"])
def test_masks_stay_where_nothing_is_exchanged(deep, regrow):
    method = dispfl(alpha0=0.0, anneal_rounds=None, regrow=regrow)
    start = method.init_state(deep.net, deep.clients).mask
    for _, _, hub, state in rounds(deep, method, 3):
        assert torch.equal(state.mask, start) and torch.equal(hub.mhat, start)


def test_share_exchanged_falls_along_a_half_cosine():
    config = Config(anneal_rounds=8)
    assert config.exchanged(1) == 0.5
    assert config.exchanged(5) == pytest.approx(0.25, rel=1e-12)
    assert 0 < config.exchanged(8) < 0.02
    assert [config.exchanged(round) for round in (9, 16, 17, 1000)] == [0.0] * 4


def test_next_mask_is_pruned_by_size_and_regrown_by_the_gradient_of_one_batch(deep):
    """With sorted lists, tensor by tensor; the published model keeps what is pruned."""
    method = dispfl(density=0.5)
    start = method.init_state(deep.net, deep.clients)
    _, _, hub, state = rounds(deep, method, 1)[0]
    net, exchanged = deep.net, 0
    for peer in range(4):
        (batch,) = deep.batches(1, peer, purpose="dispfl regrow", steps=1)
        leaf = state.w[peer : peer + 1, net.weights].clone().requires_grad_()
        logits = net.bind(state.w[peer : peer + 1], leaf=leaf)(batch.x)[0]
        loss = nn.functional.cross_entropy(logits, batch.y[0])
        gradient = torch.autograd.grad(loss, leaf)[0][0].abs()
        for columns in net.tensors:
            places = range(columns.start, columns.stop)
            old = [place for place in places if start.mask[peer, place]]
            count = math.ceil(0.5 * len(old))
            old.sort(key=lambda place, own=state.w[peer]: abs(float(own[place])))
            kept = set(old[count:])
            others = [place for place in places if place not in kept]
            others.sort(key=lambda place, g=gradient: -float(g[place]))
            expected = kept | set(others[:count])
            assert {place for place in places if state.mask[peer, place]} == expected
            exchanged += len(expected - set(old))
    assert exchanged > 4
    assert torch.equal(hub.mhat, start.mask)
    assert (hub.w[:, net.weights] != 0).sum() == start.mask.sum()


def test_random_regrowth_is_a_draw_of_the_peer_and_round(deep):
    method = dispfl(density=0.5, regrow="random")
    cohort = deep.cohort(deep.plan(3, [1, 2]))
    found = method.promise(cohort, deep.rows()[:2])
    expected = [numpy_generator(key(0, "dispfl regrow", 3, peer)).random(found.shape[1]) for peer in (1, 2)]
    assert np.array_equal(found.numpy(), np.stack(expected))


def test_gradient_for_regrowth_is_of_a_model_in_evaluation_mode(deep):
    """Dropout is off and batch normalisation uses running statistics, which stay."""

    def module():
        layers = [nn.Linear(4, 3), BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)]
        return nn.Sequential(*layers)

    deep.net = net = Network(module, "3", dtype=torch.float64)
    w = torch.cat([net.draw(seed) for seed in (1, 2)])
    w[:, net.statistics] = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)).double() + 0.5
    before = w.clone()
    cohort = deep.cohort(deep.plan(1, [0, 2]))
    found = cohort.run(lambda chunk, w: (first_gradient(chunk, w),), w)[0]
    assert torch.equal(w, before)
    plain = module().double().eval()
    tensors = [plain[3].weight, plain[3].bias, plain[0].weight, plain[0].bias, plain[1].weight, plain[1].bias]
    for row, peer in enumerate((0, 2)):
        with torch.no_grad():
            for tensor, columns in zip(tensors, net.tensors, strict=True):
                tensor.copy_(w[row, columns].view_as(tensor))
            plain[1].running_mean.copy_(w[row, net.statistics][:3])
            plain[1].running_var.copy_(w[row, net.statistics][3:])
        (batch,) = deep.batches(1, peer, purpose="dispfl regrow", steps=1)
        loss = nn.functional.cross_entropy(plain(batch.x[0]), batch.y[0])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tensors)])
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-13)


# Mixing


@pytest.mark.parametrize("topology", [KOut(k=2), Ring(), EVERYONE], ids=["kout", "ring", "full"])
def test_weights_are_averaged_where_peers_train_them(deep, topology):
    """A dictionary a peer and a loop over coordinates, as the released code has it."""
    hub = drawn(deep, 0.4)
    mixed, plan = received(deep, dispfl(topology=topology), hub)
    zeros = 0
    for peer in range(4):
        group = [*plan.graph.sources_of(peer).tolist(), peer]
        for place in range(deep.net.num_weights):
            count = sum(int(hub.mhat[other, place]) for other in group)
            assert count <= len(group)
            total = sum(float(hub.w[other, place]) for other in group)
            expected = total / count if count else 0.0
            assert float(mixed[peer, place]) == pytest.approx(expected, rel=1e-12, abs=0)
            zeros += not count
    assert zeros > 0


def test_a_weight_that_one_neighbour_trains_is_copied(deep):
    hub = drawn(deep, 0.4)
    mixed, _ = received(deep, dispfl(), hub)
    alone = hub.mhat.sum(0) == 1
    assert alone.sum() > 5
    owner = hub.mhat[:, alone].int().argmax(0)
    assert torch.equal(mixed[:, alone], hub.w[owner, alone.nonzero()[:, 0]].expand(4, -1))


def test_equal_masks_give_the_plain_mean_on_them(deep):
    hub = drawn(deep, 0.5)
    mask = hub.mhat[:1].expand(4, -1).contiguous()
    w = deep.weights(deep.rows(seed=3)) * mask
    mixed, _ = received(deep, dispfl(), Hub(w, mask))
    torch.testing.assert_close(mixed, w.mean(0).expand(4, -1), rtol=1e-13, atol=0)


def test_consensus_of_dense_models_is_a_fixed_point(deep):
    w = deep.weights(deep.rows())[:1].repeat(4, 1)
    mixed, _ = received(deep, dispfl(topology=KOut(k=2)), Hub(w, torch.ones_like(w, dtype=torch.bool)))
    torch.testing.assert_close(mixed, w, rtol=1e-15, atol=0)


def test_a_peer_that_is_not_heard_reaches_nobody_even_broken(deep):
    hub, method = drawn(deep, 0.5), dispfl(topology=KOut(k=1))
    mixed, plan = received(deep, method, hub)
    broken = Hub(hub.w.clone(), hub.mhat)
    broken.w[3] = torch.nan
    after, _ = received(deep, method, broken)
    hears = [3 in [*plan.graph.sources_of(peer).tolist(), peer] for peer in range(4)]
    assert not all(hears)
    for peer, reached in enumerate(hears):
        assert torch.equal(after[peer], mixed[peer]) != reached


def test_a_peer_starts_from_the_mean_within_its_new_mask(deep):
    """What was pruned is gone, and what was regrown comes from the others."""
    method = dispfl(density=0.5)
    (_, _, hub, first), (_, down, _, _) = rounds(deep, method, 2)
    start = deep.weights(method.personalised(deep.net, first, down))
    mean = hub.w.sum(0) / hub.mhat.sum(0).clamp_min(1)
    torch.testing.assert_close(start, mean * first.mask, rtol=1e-12, atol=0)
    regrown = first.mask & ~hub.mhat
    assert (start[regrown] != 0).any() and (start[~first.mask] == 0).all()


def test_mixing_one_common_start_is_the_identity(deep):
    method = dispfl(density=0.5)
    state = method.init_state(deep.net, deep.clients)
    (_, down, _, _) = rounds(deep, method, 1)[0]
    torch.testing.assert_close(method.personalised(deep.net, state, down), state.w, rtol=1e-15, atol=0)


def test_running_statistics_are_averaged_uniformly(deep):
    layers = [nn.Linear(4, 3), BatchNorm1d(3), nn.Linear(3, 3)]
    deep.net = net = Network(lambda: nn.Sequential(*layers), "2", dtype=torch.float64)
    method = dispfl(topology=Ring(weights="samplesize"))
    hub = Hub(
        torch.rand(4, net.shared.stop, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        torch.ones(4, net.num_weights, dtype=torch.bool),
    )
    mixed, _ = received(deep, method, hub)
    own = hub.w[:, net.travelling]
    assert own.shape == (4, 6)
    expected = torch.stack([own[[(peer - 1) % 4, peer, (peer + 1) % 4]].mean(0) for peer in range(4)])
    torch.testing.assert_close(mixed[:, net.travelling], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("training", [UNEVEN, KEPT], ids=["plain", "kept momentum"])
def test_dense_and_unclipped_is_peer_fedavg_with_uniform_weights(deep, training):
    deep.training = training
    topology = KOut(k=2, weights="uniform")
    mine = rounds(deep, dispfl(topology=topology, density=1.0, clip=None), 4)
    theirs = rounds(deep, PeerFedAvg(PeerFedAvgConfig(topology=topology)), 4)
    for (_, down, hub, state), (_, other_down, other_hub, other) in zip(mine, theirs, strict=True):
        assert state.mask.all() and hub.mhat.all()
        torch.testing.assert_close(down.w, other_down.w, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(hub.w, other_hub.w, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(state.w, other.w, rtol=1e-11, atol=1e-13)


# Training


def reference(toy, start, mask, velocity, *, round, clip):
    """One peer's local training with torch's own optimizer; model and momentum are masked after each step."""
    net, peer = toy.net, 0
    optimizer_of = toy.training.optimizer
    w = torch.nn.Parameter(start[net.weights].clone())
    optimizer = torch.optim.SGD(
        [w], optimizer_of.lr, momentum=optimizer_of.momentum, weight_decay=optimizer_of.weight_decay
    )
    optimizer.state[w]["momentum_buffer"] = velocity * mask
    for batch in toy.batches(round, peer):
        logits = net.bind(start[None], leaf=w[None])(batch.x)[0]
        w.grad = torch.autograd.grad(nn.functional.cross_entropy(logits, batch.y[0]), w)[0]
        if clip:
            nn.utils.clip_grad_norm_([w], clip)
        optimizer.step()
        with torch.no_grad():
            w.mul_(mask)
            optimizer.state[w]["momentum_buffer"].mul_(mask)
    return w.detach(), optimizer.state[w]["momentum_buffer"]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_training_is_torchs_with_model_and_momentum_masked_after_every_step(deep, clip):
    """The norm that is clipped is that of the gradient in all weights; momentum of before is masked, too."""
    deep.training = KEPT
    method = dispfl(density=0.5, clip=clip)
    state = method.init_state(deep.net, deep.clients)
    plan = deep.plan(2, [0])
    down = method.download(
        deep.net, method.init_hub(deep.net, deep.clients), plan._replace(graph=_alone(method, deep))
    )
    cohort = deep.cohort(plan)
    velocity = torch.randn(1, deep.net.num_weights, generator=torch.Generator().manual_seed(1)).double()
    cohort.velocity = velocity
    before = velocity.clone()
    first = type(state)(*(field[:1] for field in state))
    after, up = method.local_update(cohort, first, down)
    start = method.personalised(deep.net, first, down)[0]
    w, buffer = reference(deep, start, first.mask[0], velocity[0], round=2, clip=clip)
    torch.testing.assert_close(after.w[0, deep.net.weights], w, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(cohort.velocity[0], buffer, rtol=1e-10, atol=1e-13)
    assert torch.equal(velocity, before) and torch.equal(up.mhat, first.mask)
    assert (cohort.velocity[~first.mask] == 0).all()


def _alone(method, toy):
    """A graph without edges."""
    plan = method.plan(toy.net, None, toy.clients, 1, lambda round: toy.clients.ids)
    return plan.graph.induced(torch.zeros(4, dtype=torch.bool))


@pytest.mark.parametrize("momentum_state", ["reset", "keep"])
def test_weights_outside_a_mask_are_zero_after_every_step(deep, monkeypatch, momentum_state):
    deep.training = MOVING.model_copy(update={"momentum_state": momentum_state})
    seen = []
    step = SGD.step

    def watched(self, w, g, moments, lr, pull=None):
        step(self, w, g, moments, lr, pull)
        seen.append(((w == 0).sum(1), (moments.first == 0).sum(1)))

    monkeypatch.setattr(SGD, "step", watched)
    method = dispfl(density=0.5)
    found = rounds(deep, method, 3)
    untrained = deep.net.num_weights - sum(erk_counts(deep.net.shapes, 0.5))
    assert len(seen) > 12
    for zeros, still in seen:
        assert (zeros >= untrained).all() and (still >= untrained).all()
    for _, _, hub, state in found:
        assert (hub.w[:, deep.net.weights][~hub.mhat] == 0).all()
        assert torch.equal(state.w[:, deep.net.shared], hub.w)


# Who is there, and what is sent


@pytest.mark.parametrize("unreachable", ["train", "rest"])
def test_a_peer_that_cannot_be_reached_trains_alone_or_rests(deep, unreachable):
    method = dispfl(topology=KOut(k=3, p_active=0.5), unreachable=unreachable, density=0.5)
    before = method.init_hub(deep.net, deep.clients), method.init_state(deep.net, deep.clients)
    away = 0
    for plan, down, hub, state in rounds(deep, method, 6):
        alone = [peer for peer in range(4) if not len(plan.graph.sources_of(peer))]
        if unreachable == "train":
            assert plan.ids.tolist() == [0, 1, 2, 3]
            for peer in alone:
                assert torch.equal(down.w[peer], before[0].w[peer])
                assert not torch.equal(hub.w[peer], before[0].w[peer])
                away += 1
        else:
            for peer in set(range(4)) - set(plan.ids.tolist()):
                assert torch.equal(state.w[peer], before[1].w[peer])
                assert torch.equal(state.mask[peer], before[1].mask[peer])
                assert torch.equal(hub.w[peer], before[0].w[peer])
                away += 1
        ends = {
            end for message in method.sent_down(deep.net, plan, down) for end in (message.src, message.dst)
        }
        assert not ends & set(alone)
        before = hub, state
    assert away > 3


def test_who_does_not_take_part_does_not_train_either_way(deep):
    method = dispfl(unreachable="train")
    hub = method.init_hub(deep.net, deep.clients)
    plan = method.plan(deep.net, hub, deep.clients, 1, lambda round: torch.tensor([0, 2]))
    assert plan.ids.tolist() == [0, 2] and plan.sizes.tolist() == [7, 10]
    assert plan.graph.sources.tolist() == [2, 0]


def test_messages_are_what_each_published_mask_holds_and_the_mask_in_bits(deep):
    method = dispfl(topology=KOut(k=2), density=(0.3, 0.8))
    found = rounds(deep, method, 3)
    for (_, _, hub, _), (plan, down, _, _) in zip(found, found[1:], strict=False):
        messages = method.sent_down(deep.net, plan, down)
        edges = Counter(zip(plan.graph.sources.tolist(), plan.graph.receivers.tolist(), strict=True))
        sizes = hub.mhat.sum(1).tolist()
        assert Counter((m.src, m.dst) for m in messages if m.kind == "full") == edges
        assert Counter((m.src, m.dst) for m in messages if m.kind == "mask") == edges
        for message in messages:
            if message.kind == "full":
                assert (message.values, message.bytes) == (sizes[message.src], 8 * sizes[message.src])
            else:
                assert message.bytes == message.values == math.ceil(deep.net.num_weights / 8)
    assert len(set(sizes)) == 2
    assert method.sent_up(deep.net, plan.ids, None) == []


# Bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "anneal_rounds"),
        ({"anneal_rounds": 0}, "anneal_rounds"),
        ({"anneal_rounds": 5, "density": 0.0}, "density"),
        ({"anneal_rounds": 5, "density": (0.5, 1.5)}, "density"),
        ({"anneal_rounds": 5, "density": ()}, "density"),
        ({"anneal_rounds": 5, "clip": 0.0}, "clip"),
        ({"anneal_rounds": 5, "alpha0": 1.1}, "alpha0"),
    ],
)
def test_options_out_of_range(options, named):
    with pytest.raises(ValidationError, match=named):
        Config(**options)


def test_what_cannot_work_is_refused_before_a_run(deep):
    with pytest.raises(ConfigError, match=r"density = 0.01 leaves a tensor of 3x6 weights without any"):
        dispfl(density=(0.5, 0.01)).check(deep.net, deep.clients, UNEVEN)
    with pytest.raises(ConfigError, match=r"topology.lazy = 0.5"):
        dispfl(topology=KOut(k=2, lazy=0.5)).check(deep.net, deep.clients, UNEVEN)
    dispfl().check(deep.net, deep.clients, UNEVEN)


def test_relations_are_shares_of_common_weights(deep):
    """By hand, of each peer with itself and its two neighbours."""
    method = dispfl(topology=Ring(), density=(0.3, 0.6))
    plan, down, hub, _ = rounds(deep, method, 2)[0]
    pairs = method.relations(deep.net, hub, plan, down)["mask overlap"]
    found = {
        (receiver, source): value
        for receiver, source, value in zip(*(field.tolist() for field in pairs), strict=True)
    }
    edges = set(zip(plan.graph.receivers.tolist(), plan.graph.sources.tolist(), strict=True))
    assert set(found) == edges | {(peer, peer) for peer in range(4)}
    for (receiver, source), value in found.items():
        own, other = hub.mhat[receiver], hub.mhat[source]
        assert value == float((own & other).sum()) / float(own.sum())
    assert 0 < min(found.values()) < 1 == max(found.values())
