"""PFML: the algorithm box in plain loops, the limits in which it is another, and which models are whose."""

import pytest
import torch

from raypfl.methods import mutual, pfml
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.methods.pfml import PFML, Config, Hub, Up
from raypfl.training import SGD, Network, TrainingConfig, cross_entropy_per_sample, divergence_per_sample

SOME = [[0, 1], [1, 2], [0, 2]]
"""Participants of three rounds; client 3 never takes part."""


def make(**options):
    return PFML(Config(**{"local_batches": 3, **options}))


@pytest.fixture
def uneven(make_toy):
    """Clients of 7, 4, 10 and 5 samples in batches of 3, float64: positions of all clients differ."""
    return make_toy(
        training=TrainingConfig(epochs=1, batch_size=3, optimizer=SGD(lr=0.1)), dtype=torch.float64
    )


@pytest.fixture
def no_divergence(monkeypatch):
    monkeypatch.setattr(mutual, "divergence_of_logs", lambda peer, own: own.sum(1) * 0.0)


@pytest.fixture
def quadratic(make_quadratic, monkeypatch, no_divergence):
    """`F_i(w) = (w - x_i)' H (w - x_i) / 2` on one full batch, H diagonal: samples are points."""
    toy = make_quadratic(1.0)
    slope = torch.linspace(0.5, 2.0, toy.net.num_weights, dtype=torch.float64)
    monkeypatch.setattr(
        Network,
        "bind",
        lambda net, rows, buffers=None, leaf=None: lambda x: leaf[:, None].expand(-1, x.shape[1], -1) - x,
    )
    monkeypatch.setattr(
        mutual, "cross_entropy_per_sample", lambda logits, y: 0.5 * (slope * logits.square()).sum(2)
    )
    return toy, slope


