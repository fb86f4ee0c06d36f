"""Trials a minute of a sweep beside the same trials one after another in one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from raypfl.console import Console
from raypfl.errors import ConfigError, RaypflError
from raypfl.records.folder import RunFolder
from raypfl.records.grid import Grid
from raypfl.sweep.session import opened
from raypfl.workshop import Workshop

ONE_BY_ONE = "one by one, one process"
UNDER_TUNE = "raypfl sweep"

PROGRAMS = {
    ONE_BY_ONE: "import sys; from raypfl.sweep import bench; bench.one_by_one(sys.argv[1], sys.argv[2:])",
    UNDER_TUNE: "from raypfl.cli import main; import sys; sys.argv.insert(1, 'sweep'); main()",
}


def one_by_one(config: str, overrides: Sequence[str]) -> None:
    """Run every trial of a sweep in this process, the data set read once."""
    sweep = opened(Path(config), overrides, ())
    with Workshop(Console()) as workshop:
        for trial in sweep.examples:
            workshop.work(RunFolder.create(sweep.folder.path, trial.label), trial.config, trial.label, 1, 1)


def run(config: Path, overrides: Sequence[str], turns: int, console: Console) -> list[tuple[float, float]]:
    """Time whole commands, from start to end, in turn.

    Args:
        config: a sweep whose trials are known beforehand.
        overrides: of the sweep.
        turns: how often.
        console: shows the times.

    Returns:
        Seconds of both, one by one first, turn by turn.

    Raises:
        ConfigError: an override says where to.
        RaypflError: a command failed, with its words.
    """
    if any(override.startswith(("storage_path=", "name=")) for override in overrides):
        raise ConfigError(
            "bench sweep runs in temporary folders of its own: leave out storage_path and name."
        )
    count = len(opened(Path(config), overrides, ()).examples)
    times: list[tuple[float, float]] = []
    for turn in range(turns):
        # Each is first as often as the other.
        order = list(PROGRAMS) if turn % 2 == 0 else list(PROGRAMS)[::-1]
        seconds = {name: _seconds(PROGRAMS[name], config, overrides) for name in order}
        times.append((seconds[ONE_BY_ONE], seconds[UNDER_TUNE]))
    rows = tuple(
        (
            str(turn),
            f"{plain:.1f}",
            f"{swept:.1f}",
            f"{60 * count / plain:.2f}",
            f"{60 * count / swept:.2f}",
            f"{plain / swept:.2f}",
        )
        for turn, (plain, swept) in enumerate(times, 1)
    )
    console.table(
        Grid(
            ("turn", f"{ONE_BY_ONE} s", f"{UNDER_TUNE} s", "trials/min", "trials/min", "ratio"),
            rows,
            note=f"{config}: {count} trials; whole commands, start-up and tables included.",
        )
    )
    return times


def _seconds(program: str, config: Path, overrides: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="raypfl-bench-") as scratch:
        command = [sys.executable, "-c", program, str(config), *overrides, f"storage_path={scratch}"]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RaypflError(f"a command of the bench failed:\n{done.stderr.strip()[-2000:]}")
        return seconds
