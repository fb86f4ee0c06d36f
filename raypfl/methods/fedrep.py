"""FedRep: each client first fits its own head to the shared extractor, then the extractor to that head.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, arXiv 2102.07078. Client: `head_epochs` passes over the head alone, then `body_epochs` over the
extractor alone; each phase has an optimizer of its own, so what is frozen sees neither momentum nor weight
decay (the authors' release keeps one optimizer for both phases; there a frozen head can go on moving). The
release weights clients by samples on FEMNIST and Sent140 and equally on CIFAR and MNIST: `aggregation`.
The reported model is the newest extractor with the client's head, before training (PRE).

Not done: the release's extra last round that fine-tunes every head for max(10, head_epochs) epochs, and its
weight decay that leaves out biases (ours, where it is set, has none left out).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.errors import ConfigError
from raypfl.methods.contract import Clients, Plan
from raypfl.methods.split import Hub, SharedExtractor, Up
from raypfl.training import (
    Batch,
    Cohort,
    Network,
    Rows,
    TrainingConfig,
    cross_entropy,
    cross_entropy_per_sample,
)


class Config(StrictModel):
    """Options of FedRep; `training.epochs` is not read, each phase has its own."""

    name: Literal["fedrep"] = "fedrep"
    head_epochs: int = Field(10, ge=0, description="tau_h, passes over the head; release, CIFAR: 10")
    body_epochs: int = Field(
        1, ge=0, description="tau_r, passes over the extractor; release: 1, with 5 classes of CIFAR-100 5"
    )
    aggregation: Literal["size", "uniform"] = Field(
        "size", description="weights of clients; release: size on FEMNIST, Sent140, uniform on CIFAR, MNIST"
    )
    features: Literal["auto", "kept", "fresh"] = Field(
        "auto",
        description="head phase on features computed once a round, or at every step; auto: once, except with "
        "batch normalisation, dropout or changed images, where it would not be the same",
    )


class FedRep(SharedExtractor[Config]):
    """phi_i <- argmin_phi F_i(theta, phi), tau_h epochs; theta_i <- SGD(F_i(., phi_i)); theta <- mean."""

    Config = Config
    summary = "FedRep: shared extractor, personal heads, trained one after the other"
    variants = {"fresh": {"features": "fresh"}}

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        super().check(net, clients, training)
        if self.config.head_epochs == self.config.body_epochs == 0:
            raise ConfigError(
                "method.head_epochs and method.body_epochs are both 0: nothing would be trained."
            )
        differ = net.coupled or net.random or training.augment is not None
        if self.config.features == "kept" and differ:
            raise ConfigError(
                "method.features = 'kept', but features differ from step to step with batch normalisation, "
                "dropout or training.augment. Use 'auto' or 'fresh'."
            )

    def passes(self, training: TrainingConfig, samples: int) -> float:
        return self.config.head_epochs + self.config.body_epochs

    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        net, config = cohort.net, self.config
        if config.head_epochs:
            fresh = config.features == "fresh" or cohort.features_differ
            phase, objective = (cohort, cross_entropy) if fresh else (cohort.on_features(w), on_features)
            fit = phase.fit(w, objective, epochs=config.head_epochs, columns=net.head, purpose="head batches")
            w, cohort.losses = fit.w, phase.losses
        if config.body_epochs:
            w = cohort.fit(w, cross_entropy, epochs=config.body_epochs, columns=net.extractor).w
        return w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        equal = self.config.aggregation == "uniform"
        return Hub(weighted_mean(torch.ones_like(plan.sizes) if equal else plan.sizes, up.body))


def on_features(m: Rows, batch: Batch) -> Tensor:
    """Mean cross-entropy of each head on a batch of features, `[K]`."""
    return batch.mean(cross_entropy_per_sample(m.classify(batch.x), batch.y))
