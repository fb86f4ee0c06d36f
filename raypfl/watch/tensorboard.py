"""Event files that TensorBoard shows."""

from __future__ import annotations

import time
from typing import Any

import yaml

from raypfl.watch.base import Figures, RunSeen, Watcher
from raypfl.watch.config import TensorboardConfig


class Tensorboard(Watcher):
    """Scalars by name, with the round as step. A resumed run covers what was written past its checkpoint."""

    def __init__(self, config: TensorboardConfig) -> None:
        self._config = config

    def begin(self, run: RunSeen) -> None:
        """Open the files."""
        from tensorboardX import SummaryWriter

        folder = self._config.folder
        where = f"{run.folder}/tensorboard" if folder is None else f"{folder}/{run.name}"
        # Files are named by the second: without this a run resumed within one would overwrite its own.
        suffix = f".{time.time_ns()}"
        purge = run.done + 1 if run.done else None
        self._writer: Any = SummaryWriter(where, purge_step=purge, filename_suffix=suffix)
        self._writer.add_text(
            "config", f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False)}```", run.done
        )

    def figures(self, round: int, figures: Figures) -> None:
        """Write them."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round)

    def end(self, failed: bool) -> None:
        """Close the files."""
        self._writer.close()
