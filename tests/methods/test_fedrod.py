"""FedRoD: balanced softmax, two losses that share no parameter, and the sum of two heads."""

import pytest
import torch
from torch.nn import functional

from raypfl.errors import ConfigError
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedrod import Config, FedRoD, log_prior, two_losses
from raypfl.methods.global_model import Down
from raypfl.models import MLP, build
from raypfl.training import SGD, Batch, Network, TrainingConfig

METHOD = FedRoD(Config())
MINI_BATCHES = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.5))


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, training=MINI_BATCHES, dtype=torch.float64)


def one_batch(toy):
    """All samples of client 0, and its model, its personal head another one."""
    own = toy.indices[0]
    batch = Batch(slice(0, 1), toy.x[own][None], toy.y[own][None], None, torch.tensor([float(len(own))]))
    w = toy.rows(seed=1)[:1].requires_grad_()
    return batch, w, toy.rows(seed=2)[:1, toy.net.head].clone().requires_grad_()


def test_classes_that_a_client_lacks_leave_the_loss_finite(make_toy):
    """Clients of one class, padded batches: padding has labels of other clients, whose loss is infinite."""
    toy = make_toy(hidden=4, training=MINI_BATCHES, dtype=torch.float64)
    for client, own in enumerate(toy.indices):
        toy.y[own] = client % 3
    toy.clients = toy.clients._replace(
        label_counts=torch.stack([toy.y[own].bincount(minlength=3) for own in toy.indices])
    )
    done = toy.run(METHOD, 2)[-1]
    assert all(field.isfinite().all() for message in (done.hub, done.state, done.up) for field in message)
    # With one class in the normaliser the balanced loss is zero whatever the logits.
    start = METHOD.init_hub(toy.net, toy.clients).w
    torch.testing.assert_close(done.hub.w, start, rtol=1e-14, atol=1e-16)
    cohort = toy.cohort(toy.plan())
    METHOD.local_update(cohort, METHOD.init_state(toy.net, toy.clients), Down(start, start[:, :0]))
    assert cohort.losses.isfinite().all()


def test_prior_is_exact():
    counts = torch.tensor([[2, 0, 6], [1, 1, 1]])
    prior = log_prior(counts, 1.0)
    assert prior[0].isneginf().tolist() == [False, True, False]
    torch.testing.assert_close(prior[0].softmax(0), torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64))
    squared = log_prior(counts, 2.0)[0].softmax(0)
    torch.testing.assert_close(squared, torch.tensor([0.1, 0.0, 0.9], dtype=torch.float64))
    assert log_prior(counts, 0.0)[0].tolist() == [0.0, -torch.inf, 0.0]


def test_loss_at_zero_logits_is_minus_log_of_the_own_class_share(deep):
    """And scaling all counts changes nothing."""
    batch, w, personal = one_batch(deep)
    counts = deep.clients.label_counts[:1]
    m = deep.net.bind(torch.zeros_like(w))
    share = counts / counts.sum()
    expected = -share[0, batch.y[0]].double().log().mean()
    chance = functional.cross_entropy(personal.detach()[0, 12:].expand(7, -1), batch.y[0])
    for scale in (1, 5):
        loss = two_losses(m, batch, personal.detach(), log_prior(scale * counts, 1.0))
        torch.testing.assert_close(loss[0], expected + chance, rtol=1e-6, atol=0)


