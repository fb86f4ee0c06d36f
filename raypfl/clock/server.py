"""A round of a server: when uploads arrive, which ones are taken, and when the round ends."""

# S selected clients.

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ServerRound(NamedTuple):
    """What becomes of the selected clients. Seconds count from the beginning of the round."""

    outcome: np.ndarray
    """Of each: `done`, `late` (after the dead-line), `surplus` (after enough others) or `failed`, `[S]`."""
    end: np.ndarray
    """When its upload arrives, or would; when it is done, if it sends none; float64 `[S]`."""
    seconds: float
    """When the server goes on."""

    @property
    def taken(self) -> np.ndarray:
        """Who takes part, bool `[S]`; nothing of the others is kept."""
        taken: np.ndarray = self.outcome == "done"
        return taken


def server_round(
    end: np.ndarray,
    *,
    uploads: np.ndarray,
    failed: np.ndarray,
    wanted: int,
    deadline: float | None,
) -> ServerRound:
    """Take the uploads that come first, as many as are wanted, up to the dead-line.

    The server goes on as soon as it has as many as it wants. If it cannot have them, it waits for the
    dead-line, or, without one, for the last upload: that a link broke is noticed at once. It waits for nobody
    who only trains, unless nobody uploads.

    Args:
        end: when each of the selected would be done, float64 `[S]`, in the order of ids.
        uploads: who of them sends what it trained, bool `[S]`.
        failed: who of them fails in this round, bool `[S]`.
        wanted: the number of uploads that are enough.
        deadline: seconds, or None.
    """
    outcome = np.full(len(end), "done", dtype=object)
    outcome[failed] = "failed"
    if deadline is not None:
        outcome[uploads & ~failed & (end > deadline)] = "late"
    arriving = np.flatnonzero(uploads & (outcome == "done"))
    # Stable: of those that arrive together, the lower ids are taken.
    first = arriving[np.argsort(end[arriving], kind="stable")]
    outcome[first[wanted:]] = "surplus"
    taken = first[:wanted]
    if not uploads.any():
        return ServerRound(outcome, end, float(end[outcome == "done"].max(initial=0.0)))
    last = float(end[taken].max(initial=0.0))
    enough = len(taken) >= min(wanted, int(uploads.sum()))
    return ServerRound(outcome, end, last if enough or deadline is None else deadline)
