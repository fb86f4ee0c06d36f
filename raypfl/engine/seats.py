"""Which node each actor goes to: Ray's own choice, a placement group of this run, or the one it is in."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypfl.engine.placement import Placement, node_of_server, nodes_alive
from raypfl.errors import PlacementError

NODE = "ray.io/node-id"
"""The label that Ray gives every node."""

ANY_BUNDLE = -1


class Seats:
    """Places for the hub and the hosts of a placement.

    In a placement group (a trial of Ray Tune) its bundles are the places, whatever is asked for. Elsewhere a
    run that asks for places gets a group of its own: one bundle for the server and one for each host, all or
    none of them; a run that does not leaves every actor to Ray.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._around = get_current_placement_group()
        self._own: PlacementGroup | None = None

    @property
    def reserved(self) -> bool:
        """Whether places are held for actors that may not have started."""
        return self._own is not None

    def take(self, seconds: float) -> None:
        """Reserve the places, if that has not been done and is asked for.

        Raises:
            PlacementError: they are not free within so many seconds.
        """
        ask = self._placement
        if self._own is not None or self._around is not None or (ask.hosts, ask.server) == ("any", "any"):
            return
        servers = ask.num_servers
        labels: list[dict[str, str]] = [{} for _ in range(servers + ask.num_hosts)]
        if ask.server != "any":
            assert servers == 1, "the configuration refuses several servers with a place of their own"
            node = node_of_server(ask, nodes_alive())
            if node is None:
                raise PlacementError(
                    f"the run asks for {ask.request()}, and no node has room for the server."
                )
            labels[0] = {NODE: node.id}
            if ask.server == "beside":
                labels[1] = {NODE: node.id}
            else:
                labels[1:] = [{NODE: f"!{node.id}"}] * ask.num_hosts
        server, host = _bundle(ask.server_cpus, ask.server_gpus), _bundle(ask.host_cpus, ask.host_gpus)
        self._own = placement_group(
            [*[server] * servers, *[host] * ask.num_hosts],
            "SPREAD" if ask.hosts == "spread" else "PACK",
            bundle_label_selector=labels if ask.server != "any" else None,
        )
        if not self._own.wait(seconds):
            self.give_back()
            raise PlacementError(
                f"the places of this run were not free within {seconds:g} s. It asks for {ask.request()}"
                f"{_free()} Another job may hold the rest: wait for it, lower engine.num_actors, or let Ray "
                "choose with resources.hosts=any resources.server=any."
            )

    def server(self, number: int) -> dict[str, Any]:
        """Options of a hub's actor."""
        # Several hubs are there because one node has no room for them.
        apart = {"scheduling_strategy": "SPREAD"} if self._placement.num_servers > 1 else {}
        return self._seat(number) or apart

    def host(self, number: int) -> dict[str, Any]:
        """Options of a host's actor."""
        return self._seat(self._placement.num_servers + number)

    def give_back(self) -> None:
        """Release what was reserved; actors that are still there end."""
        if self._own is not None:
            remove_placement_group(self._own)
            self._own = None

    def _seat(self, bundle: int) -> dict[str, Any]:
        if self._own is not None:
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._own, bundle)}
        if self._around is not None:
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._around, ANY_BUNDLE)}
        return {}


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    # A bundle cannot ask for nothing, and every node has a byte.
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount} or {"memory": 1}


def _free() -> str:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"; free are {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU."
