"""Momentum that outlives a round, against torch's own optimizer and against rounds that are one round."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from raypfl.training import SGD, Adam, TrainingConfig, cross_entropy

WHOLE = {"batch_size": 1000, "optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.01)}


def rounds(toy, w, count, epochs, columns=None):
    """Rounds of full batches, each with its own cohort; returns models and velocity."""
    toy.training = TrainingConfig(epochs=epochs, momentum_state="keep", **WHOLE)
    velocity = torch.zeros(len(w), toy.net.num_weights, dtype=w.dtype)
    for number in range(1, count + 1):
        cohort = toy.cohort(toy.plan(number))
        cohort.velocity = velocity
        w = cohort.fit(w, cross_entropy, columns=columns).w
        velocity = cohort.velocity
    return w, velocity


@pytest.fixture
def deep(make_toy):
    return make_toy(hidden=4, dtype=torch.float64)


def test_rounds_with_kept_momentum_are_one_long_round(deep):
    w = deep.rows()
    several, _ = rounds(deep, w, 3, 2)
    deep.training = TrainingConfig(epochs=6, **WHOLE)
    torch.testing.assert_close(
        several, deep.cohort(deep.plan()).fit(w, cross_entropy).w, rtol=1e-12, atol=1e-14
    )
    deep.training = TrainingConfig(epochs=2, **WHOLE)
    fresh = w
    for number in (1, 2, 3):
        fresh = deep.cohort(deep.plan(number)).fit(fresh, cross_entropy).w
    assert (fresh - several).abs().max() > 1e-3


def test_frozen_columns_keep_their_velocity(deep):
    """A phase that trains the head alone neither uses nor moves the extractor's momentum."""
    w = deep.rows()
    _, velocity = rounds(deep, w, 1, 2)
    cohort = deep.cohort(deep.plan(2))
    cohort.velocity = velocity
    before = velocity.clone()
    cohort.fit(w, cross_entropy, columns=deep.net.head)
    moved = (cohort.velocity != before).any(0)
    assert moved[deep.net.head].any() and not moved[deep.net.extractor].any()
    assert torch.equal(velocity, before)


def test_features_go_on_from_the_same_velocity(deep):
    w = deep.rows()
    _, velocity = rounds(deep, w, 1, 2)
    found = []
    for kept in (False, True):
        cohort = deep.cohort(deep.plan(2))
        cohort.velocity = velocity
        if kept:
            heads = cohort.on_features(w)
            heads.fit(w, cross_entropy_of, columns=deep.net.head)
        else:
            cohort.fit(w, cross_entropy, columns=deep.net.head)
        found.append(cohort.velocity)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def cross_entropy_of(m, batch):
    logits = m.classify(batch.x)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.y, reduction="none")
    return batch.mean(losses)


def test_only_momentum_of_sgd_is_kept():
    assert not TrainingConfig(optimizer=SGD(lr=0.1), momentum_state="keep").keeps_momentum
    with pytest.raises(ValidationError, match="momentum_state = keep .* optimizer is adam"):
        TrainingConfig(optimizer=Adam(), momentum_state="keep")
