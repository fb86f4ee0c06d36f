"""FedAvg: the server averages the participants' locally trained models, weighted by their samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017. The reported model is the global one after aggregation. Running statistics
are averaged with the weights where they travel (`model.buffers: average`), else they stay at their client.
"""

# S participants, K clients of a cohort.

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Method, Plan
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, cross_entropy


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The global model's parameters, `[1, P]`."""
    statistics: Tensor
    """Its running statistics, where they travel, `[1, b]`."""


class State(NamedTuple):
    """Held by a client."""

    private: Tensor
    """Running statistics that do not travel, `[N, private]`; usually none."""


class Down(NamedTuple):
    """To a participant."""

    w: Tensor
    """The global model, the same for everyone, `[1, P]`."""
    statistics: Tensor
    """Its running statistics, where they travel, `[1, b]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The locally trained model, `[K, P]`."""
    statistics: Tensor
    """Its running statistics, where they travel, `[K, b]`."""


class Config(StrictModel):
    """FedAvg has no options of its own."""

    name: Literal["fedavg"] = "fedavg"


class FedAvg(Method[Config, Hub, State, Down, Up]):
    """w <- sum_i pi_i LT(w)_i over participants, pi_i = n_i / sum n."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"w", "statistics"})
    reported = ("global", "pre")
    summary = "FedAvg: one global model, the weighted mean of locally trained ones"

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        start = common_start(net, self.seed)
        return Hub(start[:, net.weights].clone(), start[:, net.travelling].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(common_start(net, self.seed, len(clients.ids))[:, net.private].clone())

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w, hub.statistics)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        w = cohort.fit(net.assemble(*down, *state), cross_entropy).w
        return State(w[:, net.private].clone()), Up(w[:, net.weights].clone(), w[:, net.travelling].clone())

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return net.assemble(*(down if up is None else up), *state)

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(*down, *state)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(weighted_mean(plan.sizes, up.w), weighted_mean(plan.sizes, up.statistics))
