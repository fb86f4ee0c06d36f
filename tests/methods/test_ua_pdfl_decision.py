"""What peers of UA-PDFL decide by their answers: closed forms, ties, who hears nobody, broken peers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from raypfl.methods.ua_pdfl_decision import NOBODY, Rule, decide, draw_peer
from raypfl.topology import graph_of

RULE = Rule(tau=0.3, divergence="js", drop_strict=False, heads_strict=True, may_drop=True)
P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1]], dtype=torch.float64)


def graph(*edges, peers=4):
    """Edges are (receiver, source)."""
    receivers, sources = zip(*edges, strict=True) if edges else ((), ())
    return graph_of(
        peers, torch.tensor(receivers, dtype=torch.int64), torch.tensor(sources, dtype=torch.int64)
    )


def first(peer, candidates):
    return int(candidates[0])


def decided(over, rule=RULE, p=P, draw=first, **changes):
    finite = p.isfinite().all(1)
    return decide(p.log(), finite, over, rule._replace(**changes), draw)


def test_heads_of_those_that_are_close_and_dropout_where_all_are():
    """JS(0, 1) = 0.2531016, JS(0, 2) is below 0.01; Jeffreys of the first pair is 1.1675461."""
    over = graph((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (3, 0), (3, 1))
    found = decided(over, tau=0.2)
    assert found.divergences[0].item() == pytest.approx(0.2531016, abs=1e-7)
    assert found.close.tolist() == [False, True, False, False, True, True, False]
    assert found.num_heads.tolist() == [1, 0, 1, 1]
    assert found.pick.tolist() == [NOBODY, NOBODY, 0, NOBODY]
    heads = found.heads
    assert list(zip(heads.receivers.tolist(), heads.sources.tolist(), strict=True)) == [
        (0, 2),
        (2, 0),
        (3, 0),
    ]

    wide = decided(over, tau=0.26)
    assert wide.close.all() and wide.pick.tolist() == [1, 0, 0, 0]
    assert decided(over, tau=0.26, may_drop=False).pick.tolist() == [NOBODY] * 4
    other = decided(over, tau=0.26, divergence="jeffreys")
    assert other.divergences[0].item() == pytest.approx(1.1675461, abs=1e-7)
    assert other.pick.tolist() == [NOBODY, NOBODY, 0, NOBODY]


@pytest.mark.parametrize("drop_strict", [False, True])
@pytest.mark.parametrize("heads_strict", [False, True])
def test_ties_are_decided_as_they_say(drop_strict, heads_strict):
    """Peers 0 and 3 answer alike in every bit: D = 0 = tau."""
    rule = {"tau": 0.0, "drop_strict": drop_strict, "heads_strict": heads_strict}
    found = decided(graph((0, 3), (3, 0), (1, 0)), **rule)
    assert found.divergences[[0, 2]].tolist() == [0.0, 0.0]
    assert found.pick.tolist() == ([NOBODY] * 4 if drop_strict else [3, NOBODY, NOBODY, 0])
    assert found.num_heads.tolist() == ([0] * 4 if heads_strict else [1, 0, 0, 1])


def test_never_close_and_nobody_heard():
    assert decided(graph((0, 3), (1, 0)), tau=-1.0, heads_strict=False).pick.tolist() == [NOBODY] * 4
    alone = decided(graph(), tau=1.0)
    assert alone.pick.tolist() == [NOBODY] * 4 and alone.num_heads.tolist() == [0] * 4


def test_a_broken_peer_is_missing_for_everybody():
    """Without peer 1, peer 0 hears peer 2 alone and drops; peer 3 hears nobody; peer 1 stays as it is."""
    p = P.clone()
    p[1, 0] = torch.nan
    found = decided(graph((0, 1), (0, 2), (1, 0), (3, 1)), p=p, tau=0.2)
    assert found.graph.num_edges == 1 and found.pick.tolist() == [2, NOBODY, NOBODY, NOBODY]
    assert found.num_heads.tolist() == [1, 0, 0, 0]


def test_divergences_that_are_no_numbers_are_close_to_nothing():
    p = P.clone()
    p[1, 0] = torch.nan
    everyone = torch.ones(4, dtype=torch.bool)
    for strict in (False, True):
        rule = RULE._replace(tau=1.0, drop_strict=strict, heads_strict=strict)
        found = decide(p.log(), everyone, graph((1, 0), (0, 1)), rule, first)
        assert not found.close.any() and found.pick.tolist() == [NOBODY] * 4


def test_shared_heads_and_dropout_rise_with_the_threshold():
    draw = torch.Generator().manual_seed(0)
    p = torch.randn(12, 5, generator=draw, dtype=torch.float64).softmax(1)
    over = graph(*((i, (i + k) % 12) for i in range(12) for k in (1, 2, 5)), peers=12)
    found = [decided(over, p=p, tau=tau) for tau in (-1.0, 0.0, 0.02, 0.05, 0.08, 0.12, 0.2, 0.3, 0.7)]
    for less, more in zip(found, found[1:], strict=False):
        assert (less.num_heads <= more.num_heads).all()
        assert ((less.pick == NOBODY) | (more.pick != NOBODY)).all()
    dropped = [int((one.pick != NOBODY).sum()) for one in found]
    assert dropped[0] == 0 and dropped[-1] == 12 and len(set(dropped)) > 3


def test_draws_are_uniform_and_belong_to_seed_round_and_peer():
    candidates = torch.tensor([2, 5, 9])
    drawn = Counter(draw_peer(0, number, 1, candidates) for number in range(3000))
    assert set(drawn) == {2, 5, 9} and all(900 < count < 1100 for count in drawn.values())
    streams = {
        tuple(draw_peer(seed, number, peer, candidates) for number in range(40))
        for seed in (0, 1)
        for peer in (0, 1)
    }
    assert len(streams) == 4
    assert (
        decided(graph((1, 0), (1, 2)), tau=1.0, draw=lambda peer, heard: 10 * peer + len(heard)).pick[1] == 12
    )
