"""What work is spent on, by name: functions say which phase they belong to, and a watcher may listen.

Without a watcher a marked function costs one look at a context variable more than a plain one. There is no
clock here: whoever wants seconds brings it (`raypfl.engine.phases`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Literal, ParamSpec, Protocol, TypeVar

Phase = Literal["distances", "qp", "mixing", "sampling", "messages", "other"]
"""Of a server's work."""
ClientPhase = Literal["batches", "forward", "backward", "optimizer", "evaluation"]
"""Of clients' work; batches of an evaluation count as batches."""
AnyPhase = Phase | ClientPhase

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Watcher(Protocol):
    """Is told when a phase begins and when it ends; phases may be inside one another."""

    def enter(self, phase: AnyPhase) -> None:
        """A phase begins."""

    def leave(self) -> None:
        """The phase that was entered last ends, also by an error."""


WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Who is told in this thread; None: nobody."""


def phase(name: AnyPhase) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Mark a function as work of a phase."""

    def mark(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def marked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            watcher = WATCHER.get()
            if watcher is None:
                return function(*args, **kwargs)
            watcher.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                watcher.leave()

        return marked

    return mark
