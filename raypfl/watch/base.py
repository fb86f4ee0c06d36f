"""What watchers are told. They get numbers that are recorded anyway, and can change none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Figures = Mapping[str, float]
"""Numbers by name, as in `accuracy/test/personalised/post`, `bytes/up` or `seconds/server`."""

SERVER = -1
"""Source or destination of a message that is not a client."""


class RunSeen(NamedTuple):
    """The run that is watched."""

    name: str
    """Its folder's, below the storage path: unique there, and the same when it is resumed."""
    folder: str
    """Where it is kept, as a path or an address such as s3://bucket/runs/run."""
    config: Mapping[str, Any]
    """Complete and resolved, in plain types."""
    done: int
    """Completed rounds: 0, or those of the checkpoint that it goes on from."""
    reported: tuple[str, str]
    """The (model, point) whose accuracy the method's papers report."""


class Watcher:
    """Somebody who looks on. `begin`, then `figures` as they come, then `end`, also after an error."""

    def begin(self, run: RunSeen) -> None:
        """A run starts or continues."""

    def figures(self, round: int, figures: Figures) -> None:
        """Numbers of one round; PRE figures of a round come when the next one is done.

        Args:
            round: the round that they belong to.
            figures: accuracies in [0, 1] and losses, mean over clients; bytes; wall-clock seconds.
        """

    def end(self, failed: bool) -> None:
        """The run is complete, or was interrupted or failed."""


class Watchers:
    """All watchers of one run.

    Who raises is not told any more, and the run goes on. A round that is replayed after a loss has the same
    numbers, and is told once.

    Args:
        watchers: by name.
        note: is told of a watcher that raises.
    """

    def __init__(
        self, watchers: Mapping[str, Watcher] | None = None, note: Callable[[str], None] = print
    ) -> None:
        self._watchers = dict(watchers or {})
        self._note = note
        self._told: dict[str, int] = {}

    def begin(self, run: RunSeen) -> None:
        """Tell all of the run."""
        self._each(lambda watcher: watcher.begin(run))

    def round(
        self,
        round: int,
        *,
        seconds: float,
        participants: int,
        server_seconds: float,
        evaluation_seconds: float,
        clients: Sequence[Mapping[str, Any]],
        traffic: Sequence[Mapping[str, Any]],
    ) -> None:
        """Tell all of a round that is complete; arguments as `Metrics.add_round` gets them."""
        if not self._watchers:
            return
        costs = {
            "round": round,
            "participants": participants,
            "clients_per_second": participants / seconds if seconds else 0.0,
            "bytes/up": _bytes(traffic, "src"),
            "bytes/down": _bytes(traffic, "dst"),
            "seconds/round": seconds,
            "seconds/server": server_seconds,
            "seconds/evaluation": evaluation_seconds,
        }
        by_round = _means(clients)
        by_round[round] = {**costs, **by_round.get(round, {})}
        self._tell(by_round)

    def evaluation(self, clients: Sequence[Mapping[str, Any]]) -> None:
        """Tell all of an evaluation outside a round."""
        if self._watchers:
            self._tell(_means(clients))

    def end(self, *, failed: bool) -> None:
        """Tell all that it is over."""
        self._each(lambda watcher: watcher.end(failed))

    def _tell(self, by_round: Mapping[int, Figures]) -> None:
        for round, figures in sorted(by_round.items()):
            new = {name: value for name, value in figures.items() if round > self._told.get(name, -1)}
            self._told |= dict.fromkeys(new, round)
            if new:
                self._each(partial(_pass_on, round, new))

    def _each(self, tell: Callable[[Watcher], None]) -> None:
        for name, watcher in list(self._watchers.items()):
            try:
                tell(watcher)
            except Exception as error:
                # Whatever goes wrong at an onlooker's, the run is not to be lost for it.
                del self._watchers[name]
                self._note(
                    f"watch: {name} failed ({type(error).__name__}: {error}); the run goes on without."
                )


def _pass_on(round: int, figures: Figures, watcher: Watcher) -> None:
    watcher.figures(round, figures)


def _means(blocks: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Mean accuracy and loss over clients, by round and name; in an order that no host decides."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for block in blocks:
        name = f"{block['split']}/{block['model']}/{block['point']}"
        found.setdefault((int(block["round"]), name), []).append(block)
    means: dict[int, dict[str, float]] = {}
    for (round, name), same in sorted(found.items()):
        clients = [np.atleast_1d(block["client"]) for block in same]
        order = np.argsort(np.concatenate(clients))
        for quantity in ("accuracy", "loss"):
            # A value for all clients of a block stands there alone.
            values = [
                np.broadcast_to(block[quantity], own.shape) for block, own in zip(same, clients, strict=True)
            ]
            known = np.concatenate(values).astype(float)[order]
            known = known[~np.isnan(known)]
            if len(known):
                means.setdefault(round, {})[f"{quantity}/{name}"] = float(known.mean())
    return means


def _bytes(traffic: Sequence[Mapping[str, Any]], end: str) -> float:
    """Bytes of the messages that a client is at this end of."""
    total = 0
    for block in traffic:
        sizes, ends = np.broadcast_arrays(block["bytes"], block[end])
        total += int(sizes[ends != SERVER].sum())
    return float(total)