def test_each_loss_moves_its_own_parameters_alone(deep):
    """Against the two losses written out, each differentiated by itself."""
    batch, w, personal = one_batch(deep)
    prior = log_prior(deep.clients.label_counts[:1], 1.0)
    own, generic = torch.autograd.grad(
        two_losses(deep.net.bind(w), batch, personal, prior).sum(), (personal, w)
    )

    def logits(head, w):
        z = functional.linear(batch.x[0], w[0, 15:31].view(4, 4), w[0, 31:35]).relu()
        return functional.linear(z, head[0, :12].view(3, 4), head[0, 12:15])

    balanced = functional.cross_entropy(logits(w, w) + prior, batch.y[0])
    residual = functional.cross_entropy(logits(w, w).detach() + logits(personal, w.detach()), batch.y[0])
    torch.testing.assert_close(generic, torch.autograd.grad(balanced, w)[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(own, torch.autograd.grad(residual, personal)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("init", ["copy", "zero"])
def test_equal_counts_make_the_generic_part_fedavg(make_toy, init):
    """The prior is then a constant shift of all logits."""
    toy = make_toy(sizes=(6, 3, 9, 6), hidden=4, training=MINI_BATCHES, dtype=torch.float64)
    for own in toy.indices:
        toy.y[own] = torch.arange(len(own)) % 3
    method = FedRoD(Config(personal_init=init))
    for mine, theirs in zip(toy.run(method, 3), toy.run(FedAvg(FedAvgConfig()), 3), strict=True):
        torch.testing.assert_close(mine.hub.w, theirs.hub.w, rtol=1e-11, atol=1e-13)


def test_unequal_counts_do_not(deep):
    mine, theirs = deep.run(METHOD, 1)[0], deep.run(FedAvg(FedAvgConfig()), 1)[0]
    assert (mine.hub.w - theirs.hub.w).abs().max() > 1e-3


def test_without_personal_part_both_models_are_one(deep):
    method = FedRoD(Config(personal_init="zero"))
    state = method.init_state(deep.net, deep.clients)
    w = deep.rows()[:1, deep.net.weights]
    down = Down(w, w[:, :0])
    assert torch.equal(method.personalised(deep.net, state, down), method.global_model(deep.net, state, down))


def test_personalised_logits_are_the_sum_of_both_heads(deep):
    """Before training with the newest generic head, after it with the client's own generic part."""
    first, second = deep.run(METHOD, 2)
    net, x = deep.net, deep.x[None].expand(4, -1, -1)
    for state, up in ((first.state, None), (second.state, second.up)):
        whole = net.bind(METHOD.personalised(net, state, second.down, up))(x)
        generic = net.assemble((second.down.w if up is None else up.w).expand(4, -1), state.private)
        m = net.bind(generic)
        z = m.features(x)
        torch.testing.assert_close(whole, m.classify(z) + m.classify(z, head=state.personal))


def test_both_losses_are_taken_before_the_step(make_toy):
    """One full-batch step: the personal head sees the logits of the model that was received."""
    training = TrainingConfig(epochs=1, batch_size=1000, optimizer=SGD(lr=0.5))
    toy = make_toy(hidden=4, training=training, dtype=torch.float64)
    done = toy.run(METHOD, 1)[0]
    state, hub = METHOD.init_state(toy.net, toy.clients), METHOD.init_hub(toy.net, toy.clients)
    for client, own in enumerate(toy.indices):
        m = toy.net.bind(toy.net.assemble(hub.w))
        z = m.features(toy.x[own][None])
        leaf = state.personal[client : client + 1].clone().requires_grad_()
        logits = m.classify(z) + m.classify(z, head=leaf)
        (g,) = torch.autograd.grad(functional.cross_entropy(logits[0], toy.y[own]), leaf)
        expected = state.personal[client] - 0.5 * g[0]
        torch.testing.assert_close(done.state.personal[client], expected, rtol=1e-12, atol=1e-14)


def test_a_head_that_is_more_than_one_linear_layer_is_refused(make_toy):
    """The sum of two such heads is no head."""
    model = MLP(hidden=(4, 3))
    net = Network(lambda: build(model, (4,), 3).module, "fc2")
    with pytest.raises(ConfigError, match="fedrod needs a head .* model.head = 'fc2' is more than that"):
        METHOD.check(net, make_toy().clients, MINI_BATCHES)
    with pytest.raises(ConfigError, match="covers every layer"):
        METHOD.check(make_toy().net, make_toy().clients, MINI_BATCHES)
