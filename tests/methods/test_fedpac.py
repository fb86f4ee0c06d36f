"""FedPAC: rounds with `torch.optim` and an independent solver, what it is the same as, and refusals.

The statistics have their own tests in `test_feature_statistics.py`.
"""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import nn
from torch.nn import functional

from raypfl.algebra import combination_weights
from raypfl.errors import ConfigError, RaypflError
from raypfl.methods import fedpac
from raypfl.methods.contract import SERVER, Plan
from raypfl.methods.fedpac import Config, FedPAC, without_small
from raypfl.methods.fedrep import Config as FedRepConfig
from raypfl.methods.fedrep import FedRep
from raypfl.methods.start import common_start
from raypfl.models import MLP, build
from raypfl.models.cnn import CNNP
from raypfl.training import SGD, Adam, Cohort, Network, TrainingConfig

HEAVY = TrainingConfig(
    epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.5, weight_decay=0.01), lr_decay=0.9
)
"""Momentum and decay that would show in whatever is frozen, and rates that show in a few rounds."""


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, training=HEAVY, dtype=torch.float64)


class Alone(FedPAC):
    """A = I: nobody combines."""

    def collaboration(self, up, plan):
        found = super().collaboration(up, plan)
        return found._replace(weights=torch.eye(len(plan.ids), dtype=torch.float64)[None])


class Averaging(FedPAC):
    """Every row of A is the participants' share of the samples."""

    def collaboration(self, up, plan):
        share = (plan.sizes.double() / plan.sizes.sum()).expand(len(plan.ids), -1)
        return super().collaboration(up, plan)._replace(weights=share[None])


def optimal_weights(h, v):
    """Row by row by non-negative least squares on the cost matrix of that client, from its definition."""
    rows = []
    for own in h:
        gap = (h - own).flatten(1)
        root = np.linalg.cholesky((torch.diag(v) + gap @ gap.T).numpy()).T
        x, _ = nnls(np.vstack([root, np.ones(len(h))]), np.append(np.zeros(len(h)), 1.0))
        rows.append(torch.from_numpy(x / x.sum()))
    return torch.stack(rows)


def written_out(toy, participants, config):
    """Rounds of the algorithm box, one client after the other: extractor, centroids, heads next received."""
    net, options, classes = toy.net, toy.training.optimizer, toy.classes
    start = common_start(net, 0)[0]
    theta = start[net.extractor].clone()
    head = {client: start[net.head].clone() for client in range(len(toy.indices))}
    centroid, known = None, torch.zeros(classes, dtype=torch.bool)

    def features(theta, x):
        return functional.linear(x, theta[:16].view(4, 4), theta[16:]).relu()

    def loss(z, phi, y):
        return functional.cross_entropy(functional.linear(z, phi[:12].view(3, 4), phi[12:]), y)

    def class_means(z, y):
        return torch.stack([z[y == k].mean(0) if (y == k).any() else z[0] * 0 for k in range(classes)])

    for number, ids in enumerate(participants, 1):
        decay = 0.9 ** (number - 1)
        thetas, phis, hs, vs, cs, counts = [], [], [], [], [], []
        for client in ids:
            x, y = toy.x[toy.indices[client]], toy.y[toy.indices[client]]
            z, count = features(theta, x), y.bincount(minlength=classes)
            outer = functional.one_hot(y, classes).double()[:, :, None] * z[:, None]
            hs.append(outer.mean(0))
            vs.append((outer - outer.mean(0)).square().sum() / len(y) ** 2)
            own = class_means(z, y)
            target = own if centroid is None else torch.where(known[:, None], centroid, own)

            phi = head[client].clone().requires_grad_()
            sgd = {"momentum": options.momentum, "weight_decay": options.weight_decay}
            step = torch.optim.SGD([phi], config.head_lr * decay, **sgd)
            for batch in toy.batches(number, client, epochs=config.head_epochs, purpose="head batches"):
                step.zero_grad()
                loss(features(theta, batch.x[0]), phi, batch.y[0]).backward()
                step.step()
            phi, mine = phi.detach(), theta.clone().requires_grad_()
            step = torch.optim.SGD([mine], options.lr * decay, **sgd)
            for batch in toy.batches(number, client):
                step.zero_grad()
                z = features(mine, batch.x[0])
                aligned = functional.mse_loss(z, target[batch.y[0]])
                (loss(z, phi, batch.y[0]) + (config.lam * aligned if number > 1 else 0)).backward()
                step.step()
            thetas.append(mine.detach())
            phis.append(phi)
            cs.append(class_means(features(mine.detach(), x), y))
            counts.append(count.double())
        sizes = toy.clients.sizes[list(ids)].double()
        theta = torch.einsum("s,sp->p", sizes / sizes.sum(), torch.stack(thetas))
        counts = torch.stack(counts)
        known = counts.sum(0) > 0
        centroid = torch.einsum("sk,skd->kd", counts, torch.stack(cs)) / counts.sum(0).clamp_min(1)[:, None]
        weights = optimal_weights(torch.stack(hs), torch.stack(vs))
        weights = torch.where(weights < config.weight_eps, 0.0, weights)
        combined = (weights / weights.sum(1, keepdim=True)) @ torch.stack(phis)
        head |= dict(zip(ids, combined, strict=True))
    return theta, centroid, torch.stack([head[client] for client in sorted(head)])


