"""FedPer between peers: extractors are averaged with those of the peers that are heard, heads stay.

The own-server form of FedPer (Arivazhagan et al., arXiv 1912.00818) in the comparison of UA-PDFL, arXiv
2412.11674: `theta_i <- sum_j A_ij theta_j`, A by training samples; phi_i never leaves its peer. Extractor and
head are trained together, with one learning rate. `model.head` says where the personal layers begin.

Same as: `peer_fedavg` with no personal layer; `ua_pdfl` with tau = -1, mu = 0, bit for bit.
"""

from __future__ import annotations

from typing import Literal

from raypfl.methods.contract import Clients
from raypfl.methods.peers import Gossip, PeerConfig
from raypfl.methods.requirements import require_split
from raypfl.training import Network, TrainingConfig


class Config(PeerConfig):
    """FedPer between peers has no options of its own."""

    name: Literal["peer_fedper"] = "peer_fedper"


class PeerFedPer(Gossip[Config]):
    """Theta <- A Theta, Phi <- Phi; (theta_i, phi_i) <- LT(theta_i, phi_i)."""

    Config = Config
    summary = "FedPer without a server: peers average the extractors they hear, heads stay"
    kind = "extractor"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        super().check(net, clients, training)
        require_split(net, self.config.name)

    def published(self, net: Network) -> slice:
        return net.body
