"""A run in MLflow."""

from __future__ import annotations

import time
from typing import Any

from raypfl.watch.base import Figures, RunSeen, Watcher
from raypfl.watch.config import MlflowConfig

TAG = "raypfl.run"
"""By which a resumed run finds itself again."""

LONGEST_VALUE = 500
"""Characters of a parameter that every MLflow server takes."""


class Mlflow(Watcher):
    """Parameters, metrics and status through a client of its own, beside whatever run a program has open."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config

    def begin(self, run: RunSeen) -> None:
        """Make the run, or find it again."""
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=self._config.tracking_uri)
        found = self._client.get_experiment_by_name(self._config.experiment)
        experiment = (
            self._client.create_experiment(self._config.experiment) if found is None else found.experiment_id
        )
        quoted = run.folder.replace("'", "\\'")
        same = (
            self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{quoted}'")
            if run.done
            else []
        )
        if same:
            self._id = same[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=run.name, tags={TAG: run.folder}).info.run_id
        for key, value in _leaves(run.config):
            self._client.log_param(self._id, key, str(value)[:LONGEST_VALUE])

    def figures(self, round: int, figures: Figures) -> None:
        """Log them, in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, round) for name, value in figures.items()]
        )

    def end(self, failed: bool) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and their values."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found
