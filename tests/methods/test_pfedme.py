"""pFedMe: the Moreau envelope and its gradient, limits in which it is another, whose theta is kept."""

import pytest
import torch

from raypfl.methods import pfedme
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.pfedme import Config, Hub, PFedMe, Up
from raypfl.models import BatchNorm2d
from raypfl.training import SGD, Network, TrainingConfig, cross_entropy_per_sample


def make(**options):
    return PFedMe(Config(**{"mu": 0.0, **options}))


@pytest.fixture
def quadratic(make_quadratic, monkeypatch):
    """`F_i = ||theta - b_i||^2 / 2`, b_i the mean sample; one full batch a round."""
    toy = make_quadratic(1.0)
    monkeypatch.setattr(
        pfedme, "cross_entropy", lambda m, batch: batch.mean(0.5 * (m.w[:, None] - batch.x).square().sum(2))
    )
    return toy


def reference(toy, method, rounds):
    """The algorithm box in plain loops over clients and batches: theta, w_i and w of the last round."""
    config, net = method.config, toy.net
    hub = method.init_hub(net, toy.clients).w[0]
    for round in range(1, rounds + 1):
        plan = toy.plan(round)
        uploads, thetas = [], []
        for client in range(len(toy.indices)):
            w = theta = hub
            met = config.local_batches and torch.tensor([(round - 1) * config.local_batches])
            for batch in toy.batches(round, client, steps=config.local_batches, first=met):
                for _ in range(config.inner_steps):
                    leaf = theta.clone().requires_grad_()
                    row = net.assemble(leaf[None])
                    loss = cross_entropy_per_sample(net.bind(row)(batch.x), batch.y).mean()
                    (g,) = torch.autograd.grad(loss, leaf)
                    theta = theta - config.inner_rate * (g + config.lam * (theta - w) + config.mu * theta)
                w = w - config.rate * config.lam * (w - theta)
            uploads.append(w)
            thetas.append(theta)
        share = plan.sizes.double() / plan.sizes.sum()
        hub = (1 - config.beta) * hub + config.beta * (share @ torch.stack(uploads))
    return torch.stack(thetas), torch.stack(uploads), hub


@pytest.mark.parametrize("local_batches", [None, 5])
def test_is_the_papers_algorithm(local_batches, make_toy):
    """Uneven batches, all constants different: theta, its anchor and the server do not mix up."""
    toy = make_toy(dtype=torch.float64)
    method = make(
        lam=3, inner_steps=3, inner_rate=0.2, rate=0.05, beta=1.7, mu=0.01, local_batches=local_batches
    )
    theta, w, hub = reference(toy, method, 2)
    done = toy.run(method, 2)[-1]
    for found, expected in ((toy.weights(done.state.theta), theta), (done.up.w, w), (done.hub.w[0], hub)):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_what_is_kept_is_theta_and_not_the_upload(toy):
    """The live list of the authors' code: overwritten by w_i, its `personalised` score is that of w_i."""
    method, other = make(), make(pm="w")
    done = toy.run(method, 2)[-1]
    kept = method.personalised(toy.net, done.state, done.down, done.up)
    assert (toy.weights(kept) - done.up.w).abs().max() > 1e-2
    assert (toy.weights(kept) - done.hub.w).abs().max() > 1e-2
    same = toy.run(other, 2)[-1]
    uploaded = other.personalised(toy.net, same.state, same.down, same.up)
    assert torch.equal(toy.weights(uploaded), same.up.w)
    assert torch.equal(same.up.w, done.up.w), "which model is evaluated changes no training"
    assert torch.equal(other.alternative(toy.net, same.state, same.down), kept)
    assert torch.equal(method.alternative(toy.net, done.state, done.down), uploaded)


