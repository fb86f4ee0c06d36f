"""Divergences: known numbers, exact zeros, and no N x N x O."""

import math

import pytest
import torch
from sparse_cases import normal
from torch import Tensor

from raypfl.algebra import divergence, every_pair, jeffreys, jensen_shannon
from raypfl.errors import ShapeError

EITHER = pytest.mark.parametrize("measure", [jensen_shannon, jeffreys])


def all_pairs(measure, logits_NO: Tensor) -> Tensor:
    log_p = logits_NO.double().log_softmax(1)
    return measure(log_p, *every_pair(len(log_p))).view(len(log_p), len(log_p))


def test_known_numbers():
    log_p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    one, other = torch.tensor([0]), torch.tensor([1])
    assert float(jeffreys(log_p, one, other)) == pytest.approx(1.1675461, abs=5e-8)
    assert float(jensen_shannon(log_p, one, other)) == pytest.approx(0.2531016, abs=5e-8)


def test_against_the_definition():
    log_p = normal(5, 7).log_softmax(1)
    p = log_p.exp()

    def kl(a, b):
        return float((a * (a / b).log()).sum())

    for i, j in [(0, 1), (3, 2), (4, 0)]:
        m = (p[i] + p[j]) / 2
        pair = torch.tensor([i]), torch.tensor([j])
        assert float(jeffreys(log_p, *pair)) == pytest.approx(
            (kl(p[i], p[j]) + kl(p[j], p[i])) / 2, rel=1e-12
        )
        assert float(jensen_shannon(log_p, *pair)) == pytest.approx(
            (kl(p[i], m) + kl(p[j], m)) / 2, rel=1e-12
        )


@EITHER
def test_symmetric_positive_and_exactly_zero_on_the_diagonal(measure):
    found = all_pairs(measure, 3 * normal(20, 10))
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.zeros(20, dtype=torch.float64))
    assert (found[~torch.eye(20, dtype=torch.bool)] > 0).all()


@EITHER
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 2000.0])
def test_exactly_zero_for_equal_bits_of_different_rows(measure, scale):
    """Round 1 of a common start, and a threshold of 0, rest on it. 2000: probabilities far below 1e-300."""
    logits = scale * normal(6, 100)
    found = all_pairs(measure, torch.cat([logits, logits.flip(0)]))
    i = torch.arange(6)
    assert torch.equal(found[i, 11 - i], torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.0, 10.0])
def test_bounds(scale):
    js, jf = all_pairs(jensen_shannon, scale * normal(15, 10)), all_pairs(jeffreys, scale * normal(15, 10))
    assert (js <= math.log(2)).all()
    assert (js <= jf / 2 * (1 + 1e-9)).all()
    if scale < 1e-3:
        off = ~torch.eye(15, dtype=torch.bool)
        torch.testing.assert_close(js[off], jf[off] / 4, rtol=1e-6, atol=0)


@EITHER
def test_a_shift_of_logits_and_an_order_of_classes_do_not_matter(measure):
    logits, order = normal(6, 9), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    expected = all_pairs(measure, logits)
    torch.testing.assert_close(all_pairs(measure, logits + normal(6, 1)), expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(all_pairs(measure, logits[:, order]), expected, rtol=1e-12, atol=1e-15)


def test_disjoint_responses():
    log_p = torch.tensor([[50.0, -50.0], [-50.0, 50.0]], dtype=torch.float64).log_softmax(1)
    pair = torch.tensor([0]), torch.tensor([1])
    assert float(jensen_shannon(log_p, *pair)) == pytest.approx(math.log(2), abs=1e-12)
    assert float(jeffreys(log_p, *pair)) == pytest.approx(100.0, rel=1e-12)
    one_hot = torch.eye(3, dtype=torch.float64).log()
    assert float(jensen_shannon(one_hot, *pair)) == math.log(2)
    assert float(jeffreys(one_hot, *pair)) == math.inf
    assert float(jeffreys(one_hot, pair[0], pair[0])) == 0.0


@EITHER
def test_what_is_not_a_number_stays_so(measure):
    """Neither `D < tau` nor `D <= tau` may hold for a broken peer; clamping at zero must not hide it."""
    logits = normal(3, 4)
    logits[1, 2] = float("nan")
    assert all_pairs(measure, logits).isnan().tolist() == [
        [False, True, False],
        [True] * 3,
        [False, True, False],
    ]


@EITHER
def test_only_the_pairs_that_are_asked_for(measure, monkeypatch):
    """A thousand peers with five neighbours each must not cost a million pairs, in blocks of any size."""
    log_p = normal(1000, 10).log_softmax(1)
    receivers = torch.arange(1000).repeat_interleave(5)
    sources = (receivers + torch.arange(1, 6).repeat(1000)) % 1000
    rows = []
    inner = {jensen_shannon: "_jensen_shannon", jeffreys: "_jeffreys"}[measure]
    original = getattr(divergence, inner)
    whole = measure(log_p, receivers, sources)
    monkeypatch.setattr(divergence, inner, lambda a, b: rows.append(a.numel()) or original(a, b))
    monkeypatch.setattr(divergence, "PAIR_ENTRIES", 1234)
    assert torch.equal(measure(log_p, receivers, sources), whole)
    assert sum(rows) == 50_000 and max(rows) <= 1234


def test_no_pairs():
    none = torch.tensor([], dtype=torch.int64)
    assert jensen_shannon(normal(2, 3).log_softmax(1), none, none).shape == (0,)


@pytest.mark.parametrize("log_p", [normal(2, 3, dtype=torch.float32), normal(3)])
def test_single_precision_is_refused(log_p):
    with pytest.raises(ShapeError, match="log_softmax"):
        jeffreys(log_p, torch.tensor([0]), torch.tensor([1]))
