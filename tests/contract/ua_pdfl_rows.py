"""Rows of UA-PDFL for the contract table: what peers hear depends on what they decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raypfl.methods import ua_pdfl
from raypfl.methods.ua_pdfl import BOTH, Config
from raypfl.methods.ua_pdfl_decision import draw_peer
from raypfl.topology import Full
from raypfl.training import Network

FULL = Full(weights="samplesize")


def pieces(net: Network) -> tuple[int, int]:
    """Whatever travels of an extractor, and of a head."""
    body = net.body.stop - net.body.start
    return body, net.shared.stop - body


def answers_heard(net: Network, participants: int, *, auxiliary: bool = True) -> int:
    """Logits of the unit input, the features they are of and the number of samples, of everyone else."""
    features = net.bind(net.draw(0)).features(torch.zeros(1, 1, *net.input_shape, dtype=net.dtype)).numel()
    return (participants - 1) * (net.num_outputs + auxiliary * features + 1)


def and_a_model(net: Network, participants: int) -> int:
    """Answers, and whatever travels of one model."""
    return answers_heard(net, participants) + (participants > 1) * sum(pieces(net))


def and_extractors(net: Network, participants: int) -> int:
    """Answers, and whatever travels of all extractors."""
    return answers_heard(net, participants) + (participants - 1) * pieces(net)[0]


def and_models(net: Network, participants: int) -> int:
    """Answers, and whatever travels of all models."""
    return answers_heard(net, participants) + (participants - 1) * sum(pieces(net))


def and_extractors_and_a_head(net: Network, participants: int) -> int:
    """Extractors of all in place of the features that a peer can find with them, where it can."""
    if net.private.start != net.private.stop:
        return and_a_model(net, participants)
    body, head = pieces(net)
    without = answers_heard(net, participants, auxiliary=False)
    return without + (participants - 1) * body + (participants > 1) * head


def as_decided(net: Network, participants: int, down: Any) -> list[int]:
    """Answers, and one model, or all extractors and the heads of those that are close."""
    body, head = pieces(net)
    return [
        answers_heard(net, participants)
        + (body + head if pick >= 0 else (participants - 1) * body + close * head)
        for pick, close in zip(down.pick.tolist(), (down.asked == BOTH).sum(1).tolist(), strict=True)
    ]


def picks_move(patch: pytest.MonkeyPatch, order: Sequence[int]) -> None:
    """Candidates are in the order of their labels: a client picks the same one under other labels."""

    def moved(seed: int, round: int, peer: int, candidates: torch.Tensor) -> int:
        labels = torch.tensor(sorted(order[candidate] for candidate in candidates.tolist()))
        return list(order).index(draw_peer(seed, round, peer, labels))

    patch.setattr(ua_pdfl, "draw_peer", moved)


ROWS: list[dict[str, Any]] = [
    {
        "name": "ua_pdfl",
        "options": Config(topology=FULL, tau=0.03),
        "down": and_a_model,
        "decided": as_decided,
        "moves": picks_move,
    },
    {
        "name": "ua_pdfl never close, kept momentum",
        "options": Config(topology=FULL, tau=-1.0),
        "down": and_extractors,
        "momentum": "keep",
    },
    {
        "name": "ua_pdfl always drops, own starts, kept momentum",
        "options": Config(topology=FULL, tau=1.0, init="independent"),
        "down": and_a_model,
        "momentum": "keep",
        "moves": picks_move,
    },
    {
        "name": "ua_pdfl as the code",
        "options": Config(
            topology=FULL,
            tau=1.0,
            drop_strict=True,
            heads_strict=False,
            prox_input="batch",
            aux_avg="samplesize_peers",
        ),
        "down": and_extractors_and_a_head,
        "moves": picks_move,
    },
    {
        "name": "ua_pdfl without dropout, jeffreys, sum, zeros",
        "options": Config(
            topology=FULL,
            tau=100.0,
            divergence="jeffreys",
            use_cd=False,
            prox_reduce="sum",
            mu=0.1,
            unit="zeros",
        ),
        "down": and_models,
    },
    {
        "name": "ua_pdfl without layers",
        "options": Config(topology=FULL, tau=0.0, drop_strict=True, use_lp=False),
        "down": and_models,
    },
]
