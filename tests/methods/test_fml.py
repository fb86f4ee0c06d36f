"""FML: one batch by hand, limits in which it is another method, and what is averaged."""

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fml import FML, Config
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.methods.pfml import PFML
from raypfl.methods.pfml import Config as PFMLConfig
from raypfl.training import SGD, Adam, TrainingConfig


def make(**options):
    return FML(Config(**options))


@pytest.fixture
def uneven(make_toy):
    training = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=0.01))
    return make_toy(training=training, hidden=5, dtype=torch.float64)


def test_is_the_algorithm(uneven):
    """Plain torch on one client, three rounds, momentum of both models fresh in each of them."""
    method, net, client = make(alpha=0.7, beta=0.2), uneven.net, 2
    v = u = method.init_hub(net, uneven.clients).w[0]
    history = uneven.run(method, 3, lambda number: [client])
    for number, done in enumerate(history, 1):
        models = [v.clone().requires_grad_(), u.clone().requires_grad_()]
        optimizer = torch.optim.SGD(models, lr=0.1, momentum=0.9, weight_decay=0.01)
        for batch in uneven.batches(number, client):
            logits = [net.bind(net.assemble(model[None]))(batch.x)[0] for model in models]
            log_p = [one.log_softmax(1) for one in logits]
            losses = [
                share * torch.nn.functional.cross_entropy(logits[own], batch.y[0])
                + (1 - share)
                * torch.nn.functional.kl_div(log_p[own], log_p[1 - own].detach().exp(), reduction="batchmean")
                for own, share in ((0, 0.7), (1, 0.2))
            ]
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()
        v, u = (model.detach() for model in models)
        torch.testing.assert_close(uneven.weights(done.state.v)[client], v, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(done.hub.w[0], u, rtol=1e-10, atol=1e-12)
        assert (v - u).abs().max() > 1e-3


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)], ids=["sgd", "adam"])
def test_with_labels_alone_it_is_separate_beside_fedavg(optimizer, make_toy):
    """Equal sizes, since FML's mean is unweighted."""
    training = TrainingConfig(epochs=2, batch_size=3, optimizer=optimizer)
    toy = make_toy((5, 5, 5), training=training, dtype=torch.float64)
    found = toy.run(make(alpha=1, beta=1), 3)
    separate, fedavg = (toy.run(method, 3) for method in (Local(LocalConfig()), FedAvg(FedAvgConfig())))
    for done, alone, mean in zip(found, separate, fedavg, strict=True):
        torch.testing.assert_close(done.state.v, alone.state.w, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(done.hub.w, mean.hub.w, rtol=1e-12, atol=1e-13)


def test_is_pfml_without_personalisation(make_toy):
    """PFML with K = 0, lambda = 0, beta = 1 has unit weights; half of them at twice the rate are the same."""
    training = TrainingConfig(steps=3, batch_size=100, optimizer=SGD(lr=0.2))
    toy = make_toy(training=training, hidden=5, dtype=torch.float64)
    method = PFML(PFMLConfig(inner_steps=0, lam=0, beta=1, rate=0.1, local_batches=3))
    for one, other in zip(toy.run(make(), 3), toy.run(method, 3), strict=True):
        torch.testing.assert_close(one.hub.w, other.hub.w, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(one.state.v, other.state.m, rtol=1e-11, atol=1e-13)


def test_the_mean_is_unweighted(uneven):
    done = uneven.run(make(), 1)[0]
    torch.testing.assert_close(done.hub.w[0], done.up.u.mean(0), rtol=1e-13, atol=1e-14)


def test_the_own_model_stays_and_is_kept(uneven):
    method = make()
    history = uneven.run(method, 2, lambda number: [[0, 1], [1, 2]][number - 1])
    first, second = (done.state.v for done in history)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    assert torch.equal(second[3], method.init_state(uneven.net, uneven.clients).v[3])
    plan = uneven.plan(2, [1, 2])
    sent = method.sent_up(uneven.net, plan.ids, history[-1].up)
    assert [(message.kind, message.values) for message in sent] == [("u", uneven.net.num_weights)] * 2


def test_rates_follow_the_decay(make_toy):
    training = TrainingConfig(epochs=1, batch_size=100, optimizer=SGD(lr=0.1), lr_decay=0.001)
    toy = make_toy(training=training, dtype=torch.float64)
    history = toy.run(make(), 2)
    moved = [(done.up.u - done.down.w).norm() for done in history]
    assert 0 < moved[1] < 0.01 * moved[0]


def test_kept_momentum_is_refused(uneven):
    kept = uneven.training.model_copy(update={"momentum_state": "keep"})
    with pytest.raises(ConfigError, match=r"method fml trains.*\n?.*momentum_state"):
        make().check(uneven.net, uneven.clients, kept)