def test_theta_solves_the_proximal_problem(quadratic):
    """theta* = (b + lam w) / (1 + lam); w_i follows the envelope's gradient, lam (w - theta*)."""
    method = make(lam=3, inner_steps=200, inner_rate=0.2, rate=0.05)
    done = quadratic.run(method, 1)[0]
    w = method.init_hub(quadratic.net, quadratic.clients).w
    solution = (quadratic.targets() + 3 * w) / 4
    torch.testing.assert_close(quadratic.weights(done.state.theta), solution, rtol=1e-11, atol=1e-12)
    envelope = torch.autograd.functional.jacobian(
        lambda w: 3 / (2 * 4) * (w - quadratic.targets()).square().sum(), w
    )
    step = 0.05 * 3 * (w - solution)
    torch.testing.assert_close(done.up.w, w - step, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close((step / 0.05).sum(0), envelope[0], rtol=1e-11, atol=1e-11)


def test_mu_shrinks_theta_and_not_the_anchor(quadratic):
    """theta* = (b + lam w) / (1 + lam + mu)."""
    method = make(lam=3, inner_steps=200, inner_rate=0.2, mu=0.5)
    done = quadratic.run(method, 1)[0]
    w = method.init_hub(quadratic.net, quadratic.clients).w
    solution = (quadratic.targets() + 3 * w) / 4.5
    torch.testing.assert_close(quadratic.weights(done.state.theta), solution, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_one_step_that_is_followed_whole_is_fedavg(dtype, tolerance, make_toy):
    """K = 1, eta = 1 / lam, beta = 1, mu = 0, on uneven batches: theta starts at w_i, no proximal force."""
    toy = make_toy(training=TrainingConfig(epochs=3, batch_size=3, optimizer=SGD(lr=0.3)), dtype=dtype)
    method = make(lam=4, rate=0.25, inner_steps=1, inner_rate=0.3)

    def participants(round):
        return [None, [0, 2, 3], [1]][round - 1]

    found, expected = toy.run(method, 3, participants), toy.run(FedAvg(FedAvgConfig()), 3, participants)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.hub.w, other.hub.w, rtol=tolerance, atol=tolerance)


def test_whole_steps_take_w_to_theta(toy):
    """With eta lam = 1, w_i = theta after every batch."""
    done = toy.run(make(lam=4, rate=0.25, inner_rate=0.2), 1)[0]
    torch.testing.assert_close(done.up.w, toy.weights(done.state.theta), rtol=1e-14, atol=1e-15)


def test_without_lambda_w_stays_and_theta_is_plain_sgd(make_toy):
    toy = make_toy(
        training=TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1)), dtype=torch.float64
    )
    method = make(lam=0, inner_steps=1, inner_rate=0.1)
    start = method.init_hub(toy.net, toy.clients).w
    history = toy.run(method, 2)
    assert all(torch.equal(done.up.w, start.expand(4, -1)) for done in history)
    torch.testing.assert_close(history[-1].hub.w, start, rtol=1e-14, atol=1e-15)
    plain = toy.run(FedAvg(FedAvgConfig()), 1)[0]
    theta = toy.weights(history[0].state.theta)
    torch.testing.assert_close(theta, plain.up.w, rtol=1e-13, atol=1e-14)


def test_without_inner_steps_nothing_moves(toy):
    done = toy.run(make(inner_steps=0), 1)[0]
    start = make().init_state(toy.net, toy.clients).theta
    assert torch.equal(done.state.theta, start) and torch.equal(done.up.w, toy.weights(start))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 2.0])
def test_server_goes_beta_of_the_way_to_the_mean(beta):
    hub, up = torch.tensor([[1.0, 8.0]]), torch.tensor([[2.0, 4.0], [6.0, 0.0]])
    plan = pfedme.Plan(1, torch.arange(2), torch.tensor([3, 1]))
    net = Network(lambda: torch.nn.Linear(1, 1), "")
    found = make(beta=beta).aggregate(net, Hub(hub), Up(up), plan).w
    mean = torch.tensor([[3.0, 3.0]])
    torch.testing.assert_close(found, (1 - beta) * hub + beta * mean)
    if beta in (0.0, 1.0):
        assert torch.equal(found, [hub, mean][int(beta)])


def test_beyond_the_mean_no_variance_becomes_negative():
    net = Network(lambda: torch.nn.Sequential(BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 2)), "2")
    hub, up = torch.ones(1, net.shared.stop), torch.full((2, net.shared.stop), 0.1)
    plan = pfedme.Plan(1, torch.arange(2), torch.tensor([1, 1]))
    found = make(beta=2.0).aggregate(net, Hub(hub), Up(up), plan).w
    torch.testing.assert_close(found[:, net.weights], torch.full((1, net.num_weights), -0.8))
    torch.testing.assert_close(found[:, net.num_weights :], torch.full((1, 2), 0.1))


def test_theta_goes_on_from_batch_to_batch(make_toy):
    """With w_i at rest, R batches of one step are R steps of theta; a restart at w_i would undo them."""
    toy = make_toy((4, 4), training=TrainingConfig(epochs=1, batch_size=4), dtype=torch.float64)
    options = {"lam": 0, "rate": 0, "inner_rate": 0.1}
    batches = toy.run(make(**options, inner_steps=1, local_batches=6), 1)[0].state.theta
    steps = toy.run(make(**options, inner_steps=6, local_batches=1), 1)[0].state.theta
    torch.testing.assert_close(batches, steps, rtol=1e-12, atol=1e-14)


def test_absent_clients_keep_their_theta_and_new_ones_have_the_start(toy):
    history = toy.run(make(), 2, lambda round: [[0, 1], [1, 2]][round - 1])
    first, second = (done.state.theta for done in history)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    assert torch.equal(second[3], make().init_state(toy.net, toy.clients).theta[3])


def test_step_sizes_follow_the_decay(make_toy):
    """A thousandth of the rate in round 2: theta hardly leaves w."""
    training = TrainingConfig(epochs=1, batch_size=100, lr_decay=0.001)
    toy = make_toy(training=training, dtype=torch.float64)
    history = toy.run(make(), 2)
    moved = [(toy.weights(done.state.theta) - done.down.w).norm() for done in history]
    assert 0 < moved[1] < 0.01 * moved[0]


@pytest.mark.parametrize(
    "options, told",
    [
        ({"lam": 15, "inner_rate": 0.2}, "inner_rate .* below 2"),
        ({"lam": 15, "rate": 0.1}, "rate . lam = 1.5"),
        ({"local_batches": 0}, "local_batches"),
        ({"beta": -1}, "beta"),
        ({"pm": "phi"}, "pm"),
    ],
)
def test_settings_that_run_away_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Config(**options)
