"""Answers to the unit input, and the proximal terms of UA-PDFL: closed forms and finite differences."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from raypfl.methods.ua_pdfl_answers import (
    answers,
    answers_one_by_one,
    batch_term,
    unit_input,
    unit_term,
)
from raypfl.models import BatchNorm2d
from raypfl.training import Batch, Network, cross_entropy

SHAPE = (1, 4, 4)


def layers(dropout=0.5):
    return [
        ("conv", nn.Conv2d(1, 2, 3, padding=1)),
        ("norm", BatchNorm2d(2)),
        ("act", nn.Tanh()),
        ("drop", nn.Dropout(dropout)),
        ("head", nn.Sequential(nn.Flatten(), nn.Linear(32, 3))),
    ]


def network(dropout=0.5):
    build = lambda: nn.Sequential(OrderedDict(layers(dropout)))  # noqa: E731
    return Network(build, "head", input_shape=SHAPE, dtype=torch.float64)


def models(net, num_models=3):
    w = torch.cat([net.draw(number) for number in range(num_models)])
    draw = torch.Generator().manual_seed(1)
    w[:, net.statistics] += torch.rand(num_models, 4, generator=draw, dtype=torch.float64)
    return w


def batch_of(net, num_models=3, samples=5):
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(num_models, samples, *SHAPE, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (num_models, samples), generator=draw)
    return Batch(slice(0, num_models), x, y, None, torch.full((num_models,), float(samples), dtype=x.dtype))


def plain(net, row):
    """The same model as a plain module."""
    module = nn.Sequential(OrderedDict(layers())).double()
    tensors = [
        *module.head.parameters(),
        *(p for n, p in module.named_parameters() if not n.startswith("head")),
    ]
    start = 0
    with torch.no_grad():
        for tensor in (*tensors, module.norm.running_mean, module.norm.running_var):
            tensor.copy_(row[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
    return module


ROW = [[0.3, -1.0, 2.0, 0.0]]


@pytest.mark.parametrize("value", [1.0, 0.0, -0.5, [[[0.3]]], ROW])
def test_answers_are_those_of_a_plain_model_in_evaluation_mode(value):
    net = network()
    w = models(net)
    found = answers(net, w, value)
    for row in range(3):
        module = plain(net, w[row]).eval()
        with torch.no_grad():
            x = torch.tensor(value, dtype=torch.float64).broadcast_to(1, *SHAPE)
            z = module[:4](x)
            torch.testing.assert_close(found.a[row], z.flatten(), rtol=1e-12, atol=1e-14)
            expected = module.head(z)[0].log_softmax(0)
            torch.testing.assert_close(found.u[row], expected, rtol=1e-12, atol=1e-14)
    assert net.num_outputs == 3 and found.a.shape == (3, 32)
    alone = answers_one_by_one(net, w, value)
    torch.testing.assert_close(alone.u, found.u, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(alone.a, found.a, rtol=1e-12, atol=1e-14)


def test_models_that_are_not_finite_give_no_answer():
    """Wherever the number is that is none, though the answer itself may not show it."""
    net = network()
    w = models(net)
    w[1, net.statistics.stop - 1] = torch.inf
    found = answers(net, w, 1.0)
    for field in found:
        assert field.isnan().all(1).tolist() == [False, True, False]
        assert field[[0, 2]].isfinite().all()


def value_of(net, w, batch, objective, target, leaf=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return objective(net.bind(w, w[:, net.statistics].clone(), leaf=leaf), batch, target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["unit", "batch"])
def test_gradients_of_the_term_are_finite_differences_and_leave_the_head(kind, reduction):
    """Re-evaluated from current features at every step: as a constant it would have no gradient."""
    net = network(dropout=0.0)
    w, batch = models(net), batch_of(net)
    target = torch.randn(3, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    term = unit_term(1.0, 2.0, reduction) if kind == "unit" else batch_term(2.0, reduction)

    def added(rows, leaf=None):
        whole = value_of(net, rows, batch, term, target, leaf)
        return whole - value_of(net, rows, batch, lambda m, b, t: cross_entropy(m, b), target, leaf)

    leaf = w[:, net.weights].clone().requires_grad_()
    (g,) = torch.autograd.grad(added(w, leaf).sum(), leaf)
    assert g[:, net.head].abs().max() < 1e-12
    assert (g[:, net.extractor].abs().amax(1) > 1e-3).all()
    for column in range(net.extractor.start, net.extractor.stop, 5):
        ahead, behind = w.clone(), w.clone()
        ahead[:, column] += 1e-6
        behind[:, column] -= 1e-6
        slope = (added(ahead) - added(behind)) / 2e-6
        torch.testing.assert_close(g[:, column], slope, rtol=1e-5, atol=1e-7)


def test_term_is_by_hand_and_zero_at_its_target():
    net = network(dropout=0.0)
    w, batch = models(net), batch_of(net)
    a = answers(net, w, 1.0).a
    plainly = value_of(net, w, batch, lambda m, b, t: cross_entropy(m, b), a)
    leaf = w[:, net.weights].clone().requires_grad_()
    at_target = value_of(net, w, batch, unit_term(1.0, 5.0, "sum"), a, leaf)
    torch.testing.assert_close(at_target, plainly, rtol=1e-14, atol=0)
    (g,) = torch.autograd.grad(at_target.sum(), leaf)
    (expected,) = torch.autograd.grad(
        value_of(net, w, batch, lambda m, b, t: cross_entropy(m, b), a, leaf).sum(), leaf
    )
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-14)
    for reduction, share in (("sum", 32), ("mean", 1)):
        away = value_of(net, w, batch, unit_term(1.0, 5.0, reduction), a + 0.1)
        expected = torch.full((3,), 5 * 0.01 * share, dtype=torch.float64)
        torch.testing.assert_close(away - plainly, expected, rtol=1e-9, atol=0)
    module = plain(net, w[0]).train()
    module.drop.p = 0.0
    z = module[:4](batch.x[0]).flatten(1)
    gap = (z - a[0]).square()
    found = {
        reduction: value_of(net, w, batch, batch_term(1.0, reduction), a)[0] - plainly[0]
        for reduction in ("mean", "sum")
    }
    torch.testing.assert_close(found["mean"], gap.mean(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found["sum"], gap.sum(1).mean(), rtol=1e-9, atol=0)


def test_padding_does_not_enter_the_term_on_batches():
    """Without batch normalisation, whose batches are never padded."""
    build = lambda: nn.Sequential(OrderedDict(fc=nn.Linear(4, 3), head=nn.Linear(3, 2)))  # noqa: E731
    net = Network(build, "head", input_shape=(4,), dtype=torch.float64)
    w, draw = net.draw(0), torch.Generator().manual_seed(0)
    x, y = torch.randn(1, 5, 4, generator=draw, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.int64)
    target = torch.ones(1, 3, dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    padded = Batch(slice(0, 1), x, y, mask, torch.tensor([3.0], dtype=torch.float64))
    short = Batch(slice(0, 1), x[:, :3], y[:, :3], None, padded.sizes)
    one, other = (value_of(net, w, batch, batch_term(1.0, "mean"), target) for batch in (padded, short))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_unit_term_neither_moves_statistics_nor_sees_dropout():
    net = network()
    w, batch = models(net), batch_of(net)
    target = torch.zeros(3, 32, dtype=torch.float64)
    moved = []
    for objective in (unit_term(1.0, 1.0, "mean"), lambda m, b, t: cross_entropy(m, b)):
        buffers = w[:, net.statistics].clone()
        m = net.bind(w, buffers)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            objective(m, batch, target)
        moved.append(buffers)
    assert torch.equal(*moved) and (moved[0] != w[:, net.statistics]).all()
    plainly = value_of(net, w, batch, lambda m, b, t: cross_entropy(m, b), target)
    a = answers(net, w, 1.0).a
    whole = value_of(net, w, batch, unit_term(1.0, 1.0, "mean"), target)
    torch.testing.assert_close(whole - plainly, a.square().mean(1), rtol=1e-9, atol=0)


def test_unit_input_is_one_sample_a_model():
    net = network()
    assert unit_input(net, 0.5, 3).shape == (3, 1, *SHAPE)
    assert (unit_input(net, 0.5, 3) == 0.5).all()
