"""The contract table: a row for every method and for variants with code of their own; new ones add a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from raypfl.config import StrictModel
from raypfl.methods import METHODS, Method
from raypfl.methods.diversifed import Config as DiversiFed
from raypfl.methods.fedamp import Config as FedAMP
from raypfl.methods.fedavg import Config as FedAvg
from raypfl.methods.local import Config as Local
from raypfl.methods.one_lambda import Config as OneLambda
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


def others(net: Network, participants: int) -> int:
    """The parameters of all other participants."""
    return (participants - 1) * net.num_weights


class Row(NamedTuple):
    """What a method promises beyond what all methods do."""

    name: str
    options: StrictModel
    up: Payload
    down: Payload
    away: Literal["own", "newest"] = "own"
    """What a client that does not take part would use: its own last model, or the newest shared one."""
    collaborates: bool = True
    """Whether a client's data ever reach the others' models."""
    sent_as_stored: bool = True
    """Whether messages are exactly the arrays that cross process borders; else `sent_*` say what would be."""
    moving: frozenset[str] = frozenset()
    """Server fields with a row a client that change for clients that are absent, too."""
    tolerance: float = 1e-9
    """Float64 differences between one client at a time and all at once, after three rounds."""

    def method(self) -> Method:
        return METHODS[self.options.name](self.options, seed=3)


TABLE = [
    Row("local", Local(), up=nothing, down=nothing, collaborates=False),
    Row("fedavg", FedAvg(), up=model, down=model, away="newest"),
    Row("fedamp", FedAMP(alpha=1.0, sigma=4.0, lam=0.3), up=weights, down=weights),
    Row("fedamp heuristic", FedAMP(attention="heuristic", alpha=1.0, lam=0.3), up=weights, down=weights),
    Row("diversifed", DiversiFed(), up=weights, down=weights),
    Row(
        "diversifed balanced joint squared",
        DiversiFed(form="balanced", coupling="joint", distance="squared", eta=0.1, lam=0.1),
        up=weights,
        down=weights,
    ),
    Row("one_lambda", OneLambda(lam=0.05), up=weights, down=others, sent_as_stored=False),
    Row(
        "one_lambda off",
        OneLambda(lam=0.0),
        up=weights,
        down=others,
        sent_as_stored=False,
        collaborates=False,
    ),
]
