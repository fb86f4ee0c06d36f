"""FedAMP: attentive message passing; clients with similar models attract each other.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI
2021. Minimises `sum_i F_i(w_i) + lam sum_{i<j} (1 - exp(-||w_i - w_j||^2 / sigma))` by the same alternation
as DiversiFed, with attraction only. `attention: heuristic` is the paper's HeurFedAMP for deep networks.

As in the paper, the weights leave out the factor 2 of the exact derivative, so that a fixed point solves the
objective with lam / 2 in place of lam, whatever alpha is. Two choices are not in the paper: the row sums of
the exact weights can be capped (`max_pull`; with models closer than sigma they exceed 1 by far), and the
decay of alpha stops where lam / alpha reaches 1, before models freeze. Heuristic weights do not contain
alpha: with them, set `rho`, or `lam / alpha` leaves hardly any attraction.
"""

# S participants, P parameters.

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import all_rows_equal, pairwise_distances, pairwise_similarities
from raypfl.config import StrictModel
from raypfl.methods.published import Anchored


class Config(StrictModel):
    """Options of FedAMP; defaults of the authors' lab for CIFAR-10, with a constant alpha."""

    name: Literal["fedamp"] = "fedamp"
    attention: Literal["exact", "heuristic"] = Field(
        "exact", description="weights from distances, or from angles"
    )
    lam: float = Field(
        1.0, ge=0.0, description="lambda, weight of the attention term; 0 is Separate (lab: 1)"
    )
    alpha: float = Field(
        1e4, ge=0.0, description="server step size (lab: 1e4); 0 leaves anchors at the uploads"
    )
    sigma: float = Field(100.0, gt=0.0, description="width of the attention function (lab: 100)")
    alpha_decay: float = Field(1.0, gt=0.0, le=1.0, description="factor on alpha (lab: 0.1)")
    decay_every: int = Field(30, ge=1, description="rounds between two decays of alpha (lab: 30)")
    max_pull: float | None = Field(
        None, gt=0.0, description="cap on the row sums of exact weights; not from the paper"
    )
    kappa: float = Field(10.0, gt=0.0, description="heuristic: sharpness of the softmax over cosines")
    self_weight: float = Field(0.5, ge=0.0, le=1.0, description="heuristic: the weight of the own model")
    rho: float | None = Field(None, ge=0.0, description="proximal weight in place of lam / alpha")


class FedAMP(Anchored[Config]):
    """w_i <- argmin F_i(w) + lam/(2 alpha) ||w - u_i||^2, U = C W with c falling with distance."""

    Config = Config
    summary = "FedAMP: similar models attract each other"

    def alpha(self, round: int) -> float:
        """alpha_t: decayed every `decay_every` rounds, not below lam."""
        config = self.config
        decayed = config.alpha * config.alpha_decay ** ((round - 1) // config.decay_every)
        return max(decayed, min(config.lam, config.alpha))

    def rho(self, round: int) -> float:
        config = self.config
        if config.rho is not None:
            return config.rho
        alpha = self.alpha(round)
        return config.lam / alpha if alpha > 0 else config.lam

    def attraction(self, w_SP: Tensor, round: int) -> Tensor:
        config = self.config
        if all_rows_equal(w_SP):
            return w_SP.new_zeros(len(w_SP), len(w_SP), dtype=torch.float64)
        if config.attention == "heuristic":
            return heuristic_attraction(pairwise_similarities(w_SP), config.kappa, config.self_weight)
        return exact_attraction(pairwise_distances(w_SP), self.alpha(round), config.sigma, config.max_pull)


def exact_attraction(
    distance_SS: Tensor, alpha: float, sigma: float, max_pull: float | None = None
) -> Tensor:
    """`a_ij = alpha/sigma exp(-d_ij^2 / sigma)`, zero on the diagonal; symmetric if not capped."""
    a_SS = (alpha / sigma * torch.exp(-distance_SS.square() / sigma)).fill_diagonal_(0.0)
    if max_pull is None:
        return a_SS
    return a_SS * (max_pull / a_SS.sum(1, keepdim=True).clamp_min(max_pull))


def heuristic_attraction(cosine_SS: Tensor, kappa: float, self_weight: float) -> Tensor:
    """`c_ij = (1 - c_ii) softmax_{j != i}(kappa cos(w_i, w_j))`, zero on the diagonal: float64 `[S, S]`."""
    logits_SS = (kappa * cosine_SS).fill_diagonal_(-torch.inf)
    return (1.0 - self_weight) * logits_SS.softmax(1)