EVERYBODY = [(0, 1, 2, 3)] * 4
SOME = [(1, 3), (0, 2, 3), (1, 2), (0, 1, 2, 3)]
"""Lists in which a client's place is not its id, and clients that first take part after the first round."""


@pytest.mark.parametrize("participants", [EVERYBODY, SOME], ids=["everybody", "some"])
@pytest.mark.parametrize(
    "options", [{}, {"lam": 5.0, "head_epochs": 2, "head_lr": 0.3}, {"weight_eps": 0.2}], ids=str
)
def test_four_rounds_step_by_step(deep, participants, options):
    config = Config(**options)
    done = deep.run(FedPAC(config), 4, lambda number: participants[number - 1])[-1]
    theta, centroid, heads = written_out(deep, participants, config)
    for found, expected in zip(
        (done.hub.body[0], done.hub.centroid[0], done.hub.head), (theta, centroid, heads), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_options_make_a_difference(deep):
    """The step-by-step test above would not see an option that both sides ignore."""
    found = [
        deep.run(FedPAC(Config(**options)), 3)[-1].hub
        for options in ({}, {"lam": 5.0}, {"head_epochs": 2}, {"head_lr": 0.3}, {"weight_eps": 0.2})
    ]
    assert all((other.head - found[0].head).abs().max() > 1e-4 for other in found[1:])


# What it is the same as


def test_without_alignment_and_collaboration_it_is_fedrep(deep):
    """tau_h = 1 and tau_r = E, bit for bit."""
    mine = deep.run(Alone(Config(lam=0.0, head_lr=HEAVY.optimizer.lr)), 3)
    theirs = deep.run(FedRep(FedRepConfig(head_epochs=1, body_epochs=HEAVY.epochs)), 3)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.hub.body, other.hub.body)
        assert torch.equal(one.state.head, other.state.head) and torch.equal(one.hub.head, other.state.head)
    # Collaboration and alignment each make a difference.
    for method in (FedPAC(Config(lam=0.0, head_lr=0.1)), Alone(Config(head_lr=0.1))):
        assert (deep.run(method, 3)[-1].hub.body - theirs[-1].hub.body).abs().max() > 1e-5


def test_first_round_has_no_alignment(deep):
    one, other = (deep.run(FedPAC(Config(lam=lam)), 2) for lam in (0.0, 5.0))
    assert torch.equal(one[0].hub.body, other[0].hub.body)
    assert not torch.equal(one[1].hub.body, other[1].hub.body)


def test_client_that_comes_in_the_second_round_aligns(deep):
    one, other = (
        deep.run(FedPAC(Config(lam=lam)), 2, lambda number: [0, 1] if number == 1 else [2, 3])[-1].up.body
        for lam in (0.0, 5.0)
    )
    assert (one != other).any(1).all()


def test_rows_of_sample_shares_give_everybody_one_head(deep):
    """Alternating FedAvg: the head is averaged as the extractor is."""
    for done in deep.run(Averaging(Config(lam=0.0)), 3):
        mean = (deep.clients.sizes.double() @ done.up.head) / deep.clients.sizes.sum()
        assert (done.hub.head == done.hub.head[0]).all()
        torch.testing.assert_close(done.hub.head[0], mean, rtol=1e-12, atol=1e-14)


