"""FedPer: all layers but the last few are shared; the last ones are each client's own.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, arXiv 1912.00818. Any
number of personal layers: they begin where `model.head` says (by default the last linear layer, as in the
comparisons of FedTC and FedPAC); their running statistics stay at their client with them. Extractor and head
are trained together, with one learning rate. All heads start from the common initialisation, as libraries do;
the paper's own start is not fixed by what could be read. The reported model is the newest extractor
with the client's head, before training (PRE).

Same as: FedAvg with no personal layer; Separate with personal layers only.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from raypfl.config import StrictModel
from raypfl.methods.split import SharedExtractor
from raypfl.training import Cohort, cross_entropy


class Config(StrictModel):
    """FedPer has no options of its own; `model.head` says where the personal layers begin."""

    name: Literal["fedper"] = "fedper"


class FedPer(SharedExtractor[Config]):
    """(theta_i, phi_i) <- LT(theta, phi_i); theta <- sum_i beta_i theta_i."""

    Config = Config
    summary = "FedPer: shared extractor, personal last layers, trained together"

    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        return cohort.fit(w, cross_entropy).w
