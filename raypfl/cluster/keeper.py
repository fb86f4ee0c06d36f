"""A process that keeps everything that a command leaves behind below itself.

`ray start` starts a node's daemons and ends. As their subreaper (prctl(2)), the keeper becomes the parent of
all that are left, of workers too, however they detach: the tree below it is the node, whole and exact. It
ends when nobody is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from raypfl.cluster.processes import Process, process

PR_SET_CHILD_SUBREAPER = 36


def keep(
    command: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> Process:
    """Start a command below a keeper of its own, which is nobody's child.

    Args:
        command: program and arguments.
        folder: where the keeper writes `keeper.pid` and, once the command has ended, `keeper.status`.
        env: the environment of both; None: as here.
        log: takes what they print; None: nobody does.
    """
    subprocess.run(
        [sys.executable, "-m", __spec__.name, str(folder), *command],
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if log is None else log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        check=True,
    )
    pid = int((folder / "keeper.pid").read_text())
    # One that has ended already is as good as any that no longer exists.
    return process(pid) or Process(pid, started=-1)


def exit_status(folder: Path, keeper: Process, seconds: float) -> int | None:
    """The exit status of the command, waited for; None if it does not end in time or the keeper is gone."""
    status, end = folder / "keeper.status", time.monotonic() + seconds
    while not status.is_file() and keeper.alive and time.monotonic() < end:
        time.sleep(0.05)
    return int(status.read_text()) if status.is_file() else None


def main(folder: Path, command: Sequence[str]) -> None:
    """Leave a process behind that runs the command and waits for what that leaves behind."""
    pid = os.fork()
    if pid:
        _write(folder / "keeper.pid", pid)
        return
    # A terminal's Ctrl-C is for whoever started the cluster.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    _write(folder / "keeper.status", subprocess.call(command))
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _write(path: Path, number: int) -> None:
    building = path.with_name(f".{path.name}")
    building.write_text(str(number))
    building.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