def test_identical_clients_combine_uniformly_and_stay_equal(make_toy):
    one_step = TrainingConfig(epochs=2, batch_size=1000, optimizer=SGD(lr=0.5))
    toy = make_toy(sizes=(6, 6, 6), hidden=4, training=one_step, dtype=torch.float64)
    for own in toy.indices[1:]:
        toy.x[own], toy.y[own] = toy.x[toy.indices[0]], toy.y[toy.indices[0]]
    method = FedPAC(Config())
    for done in toy.run(method, 4):
        third = torch.full((3, 3), 1 / 3, dtype=torch.float64)
        torch.testing.assert_close(done.hub.weights[0], third, rtol=0, atol=1e-9)
        # Each client sums its samples in its own order.
        models = method.personalised(toy.net, done.state, done.down, done.up)
        torch.testing.assert_close(models, models[:1].expand(3, -1), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(done.hub.head, done.state.head, rtol=1e-9, atol=1e-11)


def test_kept_features_give_the_numbers_of_fresh_ones(make_toy):
    kept, fresh = (make_toy(hidden=4, training=HEAVY, dtype=torch.float64) for _ in range(2))
    fresh.net.random = True
    one, other = (toy.run(FedPAC(Config(head_epochs=3)), 3)[-1] for toy in (kept, fresh))
    for left, right in zip((*one.hub, *one.state), (*other.hub, *other.state), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


# What is measured when, and whose it is


def by_hand(toy, body, client):
    """Class means of one client's features under one extractor, and its class counts."""
    net, own = toy.net, toy.indices[client]
    row = net.assemble(common_start(net, 0)[:, net.head], body[None])
    z, y = net.bind(row).features(toy.x[own][None])[0], toy.y[own]
    sums = torch.zeros(toy.classes, z.shape[1], dtype=z.dtype).index_add(0, y, z)
    counts = y.bincount(minlength=toy.classes)
    return sums / counts.clamp_min(1)[:, None], counts


def test_statistics_are_of_the_received_extractor_and_centroids_of_the_trained_one(deep):
    before, after = deep.run(FedPAC(Config()), 2)
    for client in range(4):
        received, counts = by_hand(deep, before.hub.body[0], client)
        trained, _ = by_hand(deep, after.up.body[client], client)
        share = (counts.double() / counts.sum())[:, None]
        torch.testing.assert_close(after.up.mean[client], share * received, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(after.up.centroid[client], trained, rtol=1e-12, atol=1e-14)
        assert (received - trained).abs().max() > 1e-3


def test_heads_that_are_combined_are_those_trained_in_this_round(deep):
    method = FedPAC(Config())
    first, second = deep.run(method, 2)
    torch.testing.assert_close(
        second.hub.head, second.hub.weights[0] @ second.up.head, rtol=1e-12, atol=1e-14
    )
    assert torch.equal(second.down.head, first.hub.head) and torch.equal(second.up.head, second.state.head)
    assert (second.hub.head - second.hub.weights[0] @ first.up.head).abs().max() > 1e-3


def test_combined_heads_go_to_the_clients_they_are_for(deep):
    """Under partial participation a client's place in the round is not its id."""
    method = FedPAC(Config(weight_eps=0.0))
    first, second = deep.run(method, 2, lambda number: None if number == 1 else [1, 3])
    found = combination_weights(second.up.mean, second.up.variance).weights_RK
    for place, client in enumerate((1, 3)):
        own, other = found[place, place], found[place, 1 - place]
        expected = own * second.up.head[place] + other * second.up.head[1 - place]
        torch.testing.assert_close(second.hub.head[client], expected, rtol=1e-12, atol=1e-14)
        # T1: nobody is alone, nobody drops itself.
        assert 0.0 < own < 1.0
    assert torch.equal(second.hub.head[[0, 2]], first.hub.head[[0, 2]])
    assert torch.equal(second.state.head[[0, 2]], first.state.head[[0, 2]])
    assert second.hub.ids.tolist() == [[1, 3]] and second.hub.weights.shape == (1, 2, 2)


def test_order_of_uploads_does_not_change_whose_head_is_whose(deep):
    """The weights are kept in the order of ids."""
    method = FedPAC(Config())
    done = deep.run(method, 1)[0]
    hub = method.init_hub(deep.net, deep.clients)
    backwards = torch.tensor([3, 2, 1, 0])
    plan = Plan(1, backwards, deep.clients.sizes[backwards])
    again = method.aggregate(deep.net, hub, type(done.up)(*(field[backwards] for field in done.up)), plan)
    for one, other in zip(done.hub, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_absent_client_uses_its_head_on_the_newest_extractor(deep):
    method, net = FedPAC(Config()), deep.net
    first, second = deep.run(method, 2, lambda number: None if number == 1 else [0, 1])
    shared = method.download(net, second.hub, deep.plan(3))
    away = method.absent(net, second.state, shared)
    assert torch.equal(away[2:, net.head], first.up.head[2:])
    assert torch.equal(away[:, net.body], second.hub.body.expand(4, -1))
    back = method.personalised(net, second.state, shared)
    assert torch.equal(back[:, net.head], second.hub.head)
    post = method.personalised(net, second.state, shared._replace(body=first.hub.body), first.up)
    assert torch.equal(post[:, net.weights], torch.cat([first.up.head, first.up.body], 1))
    assert method.reported == ("personalised", "pre")


def test_programmes_run_in_the_first_round(deep):
    hub = deep.run(FedPAC(Config()), 1)[0].hub
    assert (hub.head != common_start(deep.net, 0)[:, deep.net.head]).any(1).all()
    weights = hub.weights[0]
    assert (weights.diagonal() > 0).all() and (weights.diagonal() < 1).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(4, dtype=torch.float64), rtol=1e-14, atol=0)


# Alignment


def test_class_that_nobody_had_is_aligned_to_the_own_centroid(make_toy):
    """Class 2 is client 3's alone, who comes in the second round; in the third its centroid is known."""
    toy = make_toy(hidden=4, training=HEAVY, dtype=torch.float64)
    toy.y[:] = torch.cat([torch.arange(len(own)) % 2 for own in toy.indices])
    toy.y[toy.indices[3]] = torch.tensor([2, 2, 2, 0, 1])
    seen = []

    class Watched(FedPAC):
        def aligned(self, m, batch, target):
            if not seen or seen[-1][0] is not target:
                seen.append((target, batch))
            return super().aligned(m, batch, target)

    method = Watched(Config())
    first, second, third = toy.run(method, 3, lambda number: [0, 1, 2] if number == 1 else [0, 3])
    assert first.hub.known.tolist() == [[True, True, False]]
    assert second.hub.known.all() and first.hub.centroid[0, 2].abs().max() == 0
    own, _ = by_hand(toy, first.hub.body[0], 3)
    expected = torch.cat([first.hub.centroid[0, :2], own[2:]])
    targets = [target[batch.rows] for target, batch in seen]
    assert any(torch.allclose(row, expected, rtol=1e-12, atol=1e-14) for rows in targets for row in rows)
    assert own[2].abs().max() > 1e-3
    # Known again only as long as somebody has it: centroids are those of the last round alone.
    last = toy.run(method, 3, lambda number: [0, 3] if number < 3 else [0, 1])[-1]
    assert last.down.known.all() and last.hub.known.tolist() == [[True, True, False]]
    assert third.down.known.all()


@pytest.mark.parametrize("batch_size", [3, 1000])
def test_gradient_of_the_alignment(deep, batch_size):
    """`dR/dz = 2 lam / (|b| d) (z - t)`, and central differences of the parameters."""
    lam = 0.7
    method, plain = FedPAC(Config(lam=lam)), FedPAC(Config(lam=0.0))
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(1, 3, 4, generator=draw, dtype=torch.float64)
    rows, net = deep.rows()[:1], deep.net
    for batch in deep.batches(1, 0, batch_size=batch_size):

        def regulariser(body, batch=batch):
            m = net.bind(rows, leaf=body, columns=net.extractor)
            return (method.aligned(m, batch, target) - plain.aligned(m, batch, target))[0]

        body = rows[:, net.extractor].clone().requires_grad_()
        (found,) = torch.autograd.grad(regulariser(body), body)
        z = net.bind(rows, leaf=body, columns=net.extractor).features(batch.x)
        slope = 2 * lam / (batch.y.shape[1] * 4) * (z - target[0][batch.y]).detach()
        (expected,) = torch.autograd.grad((z * slope).sum(), body)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        step = 1e-6
        for column in range(body.shape[1]):
            ahead, behind = body.detach().clone(), body.detach().clone()
            ahead[0, column] += step
            behind[0, column] -= step
            difference = (regulariser(ahead) - regulariser(behind)) / (2 * step)
            assert abs(difference - found[0, column]) < 1e-7


def test_padding_is_not_aligned(deep):
    """Clients of 7 and 4 samples side by side in batches of 5: each has one that is short."""
    target = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method, found = FedPAC(Config()), {0: [], 1: []}

    def together(chunk, rows):
        for batch in chunk.batches():
            loss = method.aligned(deep.net.bind(rows[batch.rows]), batch, target[batch.rows])
            for place in range(len(loss)):
                found[int(chunk.ids[place])].append(float(loss[place]))
        return (rows,)

    deep.training = HEAVY.model_copy(update={"batch_size": 5})
    rows = deep.rows()[:2]
    deep.cohort(deep.plan(1, [0, 1])).run(together, rows)
    for client in (0, 1):
        alone = [
            float(method.aligned(deep.net.bind(rows[here]), batch, target[here]))
            for here in (slice(client, client + 1),)
            for batch in deep.batches(1, client)
        ]
        assert found[client] == pytest.approx(alone, rel=1e-12)


# Weights


def test_small_weights_are_left_out_and_the_rest_scaled():
    weights = torch.tensor([[0.5, 0.4995, 0.0005], [0.0, 0.001, 0.999], [0.2, 0.3, 0.5]], dtype=torch.float64)
    found = without_small(weights, 1e-3)
    expected = torch.tensor([[0.5 / 0.9995, 0.4995 / 0.9995, 0], [0, 0.001, 0.999], [0.2, 0.3, 0.5]])
    torch.testing.assert_close(found, expected.double(), rtol=1e-7, atol=0)
    assert torch.equal(without_small(weights, 0.0), weights / weights.sum(1, keepdim=True))


def test_largest_weights_of_a_row_stay_however_small():
    """2,000 clients that share alike are all below 1e-3; rounding must not choose one of them."""
    uniform = torch.full((1, 2000), 1 / 2000, dtype=torch.float64)
    uniform[0, 7] += 1e-17
    torch.testing.assert_close(without_small(uniform, 1e-3), uniform, rtol=1e-12, atol=0)
    one = torch.full((1, 2000), 0.9994 / 1999, dtype=torch.float64)
    one[0, 5] = 6e-4
    assert without_small(one, 1e-3)[0].nonzero().tolist() == [[5]]


def test_uncertified_weights_name_the_client(deep, monkeypatch):
    original = fedpac.combination_weights

    def uncertified(*arguments):
        found = original(*arguments)
        found.residual_R[1] = 0.25
        return found

    monkeypatch.setattr(fedpac, "combination_weights", uncertified)
    with pytest.raises(RaypflError, match="weights of client 3 are not certified: scaled residual 0.25"):
        deep.run(FedPAC(Config()), 1, lambda number: [1, 3])


def test_groups_combine_among_themselves(make_toy):
    """Clients 0 and 3 have one task, 1 and 2 another with labels swapped: weights stay in the group."""
    training = TrainingConfig(epochs=1, batch_size=20, optimizer=SGD(lr=0.1))
    toy = make_toy(sizes=(80, 80, 80, 80), classes=2, hidden=8, training=training, dtype=torch.float64)
    toy.x = torch.randn(toy.x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for client, own in enumerate(toy.indices):
        toy.y[own] = ((toy.x[own][:, 0] > 0) ^ (client in (1, 2))).long()
    weights = toy.run(FedPAC(Config()), 5)[-1].hub.weights[0]
    group = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    assert (weights * group).sum(1).min() > 0.9
    assert weights[0, 3] > 0.1 and weights[1, 2] > 0.1


def test_diagnostics_are_of_the_round_before(deep):
    method = FedPAC(Config(weight_eps=0.2))
    hub, plan = method.init_hub(deep.net, deep.clients), deep.plan()
    assert method.diagnose(deep.net, hub, plan, method.download(deep.net, hub, plan)) == {}
    done = deep.run(method, 2, lambda number: None if number == 1 else [0, 2, 3])[-1]
    found = method.diagnose(deep.net, done.hub, deep.plan(3), done.down)
    weights = done.hub.weights[0]
    assert found["own_weight"] == pytest.approx(float(weights.trace() / 3))
    assert found["heads_combined"] == pytest.approx(float((weights > 0).sum() / 3))
    assert 1 <= found["heads_combined"] < 3
    expected = combination_weights(done.up.mean, done.up.variance)
    assert found["qp_objective"] == pytest.approx(float(expected.objective_R.mean()))
    assert 0 <= found["qp_residual"] <= 1e-8
    pairs = method.relations(deep.net, done.hub, deep.plan(3), done.down)["head weight"]
    assert pairs.receivers.tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3]
    assert pairs.sources.tolist() == [0, 2, 3] * 3
    assert torch.equal(pairs.values, weights.flatten())
    assert method.relations(deep.net, hub, plan, method.download(deep.net, hub, plan)) == {}


# Cost, traffic and refusals


def test_a_round_passes_the_extractor_as_often_as_it_must(make_toy, monkeypatch):
    """E epochs, one pass before and one after; the head trains on what the first one left."""
    toy = make_toy(sizes=(7,), hidden=4, training=HEAVY, dtype=torch.float64)
    forwards, passes = [], []
    toy.net._extractor.register_forward_hook(lambda module, inputs, out: forwards.append(len(out)))
    original = Cohort.batches

    def batches(self, epochs=None, purpose="batches"):
        passes.append((self.training.epochs if epochs is None else epochs, purpose))
        return original(self, epochs, purpose)

    monkeypatch.setattr(Cohort, "batches", batches)
    toy.run(FedPAC(Config(head_epochs=3)), 2)
    assert sum(forwards) == 2 * (HEAVY.epochs + 2) * 7
    assert passes == 2 * [(3, "head batches"), (HEAVY.epochs, "batches")]


def test_bytes_of_the_cifar_network():
    """110,251 scalars up and 108,970 down where all ten classes are known and present."""
    model = build(CNNP(), (3, 32, 32), 10)
    net = Network(lambda: model.module, model.head)
    method = FedPAC(Config())
    plan = Plan(2, torch.tensor([4]), torch.tensor([600]))
    known = torch.ones(1, 10, dtype=torch.bool)
    body, head = (torch.zeros(1, piece.stop - piece.start) for piece in (net.body, net.head))
    feature = torch.zeros(1, 10, 128)
    down = fedpac.Down(body, head, feature, known)
    assert total(method.sent_down(net, plan, down)) == (108_970, 435_880)
    up = fedpac.Up(body, head, feature, torch.zeros(1), feature, torch.full((1, 10), 60))
    assert total(method.sent_up(net, plan.ids, up)) == (110_251, 441_004)
    some = torch.tensor([[5, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
    assert total(method.sent_up(net, plan.ids, up._replace(counts=some)))[0] == 110_251 - 8 * 128
    nothing_known = down._replace(known=torch.zeros_like(known))
    assert total(method.sent_down(net, plan, nothing_known))[0] == 108_970 - 10 * 128
    assert {(m.src, m.dst) for m in method.sent_up(net, plan.ids, up)} == {(4, SERVER)}


def total(messages):
    return sum(message.values for message in messages), sum(message.bytes for message in messages)


def test_head_of_two_layers_is_refused(make_toy):
    toy = make_toy()
    deep_head = Network(lambda: build(MLP(hidden=(4, 3)), (4,), 3).module, "fc2")
    with pytest.raises(ConfigError, match="fedpac needs a head .* model.head = 'fc2' is more than that"):
        FedPAC(Config()).check(deep_head, toy.clients, HEAVY)
    with pytest.raises(ConfigError, match="covers every layer"):
        FedPAC(Config()).check(toy.net, toy.clients, HEAVY)


def test_head_rate_is_of_any_optimizer(make_toy):
    adam = TrainingConfig(epochs=1, batch_size=1000, optimizer=Adam(lr=0.01))
    toy = make_toy(hidden=4, training=adam, dtype=torch.float64)
    done = toy.run(FedPAC(Config(head_lr=0.05)), 1)[0]
    start = common_start(toy.net, 0)
    # Adam's first step is the rate long, whatever the gradient.
    for sent, columns, rate in ((done.up.head, toy.net.head, 0.05), (done.up.body, toy.net.body, 0.01)):
        moved = (sent - start[:, columns]).abs().amax(1)
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-4, atol=0)


def test_defaults_are_those_of_the_code():
    config = Config()
    assert (config.lam, config.head_epochs, config.head_lr, config.weight_eps) == (1.0, 1, 0.1, 1e-3)


def test_convolutions_and_short_messages(make_toy):
    """Nothing that is sent is a view of a larger tensor."""
    layers = [("conv", nn.Conv2d(1, 2, 3)), ("act", nn.ReLU()), ("flatten", nn.Flatten())]
    net = Network(lambda: nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(8, 3))])), "head")
    toy = make_toy(features=16, training=HEAVY)
    toy.net, toy.x = net, toy.x.view(-1, 1, 4, 4)
    done = toy.run(FedPAC(Config()), 2)[-1]
    assert done.up.mean.shape == (4, 3, 8) and done.hub.centroid.shape == (1, 3, 8)
    for field in done.up:
        assert field.untyped_storage().nbytes() == field.numel() * field.element_size()
        assert field.isfinite().all()
