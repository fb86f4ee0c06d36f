"""The process of one point: it reads what to measure, and writes what happens, one JSON object a line.

A process of its own has memory of its own to be counted, can be ended, and takes nobody with it if it dies.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from typing import Any

NO_MEMORY = ("can't allocate memory", "out of memory", "MemoryError")


def main() -> None:
    """Do what the first line of standard input says."""
    # Whatever else is printed here must not get between the lines.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    # Standard input stays open for as long as somebody waits for the answer.
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    # A share of the address space that is kept for data: allocating more is an error here, not elsewhere.
    limit = int(request["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def say(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    from raypfl.errors import RaypflError

    try:
        facts, rounds = _measure(request, lambda text: say(event="progress", text=text))
    except (RaypflError, MemoryError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        if any(words in text for words in NO_MEMORY):
            text = f"out of memory (at most {limit / 2**30:.1f} GiB were free): {text.splitlines()[0]}"
        elif not isinstance(error, RaypflError):
            raise
        say(event="failed", text=text)
        return
    say(event="done", facts=facts, rounds=rounds)


def _measure(request: dict[str, Any], progress: Any) -> Any:
    from raypfl.scaling.costs import measure_costs
    from raypfl.scaling.measure import Protocol, measure_rounds
    from raypfl.settings import RunConfig

    measure = measure_costs if request["measure"] == "costs" else measure_rounds
    config = RunConfig.model_validate(request["config"])
    return measure(config, Protocol(**request["protocol"]), progress)


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
