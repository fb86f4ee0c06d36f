"""Per-FedAvg: the outer step against its formulas, and evaluation that adapts without leaving a trace."""

import pytest
import torch

from raypfl.methods import per_fedavg
from raypfl.methods.global_model import Hub
from raypfl.methods.per_fedavg import Config, PerFedAvg
from raypfl.training import SGD, TrainingConfig, cross_entropy_per_sample

VARIANTS = ("first_order", "hessian_free", "exact")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(**options):
    return PerFedAvg(Config(**{"alpha": 0.3, "beta": 0.2, **options}))


def loss_of(net, w, batch):
    return cross_entropy_per_sample(net.bind(net.assemble(w[None]))(batch.x), batch.y).mean()


def gradient_of(net, w, batch):
    leaf = w.detach().clone().requires_grad_()
    return torch.autograd.grad(loss_of(net, leaf, batch), leaf)[0]


def reference(toy, method, draw, count):
    """One round in plain loops: w_i of every client, with the Hessian written out."""
    config, net = method.config, toy.net
    start = method.init_hub(net, toy.clients).w[0]
    found = []
    for client in range(len(toy.indices)):
        w = start
        for batch in toy.batches(1, client, **draw):
            d1, d2, *d3 = batch.split(count)
            g2 = gradient_of(net, w - config.alpha * gradient_of(net, w, d1), d2)
            if config.variant == "exact":
                hessian = torch.autograd.functional.hessian(lambda w, b=d3[0]: loss_of(net, w, b), w)
                g2 = g2 - config.alpha * hessian @ g2
            elif config.variant == "hessian_free":
                ahead, behind = (gradient_of(net, w + step * config.delta * g2, d3[0]) for step in (1, -1))
                g2 = g2 - config.alpha * (ahead - behind) / (2 * config.delta)
            w = w - config.beta * g2
        found.append(w)
    return torch.stack(found)


@each_variant
@pytest.mark.parametrize("draw", ["batches", "parts"])
def test_is_the_papers_step(variant, draw, make_toy):
    """On uneven clients, one with a single sample: w is restored before the outer step."""
    training = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=9.0))
    toy = make_toy((7, 4, 13, 1), training=training, dtype=torch.float64)
    count = 2 if variant == "first_order" else 3
    drawn = {"batch_size": 3 * count, "drop_short": True} if draw == "batches" else {}
    method = make(variant=variant, draw=draw)
    found = toy.run(method, 1)[0].up.w
    torch.testing.assert_close(found, reference(toy, method, drawn, count), rtol=1e-9, atol=1e-11)


def test_outer_step_is_the_gradient_of_the_stated_objective(make_toy):
    """D1 = D2 = D3: finite differences of F(w - alpha grad F(w)), which first_order misses."""
    toy = make_toy((1, 1, 1), training=TrainingConfig(epochs=1), dtype=torch.float64)
    net = toy.net
    w = toy.weights(toy.rows())
    for client, (batch,) in enumerate(toy.batches(1, client) for client in range(3)):

        def objective(point, batch=batch):
            return float(loss_of(net, point - 0.3 * gradient_of(net, point, batch), batch))

        here, eps = w[client], 1e-5
        slope = torch.stack(
            [
                torch.tensor(objective(here + eps * unit) - objective(here - eps * unit)).double() / (2 * eps)
                for unit in torch.eye(net.num_weights, dtype=torch.float64)
            ]
        )
        found = {
            variant: make(variant=variant)._outer_gradient(
                net, here[None], here.new_zeros(1, 0), [batch, batch, batch]
            )[1][0]
            for variant in VARIANTS
        }
        torch.testing.assert_close(found["exact"], slope, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found["hessian_free"], slope, rtol=1e-5, atol=1e-6)
        assert (found["first_order"] - slope).norm() > 1e-2 * slope.norm()


@pytest.mark.parametrize("delta", [1e-3, 1.0, 100.0])
def test_hessian_free_is_exact_for_a_quadratic_loss(delta, make_quadratic, monkeypatch):
    """g2 = (1 - alpha) (w - mean of D1) there if D1 = D2 has the same mean, and the Hessian is the unit."""
    toy = make_quadratic(1.0)
    monkeypatch.setattr(
        per_fedavg,
        "cross_entropy",
        lambda m, batch: batch.mean(0.5 * (m.w[:, None] - batch.x).square().sum(2)),
    )
    exact, free = (
        toy.run(make(variant=variant, delta=delta), 1)[0].up.w for variant in ("exact", "hessian_free")
    )
    torch.testing.assert_close(free, exact, rtol=1e-8, atol=1e-9)
    start = make().init_hub(toy.net, toy.clients).w[0]
    for client in range(4):
        (batch,) = toy.batches(1, client, batch_size=3000, drop_short=True)
        d1, d2, _ = (part.x[0].mean(0) for part in batch.split(3))
        theta = start - 0.3 * (start - d1)
        expected = start - 0.2 * (1 - 0.3) * (theta - d2)
        torch.testing.assert_close(exact[client], expected, rtol=1e-12, atol=1e-13)


