"""Two heads on one extractor: each part at its own rate, by its own optimizer's memory."""

from __future__ import annotations

import pytest
import torch
from plain_torch import conv, draws, mlp, network

from raypfl.training import SGD, Adam, Batch, Rows, cross_entropy, cross_entropy_per_sample, fit_two_heads

OPTIMIZERS = [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), Adam(lr=0.01)]

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "nesterov", "adam"])


def first_alone(m: Rows, batch: Batch, second: torch.Tensor) -> torch.Tensor:
    return cross_entropy(m, batch)


def both(m: Rows, batch: Batch, second: torch.Tensor) -> torch.Tensor:
    z = m.features(batch.x)
    own = cross_entropy_per_sample(m.classify(z), batch.y)
    return batch.mean(own + cross_entropy_per_sample(m.classify(z.detach(), head=second), batch.y))


@each_optimizer
@pytest.mark.parametrize("build", [mlp, conv])
def test_without_a_second_head_it_is_fit_bit_for_bit(cohort, build, optimizer):
    net = network(build)
    clients = cohort(net, optimizer=optimizer)
    w = draws(net, 4)
    expected = clients.fit(w, cross_entropy)
    found = fit_two_heads(clients, w, w[:1, net.head], first_alone, freeze_second=True)
    assert torch.equal(found.w, expected.w)


@each_optimizer
@pytest.mark.parametrize("build", [mlp, conv])
def test_a_rate_for_the_head_alone(cohort, build, optimizer):
    """With the rates of the first step of all: the head moves by its share, the extractor as before."""
    net = network(build)
    clients = cohort(net, optimizer=optimizer, batch_size=100, epochs=1)
    w = draws(net, 4)
    expected = clients.fit(w, cross_entropy).w - w
    found = fit_two_heads(
        clients, w, w[:, net.head], first_alone, head_lr=optimizer.lr / 4, freeze_second=True
    )
    moved = found.w - w
    torch.testing.assert_close(moved[:, net.head], expected[:, net.head] / 4, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moved[:, net.extractor], expected[:, net.extractor], rtol=1e-12, atol=0)


@each_optimizer
@pytest.mark.parametrize("build", [mlp, conv])
def test_a_second_head_like_the_first_moves_like_it(cohort, build, optimizer):
    """Both see the same features; here the extractor hears the first alone."""
    net = network(build)
    clients = cohort(net, optimizer=optimizer)
    w = draws(net, 4)
    found = fit_two_heads(clients, w, w[:, net.head], both, head_lr=0.03, second_lr=0.03)
    torch.testing.assert_close(found.second, found.w[:, net.head], rtol=1e-9, atol=1e-11)
    one_rate = fit_two_heads(clients, w, w[:, net.head], both)
    torch.testing.assert_close(one_rate.w, clients.fit(w, cross_entropy).w, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("build", [mlp, conv])
def test_one_client_at_a_time_equals_all_at_once(cohort, build):
    net, optimizer = network(build), SGD(lr=0.1, momentum=0.9)
    w = draws(net, 4)
    second = draws(net, 8)[4:, net.head] if build is mlp else w[:1, net.head]
    found = [
        fit_two_heads(cohort(net, optimizer=optimizer, width=width), w, second, both, head_lr=0.02)
        for width in (1, 3, 4)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other.w, found[0].w, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(other.second, found[0].second, rtol=1e-11, atol=1e-13)


def test_rates_decay_over_rounds(cohort):
    """One full-batch step of round 3 is 0.25 of one of round 1, for every part."""
    net, optimizer = network(mlp), SGD(lr=0.1)
    w, second = draws(net, 4), draws(net, 4)[:, net.head]
    options = {"optimizer": optimizer, "batch_size": 100, "epochs": 1, "lr_decay": 0.5}
    one, three = (
        fit_two_heads(cohort(net, round=round, **options), w, second, both, head_lr=0.05, second_lr=0.02)
        for round in (1, 3)
    )
    torch.testing.assert_close(three.w - w, (one.w - w) / 4, rtol=1e-8, atol=1e-13)
    torch.testing.assert_close(three.second - second, (one.second - second) / 4, rtol=1e-8, atol=1e-13)


def test_nothing_given_is_written(cohort):
    net = network(mlp)
    w, second = draws(net, 4), draws(net, 4)[:, net.head].clone()
    kept = w.clone(), second.clone()
    fit_two_heads(cohort(net), w, second, both)
    assert torch.equal(w, kept[0]) and torch.equal(second, kept[1])
