"""FedTC: the algorithm step by step with `torch.optim`, and what it is the same as."""

import pytest
import torch
from torch.nn import functional

from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedrep import Config as FedRepConfig
from raypfl.methods.fedrep import FedRep
from raypfl.methods.fedtc import Config, FedTC
from raypfl.methods.start import common_start
from raypfl.training import SGD, Adam, TrainingConfig

PAPER = TrainingConfig(
    epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=0.01), lr_decay=0.9
)
"""The paper's kind of training, at rates that show in a few rounds."""
ONE_STEP = TrainingConfig(epochs=1, batch_size=1000, optimizer=SGD(lr=0.5))


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, training=PAPER, dtype=torch.float64)


def written_out(toy, rounds, config, order=("classifier", "extractor")):
    """Rounds of the algorithm box, one client after the other, with modules' optimizers: classifiers, hub."""
    net, options = toy.net, toy.training.optimizer
    start = common_start(net, 0)[0]
    theta, phi_g = start[net.extractor].clone(), start[net.head].clone()
    clients = range(len(toy.indices))
    thetas = [theta.clone().requires_grad_() for _ in clients]
    phis = [phi_g.clone().requires_grad_() for _ in clients]

    def sgd(parameter, lr):
        return torch.optim.SGD([parameter], lr, momentum=options.momentum, weight_decay=options.weight_decay)

    optimizers = [{} for _ in clients]
    for number in range(1, rounds + 1):
        decay = 0.9 ** (number - 1)
        for client in clients:
            mine, phi, own = thetas[client], phis[client], optimizers[client]
            if number == 1 or toy.training.momentum_state == "reset":
                own |= {"extractor": sgd(mine, 0.1), "classifier": sgd(phi, config.classifier_lr)}
            own["extractor"].param_groups[0]["lr"] = 0.1 * decay
            own["classifier"].param_groups[0]["lr"] = config.classifier_lr * decay
            with torch.no_grad():
                mine.copy_(theta)
            psi = phi_g.clone().requires_grad_(config.shared_head == "live")
            guide = sgd(psi, config.classifier_lr * decay)
            for batch in toy.batches(number, client):
                x, y = batch.x[0], batch.y[0]
                z = functional.linear(x, mine[:16].view(4, 4), mine[16:]).relu()

                def loss(z, head, y=y):
                    logits = functional.linear(z, head[:12].view(3, 4), head[12:])
                    return functional.cross_entropy(logits, y)

                # Both gradients before both steps: autograd has no way back through a parameter that moved.
                phi.grad = torch.autograd.grad(loss(z.detach(), phi), phi)[0]
                total = loss(z, psi) + (loss(z, phi.detach()) if config.local_loss_to_extractor else 0)
                if config.shared_head == "live":
                    mine.grad, psi.grad = torch.autograd.grad(total, (mine, psi))
                    guide.step()
                else:
                    mine.grad = torch.autograd.grad(total, mine)[0]
                for step in order:
                    own[step].step()
        share = toy.clients.sizes.double() / toy.clients.sizes.sum()
        theta = (share[:, None] * torch.stack(thetas).detach()).sum(0)
        phi_g = (share[:, None] * torch.stack(phis).detach()).sum(0)
    return torch.stack(phis).detach(), torch.cat([phi_g, theta])


