"""A run in Weights & Biases."""

from __future__ import annotations

import hashlib
from typing import Any

from raypfl.records.storage import is_remote
from raypfl.watch.base import Figures, RunSeen, Watcher
from raypfl.watch.config import WandbConfig


class Wandb(Watcher):
    """Figures over the round they belong to: their own axis, since PRE figures come a round later."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def begin(self, run: RunSeen) -> None:
        """Make the run, or go on with it."""
        import wandb

        self._run: Any = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            # Its own files are of this machine; in the run's folder where that is, too.
            dir=None if is_remote(run.folder) else run.folder,
            name=run.name,
            # The same for a run that is resumed, and for no other.
            id=hashlib.sha256(run.folder.encode()).hexdigest()[:16],
            resume="allow",
            config=dict(run.config),
            # Several runs may follow one another in this process.
            reinit="finish_previous",
        )
        self._run.define_metric("*", step_metric="round")

    def figures(self, round: int, figures: Figures) -> None:
        """Log them."""
        self._run.log({**figures, "round": round})

    def end(self, failed: bool) -> None:
        """Say how it ended."""
        self._run.finish(exit_code=int(failed))
