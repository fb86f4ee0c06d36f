"""What a run shows while it goes on: a live bar on a terminal, one line a round elsewhere.

The only part of the library that prints. The driver tells a `Console` what happened; how it looks is decided
here.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from io import TextIOBase
from textwrap import wrap
from typing import NamedTuple, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from raypfl.records.grid import Grid, fitting, plain, width_of


class RunTitle(NamedTuple):
    """What the lines of one run begin with and count to."""

    name: str  # the method and the seed
    rounds: int  # to complete
    done: int = 0  # completed before this process (resume)
    figure: str = "personalised, post"  # which accuracy the console is given
    number: int = 1  # this run among `runs` of one configuration
    runs: int = 1
    folder: str = ""  # of its results; tells apart lines of several programs in one log

    @property
    def whole_name(self) -> str:
        """The folder and the run, which may be what the folder is called."""
        return self.folder if self.folder.endswith(self.name) else f"{self.folder} {self.name}".lstrip()


class Console:
    """Runs follow one another: `begin`, then `round` after each; `note` and `table` at any time.

    This base shows nothing, for a run that is a part of somebody's program.
    """

    def begin(self, title: RunTitle) -> None:
        """A run starts or continues."""

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        """A round is complete.

        Args:
            round: its number, from 1.
            seconds: wall clock, the whole round.
            clients: how many trained in it.
            accuracy: in [0, 1], uniform mean over clients; None if the round was not evaluated.
        """

    def note(self, text: str) -> None:
        """Say something (a checkpoint, a lost host, the command to resume)."""

    def table(self, grid: Grid) -> None:
        """Show a table."""

    def __enter__(self) -> Console:
        """Take the screen."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the screen as it was, also after an error."""


class Both(Console):
    """Two consoles that are told the same, such as a terminal and a log file."""

    def __init__(self, first: Console, second: Console) -> None:
        self._consoles = (first, second)

    def begin(self, title: RunTitle) -> None:
        """Tell both."""
        for console in self._consoles:
            console.begin(title)

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        """Tell both."""
        for console in self._consoles:
            console.round(round, seconds=seconds, clients=clients, accuracy=accuracy)

    def note(self, text: str) -> None:
        """Tell both."""
        for console in self._consoles:
            console.note(text)

    def table(self, grid: Grid) -> None:
        """Tell both."""
        for console in self._consoles:
            console.table(grid)


def console_for(stream: TextIO | None = None) -> Console:
    """A live console if the stream (standard output, unless given) is a terminal, else a plain one."""
    stream = sys.stdout if stream is None else stream
    return LiveConsole(Terminal(file=stream)) if stream.isatty() else PlainConsole(stream)


class PlainConsole(Console):
    """One line a round, for files, pipes and logs, each with its run and round."""

    def __init__(self, stream: TextIO | TextIOBase) -> None:
        self._stream = stream

    def begin(self, title: RunTitle) -> None:
        """Name the run."""
        self._pace = _Pace(title)
        resumed = f", resumed after round {title.done}" if title.done else ""
        self.note(f"{_counted(title, title.whole_name)}: {title.rounds} rounds{resumed}")

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        """Print the round's line."""
        title = self._pace.title
        self._pace.add(seconds, clients)
        parts = [
            title.whole_name,
            f"round {round}/{title.rounds}",
            *([] if accuracy is None else [f"accuracy {accuracy:.2%} ({title.figure})"]),
            f"{self._pace.clients_per_second:.1f} clients/s",
            f"ETA {self._pace.remaining(title.rounds - round)}",
        ]
        self.note("  ".join(parts))

    def note(self, text: str) -> None:
        """Print the text."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def table(self, grid: Grid) -> None:
        """Print the table as aligned text."""
        self.note(plain(grid))


class LiveConsole(Console):
    """A bar for each run, the running one live."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._progress = Progress(
            # Names are shown as they are: a bracket in one is not markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[accuracy]}", markup=False),
            TextColumn("{task.fields[speed]}"),
            console=terminal,
        )

    def begin(self, title: RunTitle) -> None:
        """Add the run's bar."""
        self._pace = _Pace(title)
        self._task: TaskID = self._progress.add_task(
            _counted(title, title.name), total=title.rounds, completed=title.done, accuracy="", speed=""
        )

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        """Move the bar."""
        title = self._pace.title
        self._pace.add(seconds, clients)
        left = self._pace.remaining(title.rounds - round)
        speed = f"{self._pace.clients_per_second:.1f} clients/s  ETA {left}"
        self._progress.update(self._task, completed=round, speed=speed)
        if accuracy is not None:
            self._progress.update(self._task, accuracy=f"{accuracy:.2%} ({title.figure})")

    def note(self, text: str) -> None:
        """Print the text above the bars."""
        self._terminal.print(Text(text))

    def table(self, grid: Grid) -> None:
        """Print the table above the bars, in parts where the terminal is too narrow for it."""
        for part in fitting(grid, self._terminal.width - 1, between=3):
            table = Table()
            for position, column in enumerate(zip(part.header, *part.rows, strict=True)):
                name = "\n".join(wrap(column[0], width_of(column), break_long_words=False))
                table.add_column(Text(name), justify="left" if position < part.words else "right")
            for row in part.rows:
                table.add_row(*map(Text, row))
            self._terminal.print(table)
        if grid.note:
            self._terminal.print(Text(grid.note))

    def __enter__(self) -> LiveConsole:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class _Pace:
    """Speed over the rounds of one run that this process has seen."""

    def __init__(self, title: RunTitle) -> None:
        self.title = title
        self._rounds = 0
        self._clients = 0
        self._seconds = 0.0

    def add(self, seconds: float, clients: int) -> None:
        self._rounds += 1
        self._clients += clients
        self._seconds += seconds

    @property
    def clients_per_second(self) -> float:
        return self._clients / self._seconds if self._seconds else 0.0

    def remaining(self, rounds: int) -> timedelta:
        """Time that so many rounds take, in whole seconds."""
        return timedelta(seconds=int(self._seconds / self._rounds * rounds))


def _counted(title: RunTitle, name: str) -> str:
    return f"[{title.number}/{title.runs}] {name}" if title.runs > 1 else name
