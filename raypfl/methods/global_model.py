"""What methods share in which the server keeps one global model, the mean of what participants return.

Parameters and running statistics are fields of their own, in the server's state and in messages. Statistics
travel under `model.buffers: average`; under `local` their fields are empty, and every client keeps its own.
"""

# S participants, K clients of a cohort, P parameters, b running statistics that travel.

from __future__ import annotations

from typing import ClassVar, NamedTuple, TypeVar

from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Method, Model, Plan, Point, same_for_all
from raypfl.methods.start import common_start
from raypfl.training import Network


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The global model's parameters, `[1, P]`."""
    statistics: Tensor
    """Its running statistics, where they travel, `[1, b]`."""


class State(NamedTuple):
    """Held by a client that keeps nothing else."""

    private: Tensor
    """Running statistics that do not travel, `[N, private]`; usually none."""


class Down(NamedTuple):
    """To a participant; the same for everyone."""

    w: Tensor
    """The global model's parameters, `[1, P]`."""
    statistics: Tensor
    """Its running statistics, where they travel, `[1, b]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The locally trained parameters, `[K, P]`."""
    statistics: Tensor
    """The running statistics, where they travel, `[K, b]`."""


ConfigT = TypeVar("ConfigT", bound=StrictModel)
StateT = TypeVar("StateT", bound=tuple[Tensor, ...])


class GlobalModel(Method[ConfigT, Hub, StateT, Down, Up]):
    """w <- sum_i beta_i w_i over participants, beta_i = n_i / sum n, and so the statistics that travel.

    The last field of a client's state is `private`, the running statistics that do not travel.
    """

    hub_type = Hub
    norms_at_home = True
    shared = frozenset({"w", "statistics"})
    reported: ClassVar[tuple[Model, Point]] = ("personalised", "pre")

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.shared.stop)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        start = common_start(net, self.seed)
        return Hub(start[:, net.shared_weights].clone(), start[:, net.travelling].clone())

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(*hub)

    def personalised(self, net: Network, state: StateT, down: Down, up: Up | None = None) -> Tensor:
        return net.assemble(*(down if up is None else up), state[-1])

    def global_model(self, net: Network, state: StateT, down: Down) -> Tensor:
        return net.assemble(*down, state[-1])

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(weighted_mean(plan.sizes, up.w), weighted_mean(plan.sizes, up.statistics))


def upload(net: Network, w: Tensor) -> Up:
    """What travels of trained rows `[K, width]`."""
    return Up(w[:, net.shared_weights].clone(), w[:, net.travelling].clone())


def private(net: Network, w: Tensor) -> Tensor:
    """What stays at home of rows `[K, width]`: `[K, private]`."""
    return w[:, net.private].clone()
