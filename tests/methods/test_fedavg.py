"""FedAvg: the weighted mean, and what it means for training."""

import pytest
import torch
from torch.nn import functional

from raypfl.engine.messages import take
from raypfl.methods import Plan
from raypfl.methods.fedavg import Config, FedAvg
from raypfl.methods.global_model import Down, Hub, Up

METHOD = FedAvg(Config())


def aggregate(sizes, rows):
    plan = Plan(1, torch.arange(len(sizes)), torch.tensor(sizes))
    return METHOD.aggregate(None, Hub(rows[:1], rows[:1, :0]), Up(rows, rows[:, :0]), plan).w


def test_weights_are_shares_of_samples():
    """1, 1 and 2 of 4 samples."""
    rows = torch.tensor([[4.0, 0.0], [8.0, 0.0], [2.0, 1.0]])
    assert aggregate([1, 1, 2], rows).tolist() == [[4.0, 0.5]]


def test_equal_uploads_are_the_global_model_bit_for_bit():
    row = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(aggregate([7, 4, 10, 5], row.expand(4, -1)), row)


def test_order_of_clients_does_not_matter():
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = [2, 0, 3, 1]
    permuted = aggregate([[7, 4, 10, 5][at] for at in order], rows[order])
    torch.testing.assert_close(aggregate([7, 4, 10, 5], rows), permuted, rtol=1e-13, atol=1e-15)


def test_one_full_batch_step_a_round_is_gradient_descent_on_the_pooled_loss(toy):
    """Unequal clients, five rounds: the weights of the mean are those of the pooled loss."""
    w = METHOD.init_hub(toy.net, toy.clients).w[0]
    for done in toy.run(METHOD, 5):
        leaf = w.clone().requires_grad_()
        logits = functional.linear(toy.x, leaf[:12].view(3, 4), leaf[12:])
        (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, toy.y), leaf)
        w = w - 0.5 * gradient
        torch.testing.assert_close(done.hub.w[0], w, rtol=1e-12, atol=1e-14)


def test_only_participants_enter(toy):
    done = toy.run(METHOD, 1, lambda round: [1, 3])[0]
    torch.testing.assert_close(done.hub.w[0], (4 * done.up.w[0] + 5 * done.up.w[1]) / 9, rtol=1e-13, atol=0)


def test_everybody_is_evaluated_on_the_one_global_model(toy):
    """Also who was away: PRE is what was received, POST what a participant trained from it."""
    history = toy.run(METHOD, 2, lambda round: [1, 3])
    down, state = Down(*history[0].hub), history[1].state
    for rows in (METHOD.global_model(toy.net, state, down), METHOD.personalised(toy.net, state, down)):
        assert torch.equal(toy.weights(rows.expand(4, -1)), history[0].hub.w.expand(4, -1))
    trained = METHOD.personalised(toy.net, take(state, torch.tensor([1, 3])), down, history[1].up)
    assert torch.equal(toy.weights(trained), history[1].up.w)
    assert METHOD.reported == ("global", "pre")


@pytest.mark.parametrize("option", ["lam", "weights"])
def test_has_no_options(option):
    with pytest.raises(ValueError, match=option):
        Config(**{option: 1})
