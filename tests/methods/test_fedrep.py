"""FedRep: two phases, each of which leaves the other part alone."""

import pytest
import torch
from torch.nn import functional

from raypfl.engine.messages import take
from raypfl.errors import ConfigError, ShapeError
from raypfl.methods.fedrep import Config, FedRep
from raypfl.methods.start import common_start
from raypfl.models import MLP, build
from raypfl.training import SGD, Cohort, Network, TrainingConfig, cross_entropy

HEAVY = TrainingConfig(
    epochs=7, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=0.01), lr_decay=0.9
)
"""Momentum and decay that would move whatever they are given."""


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, training=HEAVY, dtype=torch.float64)


def rounds_of(toy, rounds=2, **options):
    return toy.run(FedRep(Config(**options)), rounds)


@pytest.mark.parametrize("features", ["kept", "fresh"])
def test_frozen_part_sees_neither_momentum_nor_decay(deep, features):
    """Each phase alone leaves the other part bit for bit, from a state that the other phase has moved."""
    state = rounds_of(deep)[-1]
    heads_only = FedRep(Config(head_epochs=2, body_epochs=0, features=features))
    after = deep.round(heads_only, state.hub, state.state, deep.plan(3))
    assert torch.equal(after.up.body, state.hub.body.expand(4, -1))
    assert (after.state.head != state.state.head).any(1).all()
    body_only = FedRep(Config(head_epochs=0, body_epochs=2))
    after = deep.round(body_only, state.hub, state.state, deep.plan(3))
    assert torch.equal(after.state.head, state.state.head)
    assert (after.up.body != state.hub.body).any(1).all()


def test_without_head_epochs_it_is_fedavg_of_extractors_under_fixed_heads(deep):
    net = deep.net
    done = rounds_of(deep, 3, head_epochs=0, body_epochs=2)
    w = common_start(net, seed=0, num_clients=4)
    for number in (1, 2, 3):
        cohort = deep.cohort(deep.plan(number))
        trained = cohort.fit(w, cross_entropy, epochs=2, columns=net.extractor).w
        mean = (deep.clients.sizes.double()[:, None] * trained).sum(0) / deep.clients.sizes.sum()
        torch.testing.assert_close(done[number - 1].hub.body[0], mean[net.body], rtol=1e-12, atol=1e-14)
        w = w.clone()
        w[:, net.extractor] = done[number - 1].hub.body


@pytest.mark.parametrize("head", ["head", "fc2"])
@pytest.mark.parametrize("batch_size", [3, 1000])
def test_kept_features_give_the_numbers_of_fresh_ones(make_toy, head, batch_size):
    """Also for a head of two layers, and batches of which the last one is short."""
    toy = make_toy(training=HEAVY.model_copy(update={"batch_size": batch_size}), dtype=torch.float64)
    model = MLP(hidden=(4, 3))
    toy.net = Network(lambda: build(model, (4,), 3).module, head, dtype=torch.float64)
    kept, fresh = (rounds_of(toy, 3, head_epochs=3, features=how) for how in ("kept", "fresh"))
    for one, other in zip(kept, fresh, strict=True):
        torch.testing.assert_close(one.state.head, other.state.head, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(one.hub.body, other.hub.body, rtol=1e-12, atol=1e-14)


def test_full_batch_round_step_by_step(make_toy):
    """Two steps of gradient descent on the head at z = f(x; theta), one on the extractor at the new head."""
    training = TrainingConfig(epochs=1, batch_size=1000, optimizer=SGD(lr=0.5))
    toy = make_toy(hidden=4, training=training, dtype=torch.float64)
    method = FedRep(Config(head_epochs=2, body_epochs=1))
    done = toy.run(method, 1)[0]
    state, hub = method.init_state(toy.net, toy.clients), method.init_hub(toy.net, toy.clients)
    for client, own in enumerate(toy.indices):
        x, y = toy.x[own], toy.y[own]
        head, body = state.head[client].clone(), hub.body[0].clone()

        def loss(head, body, x=x, y=y):
            z = functional.linear(x, body[:16].view(4, 4), body[16:]).relu()
            return functional.cross_entropy(functional.linear(z, head[:12].view(3, 4), head[12:]), y)

        for _ in range(2):
            leaf = head.clone().requires_grad_()
            head = head - 0.5 * torch.autograd.grad(loss(leaf, body), leaf)[0]
        leaf = body.clone().requires_grad_()
        body = body - 0.5 * torch.autograd.grad(loss(head, leaf), leaf)[0]
        torch.testing.assert_close(done.state.head[client], head, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(done.up.body[client], body, rtol=1e-12, atol=1e-14)


def test_phases_meet_their_samples_in_different_orders(deep, monkeypatch):
    """Two passes with one key would show every batch to the head right before the extractor."""
    purposes = []
    original = Cohort.batches

    def batches(self, epochs=None, purpose="batches"):
        purposes.append((epochs, purpose))
        return original(self, epochs, purpose)

    monkeypatch.setattr(Cohort, "batches", batches)
    rounds_of(deep, 1, head_epochs=3, body_epochs=2)
    assert set(purposes) == {(3, "head batches"), (2, "batches")}


def test_weights_of_clients(deep):
    """By samples (7, 4, 10, 5), or all the same."""
    for how, weights in (("size", [7.0, 4, 10, 5]), ("uniform", [1.0, 1, 1, 1])):
        done = rounds_of(deep, 1, aggregation=how)[0]
        share = torch.tensor(weights, dtype=torch.float64)[:, None] / sum(weights)
        torch.testing.assert_close(done.hub.body[0], (share * done.up.body).sum(0), rtol=1e-13, atol=1e-15)


def test_defaults_are_those_of_the_release():
    config = Config()
    assert (config.head_epochs, config.body_epochs, config.aggregation) == (10, 1, "size")


def test_training_loss_is_that_of_the_last_phase(deep):
    for options in ({"head_epochs": 1, "body_epochs": 0}, {"head_epochs": 1, "body_epochs": 1}):
        method = FedRep(Config(**options))
        cohort = deep.cohort(deep.plan())
        state = method.init_state(deep.net, deep.clients)
        down = method.download(deep.net, method.init_hub(deep.net, deep.clients), deep.plan())
        method.local_update(cohort, take(state, cohort.ids), down)
        assert cohort.losses.shape == (4,) and (cohort.losses > 0).all()


def test_kept_features_are_refused_where_they_would_not_be_the_same(make_toy):
    toy = make_toy(hidden=4)
    toy.net.random = True
    with pytest.raises(ConfigError, match="method.features = 'kept', but features differ from step to step"):
        FedRep(Config(features="kept")).check(toy.net, toy.clients, HEAVY)
    FedRep(Config(features="auto")).check(toy.net, toy.clients, HEAVY)
    with pytest.raises(ShapeError, match="cannot be kept"):
        toy.cohort(toy.plan()).on_features(toy.rows())


def test_nothing_to_train_is_refused(deep):
    with pytest.raises(ConfigError, match="both 0"):
        FedRep(Config(head_epochs=0, body_epochs=0)).check(deep.net, deep.clients, HEAVY)
