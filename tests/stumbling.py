"""A model that blocks or raises in the middle of local training, in whatever process, when a test asks.

STUMBLE, in the environment of the process that trains, names a folder. A file `block` or `raise` there makes
one process stumble; the file holds how many training steps that process completes first. Who stumbles renames
the file to `claimed-<pid>`; a blocked process goes on when that file is gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

VARIABLE = "STUMBLE"

_steps = 0


class Net(nn.Module):
    """A small perceptron."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(torch.Size(input_shape).numel(), 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            _perhaps_stumble()
        return self.head(self.body(x.flatten(1)).relu())


def environment(folder: Path) -> dict[str, str]:
    """For a process that finds this module, and stumbles when it is asked to in `folder`."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(folder)}


def ask(folder: Path, what: str, after: int = 0) -> None:
    """Ask for one stumble, `block` or `raise`."""
    (folder / f".{what}").write_text(str(after))
    (folder / f".{what}").rename(folder / what)


def claimed(folder: Path, seconds: float = 240.0) -> Path:
    """Wait until a process stumbles; its claim, whose name ends in the process id."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for claim in folder.glob("claimed-*"):
            return claim
        time.sleep(0.01)
    raise TimeoutError(f"nobody stumbled within {seconds} s")


def pid_of(claim: Path) -> int:
    """Who stumbled."""
    return int(claim.name.rpartition("-")[2])


def _perhaps_stumble() -> None:
    global _steps
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    _steps += 1
    for what in ("block", "raise"):
        wish, claim = Path(folder, what), Path(folder, f"claimed-{os.getpid()}")
        try:
            if _steps <= int(wish.read_text()):
                continue
            wish.rename(claim)
        except FileNotFoundError:  # nobody asks, or another process was faster
            continue
        if what == "raise":
            raise RuntimeError("the model stumbled")
        while claim.exists():
            time.sleep(0.01)
