"""A run's figures on Ray's dashboard and its Prometheus endpoints."""

from __future__ import annotations

from ray.util.metrics import Gauge

from raypfl.watch import RunSeen, Watcher
from raypfl.watch.base import Figures

RUN = ("run", "method", "seed")

GAUGES = {
    "round": ("raypfl_round", "Last complete round."),
    "participants": ("raypfl_participants", "Clients that trained in the last round."),
    "clients_per_second": ("raypfl_clients_per_second", "Clients that trained, by seconds of the round."),
    "bytes/up": ("raypfl_upload_bytes", "Bytes that clients sent in the last round, to a server or peers."),
    "bytes/down": ("raypfl_download_bytes", "Bytes that clients received in the last round."),
    "seconds/round": ("raypfl_round_seconds", "Wall clock of the last round."),
    "seconds/server": ("raypfl_server_seconds", "Of these, in the server."),
    "seconds/evaluation": ("raypfl_evaluation_seconds", "Of these, in evaluation."),
}


class RayMetrics(Watcher):
    """Gauges `ray_raypfl_...` of the last complete round; Ray exports them from the driver's node."""

    def begin(self, run: RunSeen) -> None:
        """Register the gauges, for this run's label."""
        tags = {
            "run": run.name,
            "method": str(run.config["method"]["name"]),
            "seed": str(run.config["seed"]),
        }
        self._gauges = {name: Gauge(own, text, RUN) for name, (own, text) in GAUGES.items()}
        self._accuracy = Gauge(
            "raypfl_accuracy", "Mean test accuracy over clients, in [0, 1].", (*RUN, "model", "point")
        )
        for gauge in (*self._gauges.values(), self._accuracy):
            gauge.set_default_tags(tags)

    def figures(self, round: int, figures: Figures) -> None:
        """Set those that are gauges."""
        for name, value in figures.items():
            if name in self._gauges:
                self._gauges[name].set(value)
            elif name.startswith("accuracy/test/"):
                model, point = name.split("/")[2:]
                self._accuracy.set(value, {"model": model, "point": point})
