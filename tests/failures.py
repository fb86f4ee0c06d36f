"""Storage that fails for a while, and a console that makes it so between rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raypfl.console import Console


class Notes(Console):
    """Keeps what it is told, and does something after a round."""

    def __init__(self, after: dict[int, Callable[[], None]] | None = None) -> None:
        self.texts: list[str] = []
        self.after = after or {}

    def note(self, text: str) -> None:
        self.texts.append(text)

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        self.after.pop(round, lambda: None)()


def break_down(run: Path) -> None:
    """Nothing can be written below the run any more."""
    for name in ("metrics", "checkpoints"):
        (run / name).rename(run / f"{name}-away")
        (run / name).write_text("in the way")


def repair(run: Path) -> None:
    for name in ("metrics", "checkpoints"):
        (run / name).unlink()
        (run / f"{name}-away").rename(run / name)
