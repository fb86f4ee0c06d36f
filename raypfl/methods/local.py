"""Separate: every client trains alone. The baseline that personalisation has to beat (spec: Local).

Same as: FedAvg with one client; DiversiFed and FedAMP with lambda = 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.methods.contract import AS_FEDAVG, Clients, Method, Nothing, Plan
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, cross_entropy


class State(NamedTuple):
    """One row a client."""

    w: Tensor
    """The client's own model, `[N, width]`."""


class Config(StrictModel):
    """Separate has no options of its own."""

    name: Literal["local"] = "local"


class Local(Method[Config, Nothing, State, Nothing, Nothing]):
    """w_i <- LT(w_i) for participants; no messages."""

    Config = Config
    state_type = State
    norms_at_home = True
    summary = "Separate: every client trains alone"

    def cost(self) -> float:
        return AS_FEDAVG

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return torch.zeros_like(clients.ids)

    def init_hub(self, net: Network, clients: Clients) -> Nothing:
        return Nothing()

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(common_start(net, self.seed, len(clients.ids)))

    def download(self, net: Network, hub: Nothing, plan: Plan) -> Nothing:
        return Nothing()

    def local_update(self, cohort: Cohort, state: State, down: Nothing) -> tuple[State, Nothing]:
        return State(cohort.fit(state.w, cross_entropy).w), Nothing()

    def personalised(self, net: Network, state: State, down: Nothing, up: Nothing | None = None) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Nothing, up: Nothing, plan: Plan) -> Nothing:
        return hub
