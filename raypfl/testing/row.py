"""What a method promises beyond what all methods do: its row of the contract table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pytest

from raypfl.methods import METHODS, Method
from raypfl.training import Network

Payload = Callable[[Network, int], int]
"""Values that one participant sends or receives in a round of so many participants."""


def nothing(net: Network, participants: int) -> int:
    return 0


def weights(net: Network, participants: int) -> int:
    """All parameters, no running statistics."""
    return net.num_weights


def model(net: Network, participants: int) -> int:
    """Whatever travels of a model."""
    return net.shared.stop


def body(net: Network, participants: int) -> int:
    """Whatever travels of an extractor."""
    return net.body.stop - net.body.start


def body_and_head(net: Network, participants: int) -> int:
    """Whatever travels of an extractor, and the parameters of a head."""
    return body(net, participants) + net.head.stop - net.head.start


def mask(net: Network, participants: int) -> int:
    """A bit a parameter, in whole bytes."""
    return -(-net.num_weights // 8)


def feature(net: Network, participants: int) -> int:
    """What enters a linear head for 3 classes, for one of them."""
    return (net.head.stop - net.head.start) // 3 - 1


def one(net: Network, participants: int) -> int:
    return 1


def nothing_else(patch: pytest.MonkeyPatch, order: Sequence[int]) -> None:
    """No draw depends on the order of labels."""


class Row(NamedTuple):
    """What a method promises beyond what all methods do."""

    name: str
    options: Any
    """The method's configuration."""
    up: Payload
    down: Payload
    masks_up: Payload = nothing
    """Bytes of bit masks that a participant sends besides."""
    packed_down: Mapping[str, Payload] = MappingProxyType({})
    """Bytes that a participant receives besides in messages of a kind whose values are packed to bits."""
    up_per_class: Payload = nothing
    """Values that a participant sends besides for each class it has samples of."""
    down_per_class: Payload = nothing
    """Values that it receives besides for each class that participants of the round before have."""
    counts_up_per_class: Payload = nothing
    """Whole numbers, of 8 bytes each, that a participant sends besides for each class it has samples of."""
    decided: Callable[[Network, int, Any], list[int]] | None = None
    """Values that each participant receives where that is decided in the round, by the downloaded message;
    `down` is then of the first round."""
    moves: Callable[[pytest.MonkeyPatch, Sequence[int]], None] = nothing_else
    """Lets draws that depend on the order of labels move with the clients."""
    away: Literal["own", "newest", "own head", "own residual", "own shares", "own by newest"] = "own"
    """What a client that does not take part would use: its own last model, the newest shared one, the newest
    extractor with its own head, the newest shared model with its own head added to that model's, that with
    what the newest shared parameters make of its own label shares, or its own last model and, behind its
    columns, what the server newly says about how to read it."""
    collaborates: bool = True
    """Whether a client's data ever reach the others' models."""
    chooses: bool = False
    """Whether a client takes only those models that suit its own data: not those of all others."""
    sent_as_stored: bool = True
    """Whether messages are exactly the arrays that cross process borders; else `sent_*` say what would be."""
    moving: frozenset[str] = frozenset()
    """Server fields with a row a client that change for clients that are absent, too."""
    without_server: bool = False
    """Whether messages go from client to client; `down` is then what a client hears."""
    momentum: Literal["reset", "keep"] = "reset"
    """Over rounds; only local training knows of it, and the method should not notice."""
    trains: Literal["sampled", "all"] = "sampled"
    """Who trains in a round; the sampled clients alone upload."""
    personal: tuple[str, ...] = ()
    """Clients' own architectures, by their names in the harness, where they are not the shared one."""
    tolerance: float = 1e-9
    """Float64 differences between one client at a time and all at once, after three rounds."""

    def method(self) -> Method[Any, Any, Any, Any, Any]:
        return METHODS[self.options.name](self.options, seed=3)
