"""FedAvg between peers: each one averages whole models of those it hears with its own.

The own-server form of FedAvg (McMahan et al., AISTATS 2017) in the comparison of UA-PDFL, arXiv 2412.11674:

    w_i <- sum_j A_ij w_j,  A_ij = n_j / sum over peers heard and i itself;   w_i <- LT(w_i)

Other weights with `topology.weights`. Optimizer memory is `training.momentum_state` (the released code keeps
it). Reported: after mixing, before training (PRE).

Same as: FedAvg with a server where everyone hears everyone and takes part; Separate where nobody hears
anybody.
"""

from __future__ import annotations

from typing import Literal

from raypfl.methods.peers import Gossip, PeerConfig
from raypfl.training import Network


class Config(PeerConfig):
    """FedAvg between peers has no options of its own."""

    name: Literal["peer_fedavg"] = "peer_fedavg"


class PeerFedAvg(Gossip[Config]):
    """W <- LT(A W)."""

    Config = Config
    summary = "FedAvg without a server: peers average the models they hear"
    kind = "full"

    def published(self, net: Network) -> slice:
        return net.shared
