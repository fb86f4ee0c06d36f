"""What the driver needs of an engine: rounds, checkpoints, and a word when a host is lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from raypfl.algebra.phases import Phase
from raypfl.engine.phases import Spent
from raypfl.errors import RaypflError
from raypfl.records.manifest import Part
from raypfl.records.storage import Place


class HostsLost(RaypflError):
    """Actors died, or what only they held is gone. Everything has to go back to the last checkpoint."""


class RoundReport(NamedTuple):
    """One round in numbers."""

    clients: list[dict[str, Any]]
    """Blocks of client records, by column."""
    traffic: list[dict[str, Any]]
    """Blocks of messages, by column."""
    diagnostics: dict[str, float]
    """What the method says about the server's step, by name."""
    participants: int
    server_seconds: float
    evaluation_seconds: float
    """Of the slowest host."""
    work_seconds: float
    """Training and evaluation, of the slowest host."""
    clock: dict[str, Any] | None = None
    """Times of the virtual clock, by column; None where there is none."""
    server_phases: dict[Phase, Spent] | None = None
    """What the server's seconds were spent on, where that is asked for (`World.phases`)."""


class Engine(Protocol):
    """Hosts and a hub, somewhere."""

    def round(
        self, round: int, *, evaluate_pre: bool, evaluate_post: bool, away: Collection[int] = ()
    ) -> RoundReport:
        """Train and aggregate round `round`; PRE records are those of the round before.

        Clients that are `away` are not selected.

        Raises:
            HostsLost: an actor died; call `restore` before anything else.
            ClientError: a client raised or hangs; likewise.
        """
        ...

    def evaluate(self, round: int) -> RoundReport:
        """PRE records of `round`, the models as received after it; nothing is trained."""
        ...

    def save(self, building: Place) -> Sequence[Part]:
        """Write all rows into a checkpoint that is being built."""
        ...

    def restore(self, checkpoint: Place | None) -> None:
        """Put all rows back to a checkpoint, or to the start; replaces lost actors first."""
        ...

    def close(self) -> None:
        """Release what was started."""
        ...