def reference(toy, method, participants):
    """Section by section in plain loops over clients, batches and steps: m, theta and w after all rounds."""
    config, net = method.config, toy.net
    eta = config.rate
    inner = config.inner_rate or eta
    first_m = method.init_state(net, toy.clients).m
    w = method.init_hub(net, toy.clients).w[0]
    m, theta = {}, {}
    position = dict.fromkeys(range(len(toy.indices)), 0)

    def answer(of, rows, batch):
        return of.bind(of.assemble(rows[None]))(batch.x)

    def slope(own, peer, batch, of=net, peer_of=net):
        leaf = own.clone().requires_grad_()
        logits, other = answer(of, leaf, batch), answer(peer_of, peer, batch)
        target = other.detach().softmax(2)
        kl = (target * (target.log() - logits.softmax(2).log())).sum(2)
        loss = (cross_entropy_per_sample(logits, batch.y) + kl).mean()
        return torch.autograd.grad(loss, leaf)[0]

    for number, ids in enumerate(participants, 1):
        uploads = []
        for client in ids:
            of = net.personal[client % len(net.personal)]
            kept = m.get(client, w if of is net else first_m[client, of.weights])
            mine, a_m = {"persist": (kept, kept), "reset": (w, w), "anchor": (w, kept)}[config.aux]
            ours = w
            first = torch.tensor([position[client]])
            for batch in toy.batches(number, client, steps=config.local_batches, first=first):
                at, hat = mine, ours
                for _ in range(config.inner_steps):
                    step = slope(at, hat, batch, of, net) + config.lam * (at - a_m)
                    if config.inner_order == "jacobi":
                        step_hat = slope(hat, at, batch, net, of) + config.lam * (hat - w)
                        at = at - inner * step
                    else:
                        at = at - inner * step
                        step_hat = slope(hat, at, batch, net, of) + config.lam * (hat - w)
                    hat = hat - inner * step_hat
                g_m, g_w = slope(mine, ours, batch, of, net), slope(ours, mine, batch, net, of)
                mine = mine - eta * g_m - eta * config.lam * (mine - at)
                ours = ours - eta * g_w - eta * config.lam * (ours - hat)
            m[client], theta[client] = mine, at
            position[client] += config.local_batches
            uploads.append(ours)
        share = torch.ones(len(ids), dtype=torch.float64)
        if config.agg_weight == "size":
            share = toy.clients.sizes[ids].double()
        w = (1 - config.beta) * w + config.beta * (share / share.sum()) @ torch.stack(uploads)
    return m, theta, w


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aux": "reset"},
        {"aux": "anchor", "agg_weight": "size"},
        {"inner_order": "gauss_seidel", "inner_steps": 2},
        {"inner_steps": 0},
        {"inner_steps": 1, "aux": "anchor", "inner_order": "gauss_seidel"},
    ],
    ids=repr,
)
def test_is_the_algorithm(options, uneven):
    """Uneven batches, absent clients, all constants different: anchors, starts and peers do not mix up."""
    method = make(**{"lam": 3, "inner_steps": 3, "rate": 0.1, "inner_rate": 0.2, "beta": 1.7, **options})
    m, theta, w = reference(uneven, method, SOME)
    done = uneven.run(method, 3, lambda number: SOME[number - 1])[-1]
    torch.testing.assert_close(done.hub.w[0], w, rtol=1e-11, atol=1e-13)
    for client in (0, 1, 2):
        torch.testing.assert_close(uneven.weights(done.state.m)[client], m[client], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(
            uneven.weights(done.state.theta)[client], theta[client], rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize("order", ["jacobi", "gauss_seidel"])
def test_is_the_algorithm_with_auxiliary_models_of_other_architectures(order, uneven):
    """A linear shared model; perceptrons of 5 units at clients 0 and 2, of 11 units at client 1."""
    uneven.net.personal = tuple(uneven.network(hidden) for hidden in (5, 11))
    method = make(lam=3, rate=0.1, inner_rate=0.2, beta=1.7, inner_order=order)
    m, theta, w = reference(uneven, method, SOME)
    start = method.init_state(uneven.net, uneven.clients)
    done = uneven.run(method, 3, lambda number: SOME[number - 1])[-1]
    torch.testing.assert_close(done.hub.w[0], w, rtol=1e-11, atol=1e-13)
    for client in (0, 1, 2):
        columns = uneven.net.personal[client % 2].weights
        for found, expected in ((done.state.m, m), (done.state.theta, theta)):
            torch.testing.assert_close(found[client, columns], expected[client], rtol=1e-11, atol=1e-13)
            assert not found[client, columns.stop :].any()
    down = method.download(uneven.net, done.hub, uneven.plan(4))
    assert torch.equal(method.absent(uneven.net, done.state, down)[3], start.m[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reset_collapses_bit_for_bit(dtype, make_toy):
    """Algorithm 1 as printed: the auxiliary model is a copy of the uploaded one, in every round."""
    toy = make_toy(training=TrainingConfig(epochs=1, batch_size=3), hidden=5, dtype=dtype)
    for done in toy.run(make(aux="reset"), 4):
        assert torch.equal(toy.weights(done.state.m), done.up.w)
        assert not torch.equal(done.up.w[0], done.up.w[1])
    done = toy.run(make(aux="persist"), 4)[-1]
    assert (toy.weights(done.state.m) - done.up.w).abs().max() > 1e-3


def test_without_lambda_and_divergence_w_is_fedavg_and_m_is_separate(make_toy, no_divergence):
    """Full batches, so that streams and rounds see the same; unweighted: clients of equal size."""
    sizes = (6, 6, 6, 6)
    training = TrainingConfig(steps=3, batch_size=6, optimizer=SGD(lr=0.1))
    toy = make_toy(sizes, training=training, dtype=torch.float64)
    method = make(lam=0, beta=1, rate=0.1)

    def participants(number):
        return SOME[number - 1]

    found, expected = (toy.run(one, 3, participants) for one in (method, FedAvg(FedAvgConfig())))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.hub.w, other.hub.w, rtol=1e-12, atol=1e-14)
    # Client 2 came in round 2, and starts at that round's w; what w becomes later does not reach it.
    separate = toy.round(
        Local(LocalConfig()),
        (),
        Local(LocalConfig())
        .init_state(toy.net, toy.clients)
        ._replace(w=toy.net.assemble(expected[0].hub.w).repeat(4, 1)),
        toy.plan(2, [2]),
    )
    separate = toy.round(Local(LocalConfig()), (), separate.state, toy.plan(3, [2]))
    torch.testing.assert_close(found[-1].state.m[2], separate.state.w[2], rtol=1e-12, atol=1e-14)


def test_weights_of_the_mean(uneven):
    uniform, by_size = (uneven.run(make(beta=1, agg_weight=weight), 1)[0] for weight in ("uniform", "size"))
    torch.testing.assert_close(uniform.hub.w[0], uniform.up.w.mean(0), rtol=1e-13, atol=1e-14)
    share = uneven.clients.sizes / uneven.clients.sizes.sum()
    torch.testing.assert_close(by_size.hub.w[0], share.double() @ by_size.up.w, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(uniform.hub.w, by_size.hub.w)


def test_equal_models_do_not_teach_each_other(uneven):
    logits = torch.randn(2, 5, 4, dtype=torch.float64).requires_grad_()
    (g,) = torch.autograd.grad(divergence_per_sample(logits, logits).sum(), logits)
    assert g.abs().max() < 1e-7
    peer = torch.zeros(2, 5, 4, dtype=torch.float64)
    (g,) = torch.autograd.grad(divergence_per_sample(peer, logits).sum(), logits)
    torch.testing.assert_close(g, logits.softmax(2) - 0.25)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, 2.0])
def test_server_goes_beta_of_the_way_to_the_mean(beta, uneven):
    hub, up = torch.tensor([[1.0, 8.0]]), torch.tensor([[2.0, 4.0], [6.0, 0.0]])
    net = Network(lambda: torch.nn.Linear(1, 1), "")
    plan = pfml.Plan(1, torch.arange(2), torch.tensor([3, 1]))
    found = make(beta=beta).aggregate(net, Hub(hub), Up(up), plan).w
    mean = torch.tensor([[4.0, 2.0]])
    torch.testing.assert_close(found - hub, beta * (mean - hub))
    if beta in (0.0, 1.0):
        assert torch.equal(found, [hub, mean][int(beta)])


def test_proximal_force_points_to_the_anchor(uneven):
    """One inner step from a displaced m: Eq. (8) as printed would push theta away from the anchor."""
    options = {"aux": "anchor", "inner_steps": 1, "local_batches": 1, "rate": 0.0, "beta": 1}
    history = {}
    for lam in (0.0, 2.0):
        method = make(lam=lam, inner_rate=0.1, **options)
        start = method.init_state(uneven.net, uneven.clients)
        kept = start._replace(m=start.m + uneven.rows(seed=4), position=torch.full((4,), 1))
        history[lam] = uneven.round(method, method.init_hub(uneven.net, uneven.clients), kept, uneven.plan(2))
    moved = uneven.weights(history[2.0].state.theta - history[0.0].state.theta)
    at, anchor = history[0.0].down.w, uneven.weights(kept.m)
    leaf = at.expand(4, -1).clone().requires_grad_()
    (g,) = torch.autograd.grad((2.0 / 2 * (leaf - anchor).square().sum()), leaf)
    torch.testing.assert_close(moved, -0.1 * g, rtol=1e-11, atol=1e-13)


def test_theta_solves_the_proximal_problem(quadratic):
    """K -> inf: (H + lam I)^-1 (H b + lam a), b the mean sample and a where m began."""
    toy, slope = quadratic
    method = make(lam=3, inner_steps=300, inner_rate=0.2, rate=0.05, local_batches=1)
    history = toy.run(method, 2)
    for before, done in zip(
        (method.init_state(toy.net, toy.clients), history[0].state), history, strict=True
    ):
        solution = (slope * toy.targets() + 3 * toy.weights(before.m)) / (slope + 3)
        torch.testing.assert_close(toy.weights(done.state.theta), solution, rtol=1e-10, atol=1e-11)


def test_large_lambda_holds_theta_at_the_anchor(uneven):
    """One step of 1 / lam from a displaced m lands on the anchor, up to a gradient over lam."""
    method = make(lam=1e6, aux="anchor", inner_steps=1, inner_rate=1e-6, rate=1e-7, local_batches=1)
    start = method.init_state(uneven.net, uneven.clients)
    kept = start._replace(m=uneven.rows(seed=4), position=torch.ones(4, dtype=torch.int64))
    done = uneven.round(method, method.init_hub(uneven.net, uneven.clients), kept, uneven.plan(2))
    torch.testing.assert_close(done.state.theta, kept.m, rtol=0, atol=1e-4)


def test_the_auxiliary_model_is_never_sent(uneven):
    """Another m_i changes what is uploaded through the divergence, and is in no message itself."""
    method = make()
    assert set(Up._fields) == {"w"} and set(pfml.Down._fields) == {"w"}
    done = uneven.run(method, 2)[-1]
    sent = [*method.sent_down(uneven.net, uneven.plan(2), done.down)]
    sent += method.sent_up(uneven.net, uneven.plan(2).ids, done.up)
    assert {message.values for message in sent} == {uneven.net.num_weights} and len(sent) == 8
    for row in done.up.w:
        assert (uneven.weights(done.state.m) - row).abs().max(1).values.min() > 1e-4


def test_batches_go_on_where_the_last_round_ended(uneven):
    """Two rounds of two batches are the steps of one round of four, for a server that stays put."""
    options = {"beta": 0, "lam": 0, "aux": "persist", "inner_steps": 1}
    two = uneven.run(make(local_batches=2, **options), 2)
    four = uneven.run(make(local_batches=4, **options), 1)
    assert two[-1].state.position.tolist() == four[-1].state.position.tolist() == [4] * 4
    # m alone is carried over; without a divergence it would not know that w began anew.
    met = [
        [batch.y.tolist() for batch in uneven.batches(number, 0, steps=2, first=torch.tensor([first]))]
        for number, first in ((1, 0), (2, 2))
    ]
    stream = [batch.y.tolist() for batch in uneven.batches(1, 0, steps=4, first=torch.tensor([0]))]
    assert met[0] + met[1] == stream


def test_what_absent_and_new_clients_use(uneven):
    method = make()
    history = uneven.run(method, 2, lambda number: SOME[number - 1])
    last = history[-1]
    down = method.download(uneven.net, last.hub, uneven.plan(3))
    theta = method.absent(uneven.net, last.state, down)
    assert torch.equal(theta[0], history[0].state.theta[0])
    assert torch.equal(uneven.weights(theta)[3], last.hub.w[0])
    other = method.alternative(uneven.net, last.state, down)
    assert torch.equal(other[:3], last.state.m[:3])
    assert torch.equal(uneven.weights(other)[3], last.hub.w[0])
    swapped = make(pm="m")
    assert torch.equal(swapped.absent(uneven.net, last.state, down), other)
    assert torch.equal(swapped.alternative(uneven.net, last.state, down), theta)


def test_step_sizes_follow_the_decay(make_toy):
    training = TrainingConfig(epochs=1, batch_size=100, lr_decay=0.001)
    toy = make_toy(training=training, dtype=torch.float64)
    history = toy.run(make(lam=0), 2)
    moved = [(done.up.w - done.down.w).norm() for done in history]
    assert 0 < moved[1] < 0.01 * moved[0]
    held = (history[1].state.theta - history[0].state.m).norm()
    assert 0 < held < 0.01 * (history[0].state.theta - toy.net.assemble(history[0].down.w)).norm()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"lam": 15, "inner_rate": 0.2}, "inner_rate . lam = 3 must be below 2"),
        ({"lam": 150, "rate": 0.01}, "rate . lam = 1.5"),
        ({"local_batches": 0}, "local_batches"),
        ({"aux": "fresh"}, "aux"),
        ({"pm": "w"}, "pm"),
    ],
)
def test_settings_that_run_away_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Config(**options)
