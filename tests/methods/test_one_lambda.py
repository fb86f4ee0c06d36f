"""The one-lambda study: Separate with one attraction or repulsion between all clients."""

import pytest
import torch
from pydantic import ValidationError

from raypfl.algebra import pairwise_distances
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.methods.one_lambda import Config, OneLambda
from raypfl.training import SGD, TrainingConfig


def mean_distance(w_SP, at, i, kind):
    """Of `at` to the other clients' models, the models being held still."""
    squared = [(at - w_SP[j]).square().sum() for j in range(len(w_SP)) if j != i]
    return sum(value.sqrt() if kind == "plain" else value for value in squared) / len(squared)


@pytest.mark.parametrize("kind", ["plain", "squared"])
@pytest.mark.parametrize("lam", [0.1, -0.05])
def test_gradient_agrees_with_finite_differences(kind, lam, toy):
    """What a step of size 0.5 does beside that of Separate, along a random direction."""
    w, h = toy.rows(), 1e-5
    alone = toy.step_from(OneLambda(Config(lam=0)), w).state.w
    moved = toy.step_from(OneLambda(Config(lam=lam, distance=kind)), w).state.w
    models, force = toy.weights(w), toy.weights(alone - moved) / 0.5
    direction = torch.randn(15, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for i in range(4):
        ahead, behind = (mean_distance(models, models[i] + side * h * direction, i, kind) for side in (1, -1))
        assert force[i] @ direction == pytest.approx(
            float(lam * (ahead - behind) / (2 * h)), rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize("kind", ["plain", "squared"])
def test_known_force(kind, toy):
    """Clients 1 to 3 in one place, client 0 a distance 2 away in one parameter: gradient 1, or 2 d = 4."""
    w = toy.rows()[:1].repeat(4, 1)
    w[0, 0] += 2.0
    alone = toy.step_from(OneLambda(Config(lam=0)), w).state.w
    moved = toy.step_from(OneLambda(Config(lam=0.1, distance=kind)), w).state.w
    slope = 1.0 if kind == "plain" else 4.0
    expected = torch.zeros(4, toy.net.width, dtype=torch.float64)
    expected[:, 0] = -0.5 * 0.1 * slope * torch.tensor([1, -1 / 3, -1 / 3, -1 / 3])
    torch.testing.assert_close(moved - alone, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["plain", "squared"])
@pytest.mark.parametrize("lam", [0.1, -0.1])
def test_coincident_models_exert_no_force(kind, lam, toy):
    """The common start: the first full step of everybody is Separate's, and nothing is NaN then or later."""
    history = toy.run(OneLambda(Config(lam=lam, distance=kind)), 3)
    alone = toy.run(Local(LocalConfig()), 3)
    assert torch.equal(history[0].state.w, alone[0].state.w)
    assert history[-1].state.w.isfinite().all()
    assert not torch.equal(history[1].state.w, alone[1].state.w)


@pytest.mark.parametrize(
    "kind, lams", [("plain", [-0.1, -0.03, 0, 0.03, 0.1]), ("squared", [-0.02, -0.01, 0, 0.01, 0.02])]
)
def test_distances_fall_with_lambda(kind, lams, make_toy):
    """The study's own check, on mini-batches, with clients of different majority labels."""
    training = TrainingConfig(epochs=3, batch_size=4, optimizer=SGD(lr=0.1))
    toy = make_toy((8, 8, 8, 8, 8), classes=5, features=6, training=training)
    spreads = [
        float(
            pairwise_distances(
                toy.weights(toy.run(OneLambda(Config(lam=lam, distance=kind)), 6)[-1].state.w)
            ).sum()
        )
        for lam in lams
    ]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] > 1.02 * spreads[-1]


def test_the_others_are_held_where_the_round_began(make_toy):
    """Two steps of size 0.5 by hand; also in the second, nobody is drawn to where it was itself."""
    toy = make_toy(
        training=TrainingConfig(epochs=2, batch_size=100, optimizer=SGD(lr=0.5)), dtype=torch.float64
    )
    w, held = toy.rows(), toy.weights(toy.rows())
    found = toy.step_from(OneLambda(Config(lam=0.1, distance="squared")), w).state.w
    for _ in range(2):
        pull = 2 * 0.1 * (toy.weights(w) - (held.sum(0) - held) / 3)
        w = toy.net.assemble(toy.weights(w) - 0.5 * (toy.gradients(w) + pull))
    torch.testing.assert_close(found, w, rtol=1e-11, atol=1e-13)


def test_absent_clients_exert_no_force(toy):
    method, plan, w = OneLambda(Config(lam=0.3)), toy.plan(1, [0, 2]), toy.rows()
    hub, state = toy.step_from(method, w)[:2]
    far = w.clone()
    far[1] += 50.0
    done = [toy.round(method, type(hub)(toy.weights(rows)), type(state)(w), plan) for rows in (w, far)]
    assert torch.equal(done[0].state.w, done[1].state.w)
    assert torch.equal(done[0].state.w[1], w[1])


@pytest.mark.parametrize("participants, models", [([0, 1, 2, 3], 3), ([1, 3], 1), ([2], 0)])
def test_everybody_downloads_all_other_participants(participants, models, toy):
    method, plan = OneLambda(Config(lam=0.1)), toy.plan(1, participants)
    down = method.download(toy.net, method.init_hub(toy.net, toy.clients), plan)
    messages = method.sent_down(toy.net, plan, down)
    assert [message.dst for message in messages] == (participants if models else [])
    assert all((message.values, message.bytes) == (models * 15, models * 15 * 8) for message in messages)


def test_squared_distances_have_a_cap_on_lambda():
    assert Config(distance="squared", lam=-0.1).lam == -0.1
    assert Config(distance="plain", lam=-0.3).lam == -0.3
    for lam in (0.11, -0.11):
        with pytest.raises(ValidationError, match=r"runs away; use \|lam\| <= 0.1"):
            Config(distance="squared", lam=lam)
