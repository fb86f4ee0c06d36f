"""A round's report from those of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from raypfl.engine.contract import RoundReport
from raypfl.engine.host import Report
from raypfl.engine.hub import Closing, Opening
from raypfl.engine.phases import together
from raypfl.engine.timing import columns_of_stays


class StepReport(NamedTuple):
    """What hub and hosts say of one step."""

    opening: Opening
    hosts: Sequence[Report]
    closing: Closing


def round_report(
    steps: Sequence[StepReport], *, clock: bool, over_hosts: Callable[[Iterable[float]], float]
) -> RoundReport:
    """All steps of a round together.

    Args:
        steps: in order.
        clock: whether there is a virtual clock.
        over_hosts: `sum` where hosts work one after another, `max` where at the same time.
    """
    records = _last([block for step in steps for report in step.hosts for block in report.clients])
    trained = [block["client"] for block in records if block["split"] == "train"]
    return RoundReport(
        records,
        [
            traffic
            for step in steps
            for traffic in (step.opening.traffic, *(own.traffic for own in step.hosts))
        ],
        _mean([step.opening.diagnostics for step in steps]),
        sum(map(len, trained)),
        sum(step.opening.seconds + step.closing.seconds for step in steps),
        sum(over_hosts(own.evaluation_seconds for own in step.hosts) for step in steps),
        sum(over_hosts(own.seconds for own in step.hosts) for step in steps),
        columns_of_stays([stay for step in steps for stay in step.closing.stays]) if clock else None,
        together(part.phases for step in steps for part in (step.opening, step.closing)) or None,
        [
            block
            for step in steps
            for pairs in (step.opening.pairs, *(own.pairs for own in step.hosts))
            for block in pairs
        ],
    )


def _last(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without blocks of clients that are recorded again in a later step."""
    kept = {}
    for block in blocks:
        clients = tuple(np.asarray(block["client"]).tolist())
        kept[block["round"], block["point"], block["model"], block["split"], clients] = block
    return list(kept.values())


def _mean(diagnostics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each number's mean over the steps that have it."""
    names = dict.fromkeys(name for own in diagnostics for name in own)
    found = {name: [own[name] for own in diagnostics if name in own] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
