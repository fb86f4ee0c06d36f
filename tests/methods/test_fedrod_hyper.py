"""FedRoD with a hypernetwork: heads from label shares, trained by the personal loss alone."""

import pytest
import torch
from torch import nn

from raypfl.errors import ConfigError
from raypfl.methods.fedrod import Config as FedRoDConfig
from raypfl.methods.fedrod import FedRoD, log_prior, two_losses
from raypfl.methods.fedrod_hyper import Config, FedRoDHyper, heads
from raypfl.training import SGD, Batch, TrainingConfig

METHOD = FedRoDHyper(Config(hidden=5))
MINI_BATCHES = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.5))


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, training=MINI_BATCHES, dtype=torch.float64)


def perceptron(omega, outputs=15):
    """The same hypernetwork as a module: 3 classes, 5 units."""
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, outputs)).double()
    nn.utils.vector_to_parameters(omega.clone(), module.parameters())
    return module


def test_heads_are_those_of_a_perceptron(deep):
    """One hypernetwork for all, and one each."""
    hub, state = METHOD.init_hub(deep.net, deep.clients), METHOD.init_state(deep.net, deep.clients)
    shares = deep.clients.label_counts / deep.clients.sizes[:, None]
    torch.testing.assert_close(state.label_shares, shares.double(), rtol=1e-6, atol=0)
    expected = perceptron(hub.omega[0])(state.label_shares)
    torch.testing.assert_close(heads(hub.omega, state.label_shares, 5), expected, rtol=1e-12, atol=1e-14)
    own = deep.run(METHOD, 1)[0].up.omega
    for client in range(4):
        one = perceptron(own[client])(state.label_shares[client])
        torch.testing.assert_close(heads(own, state.label_shares, 5)[client], one, rtol=1e-12, atol=1e-14)


def test_generic_part_is_that_of_fedrod(deep):
    """The personal loss reaches neither extractor nor generic head."""
    mine, theirs = deep.run(METHOD, 3), deep.run(FedRoD(FedRoDConfig()), 3)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.hub.w, other.hub.w, rtol=1e-11, atol=1e-13)


def test_one_full_batch_step_of_the_hypernetwork(make_toy):
    training = TrainingConfig(epochs=1, batch_size=1000, optimizer=SGD(lr=0.5))
    toy = make_toy(hidden=4, training=training, dtype=torch.float64)
    done = toy.run(METHOD, 1)[0]
    state, hub = METHOD.init_state(toy.net, toy.clients), METHOD.init_hub(toy.net, toy.clients)
    prior = log_prior(toy.clients.label_counts, 1.0)
    expected = []
    for client, own in enumerate(toy.indices):
        module, x, y = perceptron(hub.omega[0]), toy.x[own][None], toy.y[own][None]
        batch = Batch(slice(0, 1), x, y, None, torch.tensor([float(len(own))]))
        m = toy.net.bind(toy.net.assemble(hub.w))
        two_losses(m, batch, module(state.label_shares[client])[None], prior[client][None]).sum().backward()
        torch.optim.SGD(module.parameters(), 0.5).step()
        expected.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    torch.testing.assert_close(done.up.omega, torch.stack(expected), rtol=1e-11, atol=1e-13)
    share = toy.clients.sizes.double() / toy.clients.sizes.sum()
    torch.testing.assert_close(done.hub.omega[0], share @ torch.stack(expected), rtol=1e-11, atol=1e-13)


def test_client_that_never_trained_has_a_head_of_its_own(deep):
    history = deep.run(METHOD, 3, lambda round: [0, 1, 3])
    last, down = history[-1], METHOD.download(deep.net, history[-1].hub, deep.plan(4))
    rows = METHOD.personalised(deep.net, last.state, down) - METHOD.global_model(deep.net, last.state, down)
    personal = perceptron(last.hub.omega[0])(last.state.label_shares[2])
    torch.testing.assert_close(rows[2, deep.net.head], personal, rtol=1e-9, atol=1e-12)
    assert torch.equal(rows[:, deep.net.extractor], torch.zeros_like(rows[:, deep.net.extractor]))


def test_label_shares_are_not_sent(deep):
    done = deep.run(METHOD, 1)[0]
    assert done.up._fields == done.down._fields == ("w", "omega")


def test_model_without_hidden_layer_is_refused(make_toy):
    with pytest.raises(ConfigError, match="fedrod_hyper .* covers every layer"):
        METHOD.check(make_toy().net, make_toy().clients, MINI_BATCHES)
