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
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main(status: Path, command: list[str]) -> None:
    """Run a command, write its exit status, and wait for what it leaves behind.

    Args:
        status: the file that is to have the exit status, once the command has ended.
        command: program and arguments.
    """
    # A terminal's Ctrl-C is for whoever started the cluster.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    code = subprocess.call(command)
    building = status.with_suffix(".part")
    building.write_text(str(code))
    building.rename(status)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
