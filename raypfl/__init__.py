"""raypfl: a simulator for personalised federated learning, on a laptop or a Ray cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypfl.experiment import plan, resume, run
    from raypfl.report.comparison import compare
    from raypfl.result import Result

__all__ = ["Result", "compare", "plan", "resume", "run"]

_HOMES = {"Result": "raypfl.result", "compare": "raypfl.report.comparison"}


def __getattr__(name: str) -> object:
    """Load the engine room when it is first asked for, so that `import raypfl` is instant (PEP 562)."""
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "raypfl.experiment")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
