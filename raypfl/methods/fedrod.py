"""FedRoD: a generic head trained on a class-balanced loss, and a personal head on top of its logits.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022,
arXiv 2107.00778; the variant with linear personal heads (not the one with a hypernetwork). With
z = f(x; theta) and n_ik samples of class k at client i, both losses of a batch on one forward:

    L_g = CE( g(z; phi_g) + gamma log n_i, y )                    moves theta and phi_g (balanced softmax)
    L_p = CE( sg(g(z; phi_g)) + g(sg(z); phi_i), y )              moves phi_i alone

Global model: argmax g(z; phi_g). Personalised: argmax of g(z; phi_g) + g(z; phi_i). Both are reported before
training (PRE). The authors' repository has no code. As in PFLlib there is one learning rate and the personal
head starts as a copy of the generic one; against PFLlib, counts are those of all training samples, not of
one pass without its last batch, where a rare class may count 0 and give an infinite loss.
"""

# N clients, K clients of a cohort, C classes.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.methods.contract import AS_FEDAVG, Clients
from raypfl.methods.global_model import Down, GlobalModel, Up, private, upload
from raypfl.methods.requirements import require_fresh_momentum, require_linear_head
from raypfl.methods.start import common_start
from raypfl.training import (
    Batch,
    Cohort,
    Network,
    Rows,
    TrainingConfig,
    cross_entropy_per_sample,
    fit_two_heads,
)


class State(NamedTuple):
    """Held by a client."""

    personal: Tensor
    """The personal head, whose logits are added to the generic ones, `[N, head]`."""
    private: Tensor
    """Running statistics that do not travel, `[N, private]`; usually none."""


class Config(StrictModel):
    """Options of FedRoD."""

    name: Literal["fedrod"] = "fedrod"
    gamma: float = Field(1.0, ge=0.0, description="exponent of class counts in balanced softmax; paper: 1")
    personal_init: Literal["copy", "zero"] = Field(
        "copy", description="personal heads start as the generic one (PFLlib), or at zero"
    )


class FedRoD(GlobalModel[Config, State]):
    """(theta, phi_g) <- mean of LT on the balanced loss; phi_i fits what the generic logits leave over."""

    Config = Config
    state_type = State
    summary = "FedRoD: class-balanced generic head, personal head on top"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_linear_head(net, self.config.name)
        require_fresh_momentum(training, self.config.name)

    def cost(self) -> float:
        return AS_FEDAVG

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        personal = start[:, net.head].clone()
        if self.config.personal_init == "zero":
            personal.zero_()
        return State(personal, private(net, start))

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        prior_KC = log_prior(cohort.label_counts, self.config.gamma).to(net.dtype)
        start = self.global_model(net, state, down)
        fit = fit_two_heads(cohort, start, state.personal, two_losses, prior_KC)
        return State(fit.second, private(net, fit.w)), upload(net, fit.w)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """One model whose linear head is the sum of both heads, so its logits are the sum of theirs."""
        rows = super().personalised(net, state, down, up)
        rows[:, net.head] += state.personal
        return rows


def log_prior(label_counts_KC: Tensor, gamma: float) -> Tensor:
    """`gamma log n_ik`: float64 `[K, C]`, minus infinity for classes that a client lacks.

    An absent class then drops out of the normaliser; adding a small number to the counts would let it in.
    """
    log_KC = label_counts_KC.double().log()
    return torch.where(label_counts_KC > 0, gamma * log_KC, -torch.inf)


def two_losses(m: Rows, batch: Batch, personal: Tensor, prior_kC: Tensor) -> Tensor:
    """`L_g + L_p` of each client, `[k]`; no parameter gets gradients from both."""
    generic, own = m.logits_of_two(batch.x, personal, detach="other")
    balanced = cross_entropy_per_sample(generic + prior_kC[:, None], batch.y)
    residual = cross_entropy_per_sample(generic.detach() + own, batch.y)
    return batch.mean(balanced + residual)
