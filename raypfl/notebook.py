"""What a run shows while it goes on in a notebook: one bar, which moves in place."""

from __future__ import annotations

import html
import sys
from typing import Any

from raypfl.console import Console, RunTitle
from raypfl.records.grid import Grid


def console_of_caller() -> Console:
    """A bar where the caller's output is a notebook, else a console that shows nothing."""
    return NotebookConsole() if in_notebook() else Console()


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. Nothing is imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class Bar:
    """The state of one run, as HTML and as text."""

    def __init__(self, title: RunTitle) -> None:
        self.title = title
        self.round = title.done
        self.accuracy: float | None = None

    @property
    def words(self) -> str:
        """What stands beside the bar."""
        title = self.title
        which = f"[{title.number}/{title.runs}] {title.name}" if title.runs > 1 else title.name
        accuracy = "" if self.accuracy is None else f"  {self.accuracy:.2%} ({title.figure})"
        return f"{which}  round {self.round}/{title.rounds}{accuracy}"

    def __repr__(self) -> str:
        return self.words

    def _repr_html_(self) -> str:
        words, rounds = html.escape(self.words), self.title.rounds
        return f'<progress max="{rounds}" value="{self.round}" aria-label="{words}"></progress> {words}'


class NotebookConsole(Console):
    """A bar for each run; the table at the end is the result's, which the notebook shows by itself."""

    def begin(self, title: RunTitle) -> None:
        """Show the run's bar."""
        from IPython.display import display

        self._bar = Bar(title)
        self._handle: Any = display(self._bar, display_id=True)  # type: ignore[no-untyped-call]

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        """Move the bar."""
        self._bar.round = round
        self._bar.accuracy = self._bar.accuracy if accuracy is None else accuracy
        self._handle.update(self._bar)

    def note(self, text: str) -> None:
        """Show the text below the bars."""
        from IPython.display import display

        display({"text/plain": text}, raw=True)  # type: ignore[no-untyped-call]

    def table(self, grid: Grid) -> None:
        """Show nothing."""
