"""How somebody outside looks on at a run: hears its scores, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypfl.records.statistics import ClientStatistics, client_statistics


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Supervisor:
    """What a driver is asked to tell, and asks."""

    stopping: Callable[[], bool] = _never
    """Asked after every round; true means a checkpoint and a stop, as Ctrl-C does."""
    evaluated: Callable[[int, Mapping[str, ClientStatistics]], None] | None = None
    """Told a round and its statistics by split (validation, test), once the round's records are on disk."""
    view: tuple[str, str] | None = None
    """The (model, point) that `evaluated` hears of; None for the one that the method's papers report."""


def statistics_of(
    records: Sequence[Mapping[str, Any]], view: tuple[str, str]
) -> dict[int, dict[str, ClientStatistics]]:
    """Statistics over clients of one (model, point), by round and split.

    Args:
        records: blocks of client records by column, as engines report them.
        view: the model and the point.
    """
    blocks: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for block in records:
        if (block["model"], block["point"]) == view and block["split"] != "train":
            blocks.setdefault((int(block["round"]), str(block["split"])), []).append(block)
    found: dict[int, dict[str, ClientStatistics]] = {}
    for (round, split), same in blocks.items():
        columns = {
            name: np.concatenate([np.atleast_1d(block[name]) for block in same])
            for name in ("client", "accuracy", "loss", "samples")
        }
        order = np.argsort(columns["client"])
        values = (columns[name][order] for name in ("accuracy", "loss", "samples"))
        found.setdefault(round, {})[split] = client_statistics(*values)
    return dict(sorted(found.items()))
