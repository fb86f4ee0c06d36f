"""What a run does about faults: lost actors, clients that raise or hang, storage that fails.

| policy | lost actor, node or message | client that hangs (`deadline`) | client that raises |
|---|---|---|---|
| `fail` | stops | stops | stops |
| `restart` | replaced, back to the last checkpoint | likewise | stops: it would raise again |
| `drop_clients` | as `restart` | left out of the round, back to the last checkpoint | likewise |

Rounds since the checkpoint are replayed to the same bits. A client that is left out of a round is one that
was not selected for it: it neither receives nor sends, keeps its state, and is evaluated as one that is
absent; so the run is, bit for bit, that of clients that were not available in those rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import Field, PositiveInt

from raypfl.config import StrictModel
from raypfl.engine.contract import HostsLost
from raypfl.errors import ClientError, PlacementError, StorageError

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
"""Between two attempts at storage that fails; each pause is twice the one before."""


class FaultsConfig(StrictModel):
    """What a run survives, and how often."""

    policy: Literal["fail", "restart", "drop_clients"] = Field(
        "restart",
        description="fail: stop; restart: replace and replay; drop_clients: also leave out clients that fail",
    )
    budget: int = Field(
        3, ge=0, description="how often everything may go back to one and the same checkpoint"
    )
    max_dropped: PositiveInt = Field(
        10, description="clients that drop_clients may leave out, each round of each counted, resumed or not"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="wall-clock seconds that clients of one forward may take on Ray; null: for ever",
    )
    storage_seconds: float = Field(
        600, ge=0, description="how long storage may fail before the run stops; until then it goes on"
    )


class Tolerance:
    """Decides what is done about a fault, and counts."""

    def __init__(
        self,
        config: FaultsConfig,
        away: Mapping[int, Mapping[int, str]] | None = None,
        *,
        already_dropped: int = 0,
    ) -> None:
        """Begin to count.

        Args:
            config: the policy and its budgets.
            away: clients to leave out, each with the reason, by round; nobody at first unless given.
            already_dropped: clients that were left out before this process (resume), as its checkpoint says.
        """
        self._config, self._before = config, already_dropped
        self._away = {round: dict(own) for round, own in (away or {}).items()}
        self._returns = 0

    def away(self, round: int) -> Mapping[int, str]:
        """Who is left out of a round, each with the reason."""
        return self._away.get(round, {})

    def dropped(self, until: int) -> int:
        """How many clients were left out of rounds up to `until`, each round of each counted."""
        return self._before + sum(len(away) for round, away in self._away.items() if round <= until)

    def survive(self, fault: HostsLost | ClientError, round: int, back: int) -> str:
        """What is done about a fault, in words; the caller then goes back to the checkpoint of round `back`.

        Raises:
            PlacementError, ClientError: the fault is not to be survived.
        """
        if isinstance(fault, ClientError) and self._config.policy == "drop_clients" and fault.clients:
            return self._drop(fault, round, back)
        if isinstance(fault, ClientError) and not fault.hung:
            raise fault
        if self._config.policy == "fail":
            raise _stopped(
                fault, f"in round {round}: {first_line(fault)} faults.policy = fail, so the run stops."
            )
        self._returns += 1
        if self._returns > self._config.budget:
            raise _stopped(
                fault,
                f"{self._returns} times since round {back}, the last time in round {round}: "
                f"{first_line(fault)} faults.budget = {self._config.budget}. If memory is short, lower "
                "engine.num_actors, which changes no result.",
            )
        return f"{_what(fault)} in round {round}; replaced, and back to round {back}. ({first_line(fault)})"

    def committed(self) -> None:
        """There is a new checkpoint, with a budget of its own."""
        self._returns = 0

    def _drop(self, fault: ClientError, round: int, back: int) -> str:
        reason = "hung" if fault.hung else "raised"
        dropped = self._away.setdefault(round, {})
        dropped |= dict.fromkeys(fault.clients, reason)
        count = self.dropped(max(self._away))
        if count > self._config.max_dropped:
            before = f", {self._before} of them before it was resumed" if self._before else ""
            raise ClientError(
                f"{count} clients would have been left out of rounds{before}, and faults.max_dropped = "
                f"{self._config.max_dropped}. Allow more if the run is still worth it. The last: {fault}"
            )
        what = f"{list(fault.clients)} " + ("took too long" if fault.hung else f"raised ({last_line(fault)})")
        return f"Client(s) {what} in round {round}; left out of it, and back to round {back}."


class Patience:
    """How long storage may fail, and when it is tried again."""

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds, self._clock, self._sleep = seconds, clock, sleep
        self._since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._next = 0.0

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._since is not None

    @property
    def due(self) -> bool:
        """Whether it is time for another attempt."""
        return not self.failing or self._clock() >= self._next

    def failed(self, error: StorageError) -> None:
        """An attempt has failed.

        Raises:
            StorageError: it was the last; no attempt has succeeded for too long.
        """
        now = self._clock()
        if self._since is None:
            self._since, self._pause = now, FIRST_PAUSE_SECONDS
        if now - self._since >= self._seconds:
            raise type(error)(
                f"{error} Storage has failed for {now - self._since:.0f} s (faults.storage_seconds = "
                f"{self._seconds:g})."
            ) from error
        self._next = now + min(self._pause, self._since + self._seconds - now)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def succeeded(self) -> None:
        """An attempt has succeeded."""
        self._since = None

    def wait(self) -> None:
        """Until the next attempt is due."""
        self._sleep(max(0.0, self._next - self._clock()))


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return str(error).strip().partition("\n")[0]


def last_line(error: Exception) -> str:
    """What was raised, of an error that carries a traceback."""
    return str(error).strip().rpartition("\n")[2]


def _what(fault: HostsLost | ClientError) -> str:
    return (
        f"Client(s) {list(fault.clients)} took too long"
        if isinstance(fault, ClientError)
        else "An actor was lost"
    )


def _stopped(fault: HostsLost | ClientError, how: str) -> PlacementError | ClientError:
    if isinstance(fault, ClientError):
        return ClientError(f"clients took longer than faults.deadline {how}", fault.clients, hung=True)
    return PlacementError(f"actors were lost {how}")