@pytest.mark.parametrize("momentum_state", ["keep", "reset"])
@pytest.mark.parametrize("local_loss_to_extractor", [False, True])
@pytest.mark.parametrize("shared_head", ["frozen", "live"])
def test_three_rounds_step_by_step(deep, shared_head, local_loss_to_extractor, momentum_state):
    config = Config(
        classifier_lr=0.02, shared_head=shared_head, local_loss_to_extractor=local_loss_to_extractor
    )
    deep.training = PAPER.model_copy(update={"momentum_state": momentum_state})
    done = deep.run(FedTC(config), 3)[-1]
    phis, hub = written_out(deep, 3, config)
    torch.testing.assert_close(done.state.head, phis, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(done.hub.w[0], hub, rtol=1e-10, atol=1e-12)


def test_options_make_a_difference(deep):
    """The step-by-step test above would not see an option that both sides ignore."""
    found = [
        deep.run(FedTC(Config(classifier_lr=0.02, **options)), 2)[-1].hub.w
        for options in (
            {},
            {"shared_head": "live"},
            {"local_loss_to_extractor": True},
        )
    ]
    deep.training = PAPER.model_copy(update={"momentum_state": "keep"})
    found.append(deep.run(FedTC(Config(classifier_lr=0.02)), 2)[-1].hub.w)
    assert all((other - found[0]).abs().max() > 1e-4 for other in found[1:])


def test_order_of_the_two_steps_does_not_matter(deep):
    config = Config(classifier_lr=0.02)
    one, other = (
        written_out(deep, 2, config, order)
        for order in (("classifier", "extractor"), ("extractor", "classifier"))
    )
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_own_classifier_does_not_reach_the_extractor(deep):
    """The classic mistake. Other own classifiers, the same shared one: the same extractors bit for bit."""
    method = FedTC(Config(classifier_lr=0.02))
    hub, state = method.init_hub(deep.net, deep.clients), method.init_state(deep.net, deep.clients)
    other = state._replace(head=deep.rows()[:, deep.net.head].clone())
    one, two = (deep.round(method, hub, own, deep.plan()) for own in (state, other))
    body = deep.net.body
    assert torch.equal(one.up.w[:, body], two.up.w[:, body])
    assert (one.state.head != two.state.head).any(1).all()
    both = FedTC(Config(classifier_lr=0.02, local_loss_to_extractor=True))
    one, two = (deep.round(both, hub, own, deep.plan()) for own in (state, other))
    assert (one.up.w[:, body] != two.up.w[:, body]).any(1).all()


def test_own_classifier_is_never_overwritten(deep):
    """A client that is away finds its classifier as it left it, and evaluates it on the newest extractor."""
    method = FedTC(Config(classifier_lr=0.02))
    first, second, _ = deep.run(method, 3, lambda round: None if round == 1 else [0, 1])
    assert torch.equal(second.state.head[2:], first.state.head[2:])
    pre = method.personalised(deep.net, second.state, method.download(deep.net, second.hub, deep.plan()))
    assert torch.equal(pre[:, deep.net.head], second.state.head)
    assert torch.equal(pre[:, deep.net.body], second.hub.w[:, deep.net.body].expand(4, -1))
    mean = (7 * second.up.w[0] + 4 * second.up.w[1]) / 11
    torch.testing.assert_close(second.hub.w[0], mean, rtol=1e-13, atol=1e-15)


def test_reported_logits_are_those_of_the_own_classifier(deep):
    method = FedTC(Config(classifier_lr=0.02))
    first, second = deep.run(method, 2)
    net, x = deep.net, deep.x[None].expand(4, -1, -1)
    pre = method.personalised(net, first.state, second.down)
    m = net.bind(method.global_model(net, first.state, second.down))
    z = m.features(x)
    torch.testing.assert_close(net.bind(pre)(x), m.classify(z, head=first.state.head), rtol=1e-13, atol=0)
    assert (net.bind(pre)(x) - m.classify(z)).abs().max() > 1e-3
    assert method.reported == ("personalised", "pre")


def test_without_classifier_rate_it_is_fedavg_under_a_frozen_random_head(deep):
    """All classifiers stay at the common start; FedRep without head epochs is that training."""
    mine = deep.run(FedTC(Config(classifier_lr=0.0)), 3)
    theirs = deep.run(FedRep(FedRepConfig(head_epochs=0, body_epochs=PAPER.epochs)), 3)
    start = common_start(deep.net, 0)[:, deep.net.head]
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.state.head, start.expand(4, -1))
        torch.testing.assert_close(one.hub.w[:, deep.net.head], start, rtol=1e-14, atol=1e-16)
        torch.testing.assert_close(one.hub.w[:, deep.net.body], other.hub.body, rtol=1e-12, atol=1e-14)


def test_first_full_batch_step_at_one_rate_is_fedavgs(make_toy):
    """Own and shared classifier still coincide, so both gradients do."""
    toy = make_toy(sizes=(7,), hidden=4, training=ONE_STEP, dtype=torch.float64)
    mine = toy.run(FedTC(Config(classifier_lr=0.5)), 1)[0].hub.w
    torch.testing.assert_close(mine, toy.run(FedAvg(FedAvgConfig()), 1)[0].hub.w, rtol=1e-13, atol=1e-15)


def test_identical_clients_agree(make_toy):
    toy = make_toy(sizes=(6, 6, 6), hidden=4, training=ONE_STEP, dtype=torch.float64)
    for own in toy.indices[1:]:
        toy.x[own], toy.y[own] = toy.x[toy.indices[0]], toy.y[toy.indices[0]]
    done = toy.run(FedTC(Config(classifier_lr=0.1)), 3)[-1]
    # Each client sums its samples in its own order.
    for head in (*done.state.head[1:], done.hub.w[0, toy.net.head]):
        torch.testing.assert_close(head, done.state.head[0], rtol=1e-12, atol=1e-14)


def test_adam_runs_with_a_rate_for_the_classifier(make_toy):
    adam = TrainingConfig(epochs=2, batch_size=3, optimizer=Adam(lr=0.01))
    toy = make_toy(hidden=4, training=adam, dtype=torch.float64)
    method = FedTC(Config(classifier_lr=0.005))
    method.check(toy.net, toy.clients, adam)
    up = toy.run(method, 1)[0].up.w
    start = common_start(toy.net, 0)[:, toy.net.weights]
    # Adam's first steps are the rate long, whatever the gradient.
    one_step = TrainingConfig(epochs=1, batch_size=1000, optimizer=Adam(lr=0.01))
    toy.training = one_step
    moved = (toy.run(method, 1)[0].up.w - start).abs().max(1).values
    assert up.isfinite().all()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-4, atol=0)
    head = (toy.run(method, 1)[0].up.w - start)[:, toy.net.head].abs().max(1).values
    torch.testing.assert_close(head, torch.full_like(head, 0.005), rtol=1e-4, atol=0)


def test_defaults_are_the_papers():
    config = Config()
    assert (config.classifier_lr, config.shared_head, config.local_loss_to_extractor) == (
        1e-4,
        "frozen",
        False,
    )
