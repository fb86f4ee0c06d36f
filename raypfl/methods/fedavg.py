"""FedAvg: the server averages the participants' locally trained models, weighted by their samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017. The reported model is the global one after aggregation. Running statistics
are averaged with the weights where they travel (`model.buffers: average`), else they stay at their client.
"""

from __future__ import annotations

from typing import Literal

from raypfl.config import StrictModel
from raypfl.methods.contract import Clients
from raypfl.methods.global_model import Down, GlobalModel, State, Up, private, upload
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, cross_entropy


class Config(StrictModel):
    """FedAvg has no options of its own."""

    name: Literal["fedavg"] = "fedavg"


class FedAvg(GlobalModel[Config, State]):
    """w <- sum_i pi_i LT(w)_i over participants, pi_i = n_i / sum n."""

    Config = Config
    state_type = State
    reported = ("global", "pre")
    summary = "FedAvg: one global model, the weighted mean of locally trained ones"

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(private(net, common_start(net, self.seed, len(clients.ids))))

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        w = cohort.fit(self.global_model(net, state, down), cross_entropy).w
        return State(private(net, w)), upload(net, w)