def test_hessian_free_without_curvature_is_first_order_on_its_batches(make_toy, monkeypatch):
    """A linear loss."""
    toy = make_toy(dtype=torch.float64)
    monkeypatch.setattr(per_fedavg, "cross_entropy", lambda m, batch: m.w.sum(1) * batch.mean(batch.x.sum(2)))
    free, exact = (make(variant=v) for v in ("hessian_free", "first_order"))
    batches = toy.batches(1, 2)[0].split(3)
    w = toy.weights(toy.rows())[2:3]
    one, other = (
        method._outer_gradient(toy.net, w, w.new_zeros(1, 0), list(batches)) for method in (free, exact)
    )
    torch.testing.assert_close(one[1], other[1], rtol=1e-9, atol=1e-10)


@each_variant
def test_without_an_inner_step_is_sgd_on_the_second_batches(variant, make_toy):
    """With alpha = 0, FedAvg with SGD(beta) on D2."""
    toy = make_toy(training=TrainingConfig(epochs=2, batch_size=3), dtype=torch.float64)
    count = 2 if variant == "first_order" else 3
    done = toy.run(make(alpha=0.0, variant=variant), 1)[0]
    start = make().init_hub(toy.net, toy.clients).w[0]
    rows = []
    for client in range(4):
        w = start
        for batch in toy.batches(1, client, batch_size=3 * count, drop_short=True):
            w = w - 0.2 * gradient_of(toy.net, w, batch.split(count)[1])
        rows.append(w)
    torch.testing.assert_close(done.up.w, torch.stack(rows), rtol=1e-12, atol=1e-14)
    share = toy.clients.sizes.double() / toy.clients.sizes.sum()
    torch.testing.assert_close(done.hub.w[0], share @ torch.stack(rows), rtol=1e-12, atol=1e-14)


def test_as_many_outer_steps_as_the_options_say(make_toy, monkeypatch):
    """7, 4, 10 and 5 samples in batches of 2: floor(n / 4) pairs an epoch, or ceil(n / 2) halved batches."""
    toy = make_toy(training=TrainingConfig(epochs=3, batch_size=2), dtype=torch.float64)
    taken = []
    original = PerFedAvg._outer_gradient

    def counting(self, net, w, statistics, parts):
        taken.append(len(w))
        return original(self, net, w, statistics, parts)

    monkeypatch.setattr(PerFedAvg, "_outer_gradient", counting)
    for draw, expected in (("batches", 3 * (1 + 1 + 2 + 1)), ("parts", 3 * (4 + 2 + 5 + 3))):
        taken.clear()
        toy.run(make(draw=draw), 1)
        assert sum(taken) == expected


class TestEvaluation:
    def test_is_one_inner_step_on_one_batch_of_training_data(self, make_toy):
        toy = make_toy(training=TrainingConfig(epochs=1, batch_size=3), dtype=torch.float64)
        w = toy.rows()
        found = make().adapted(toy.cohort(toy.plan(5)), w)
        for client in range(4):
            first = toy.batches(5, client, purpose="adaptation")[0]
            row = toy.weights(w)[client]
            expected = row - 0.3 * gradient_of(toy.net, row, first)
            torch.testing.assert_close(toy.weights(found)[client], expected, rtol=1e-12, atol=1e-14)

    def test_test_data_are_never_looked_at(self, make_toy):
        toy = make_toy(dtype=torch.float64)
        cohort = toy.cohort(toy.plan())
        own = make().adapted(cohort, toy.rows())
        cohort.data = cohort.data._replace(test=[rows[:0] for rows in cohort.data.test])
        assert torch.equal(make().adapted(cohort, toy.rows()), own)

    def test_leaves_everything_as_it_was(self, make_toy):
        toy = make_toy()
        w, x = toy.rows(), toy.x.clone()
        kept = w.clone()
        cohort = toy.cohort(toy.plan())
        found = make().adapted(cohort, w)
        assert torch.equal(w, kept) and torch.equal(toy.x, x) and cohort.losses is None
        assert not torch.equal(found, w)
        assert torch.equal(make().adapted(cohort, w), found)

    def test_without_an_inner_step_it_is_the_global_model(self, make_toy):
        toy = make_toy()
        w = toy.rows()
        assert torch.equal(make(alpha=0.0).adapted(toy.cohort(toy.plan()), w), w)

    def test_reports_the_adapted_global_model(self, toy):
        method = make()
        assert method.reported == ("personalised", "pre")
        done = toy.run(method, 2, lambda round: [1, 3])[-1]
        rows = method.personalised(toy.net, done.state, done.down)
        assert torch.equal(rows, method.global_model(toy.net, done.state, done.down))


def test_only_participants_enter(toy):
    done = toy.run(make(), 1, lambda round: [1, 3])[0]
    torch.testing.assert_close(done.hub.w[0], (4 * done.up.w[0] + 5 * done.up.w[1]) / 9, rtol=1e-13, atol=0)


def test_only_the_outer_step_decays(make_toy, monkeypatch):
    training = TrainingConfig(epochs=1, batch_size=100, lr_decay=0.5)
    toy, steady = (make_toy(training=t, dtype=torch.float64) for t in (training, TrainingConfig(epochs=1)))
    w = toy.weights(toy.rows())[:1]
    moved = []
    for federation in (toy, steady):
        hub = Hub(w, w[:, :0])
        state = make().init_state(federation.net, federation.clients)
        moved.append(federation.round(make(), hub, state, federation.plan(3)).up.w - w)
    torch.testing.assert_close(moved[0], 0.25 * moved[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("option", [{"alpha": -1}, {"beta": 0}, {"variant": "second_order"}, {"delta": 0}])
def test_settings_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Config(**option)
