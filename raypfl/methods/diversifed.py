"""DiversiFed: pull similar clients together and push dissimilar ones apart, in parameter space.

Reference: DiversiFed, arXiv 2407.15464. The server takes one gradient step on a loss between models, each
client then solves a proximal problem around the point it was given. The text that could be read lacks its
formulas; what is implemented is a reconstruction that keeps Lemma 1 (a linear combination whose
coefficients fall with distance and turn negative beyond a threshold) and was chosen by fit to the
printed numbers:

    R_i = mean_{j != i} d_ij - log sum_{k != i} exp(tau d_ik)            form `net` (default)
    R_i = tau mean_{j != i} d_ij - log sum_{k != i} exp(tau d_ik)        form `balanced`

with `d_ij = ||w_i - w_j||`. Server: `w~_i = w_i - eta dR_i/dw_i`. Client: `F_i(w) + rho/2 ||w - w~_i||^2`
from its own `w_i`, with `rho = lam / eta`, for which a fixed point solves the stated objective
`F_i + lam R_i` for every eta.
"""

# K participants, P parameters.

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import all_rows_equal, pairwise_distances, rows_of
from raypfl.config import StrictModel
from raypfl.methods.contract import Plan
from raypfl.methods.published import Anchored, Down, Hub
from raypfl.training import Network


class Config(StrictModel):
    """Options of DiversiFed; the paper's server step and lambda are lost, these are the fitted defaults."""

    name: Literal["diversifed"] = "diversifed"
    tau: float = Field(
        0.5,
        gt=0.0,
        le=10.0,
        description="temperature of distances; paper: 0.5 to 1.1, best value falls with alpha",
    )
    eta: float = Field(1.0, gt=0.0, description="server step size (reconstructed)")
    lam: float = Field(
        1.0, ge=0.0, description="lambda, weight of the distance loss; 0 is Separate (reconstructed)"
    )
    form: Literal["net", "balanced"] = Field("net", description="tau in the denominator only, or in both")
    coupling: Literal["own", "joint"] = Field(
        "own", description="gradient of R_i alone, or of the sum of all R"
    )
    reduction: Literal["mean", "sum"] = Field("mean", description="over the other clients in R_i")
    distance: Literal["plain", "squared"] = Field("plain", description="Euclidean distance or its square")
    distance_scale: Literal["none", "median", "rms"] = Field(
        "none", description="divides distances inside the softmax; not from the paper"
    )
    max_pull: float | None = Field(
        None, gt=0.0, description="shrinks all forces so that no row's sum exceeds this; not from the paper"
    )


class DiversiFed(Anchored[Config]):
    """w_i <- argmin F_i(w) + lam/(2 eta) ||w - w~_i||^2, W~ = C W with c falling with distance."""

    Config = Config
    summary = "DiversiFed: pull similar and push dissimilar models"

    def attraction(self, w_SP: Tensor, round: int) -> Tensor:
        if all_rows_equal(w_SP):
            return w_SP.new_zeros(len(w_SP), len(w_SP), dtype=torch.float64)
        return attraction(pairwise_distances(w_SP), self.config, self.config.eta)

    def rho(self, round: int) -> float:
        return self.config.lam / self.config.eta

    def diagnose(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, float]:
        """As of all anchored methods, and `farthest`: how many models share the push, exp(entropy of p_i)."""
        found = super().diagnose(net, hub, plan, down)
        if found:
            p_SS = farness(pairwise_distances(rows_of(hub.w, plan.ids)), self.config)
            found["farthest"] = float(torch.special.entr(p_SS).sum(1).exp().mean())
        return found


def attraction(distance_KK: Tensor, config: Config, eta: float) -> Tensor:
    """`A` with `a_ij = eta f_ij / d_ij`, the weights of `w_j - w_i` in one server step.

    With `p_ij = softmax_{k != i}(tau d_ik)` at j (farther is larger) and n other clients:
    `f_ij = 1/n - tau p_ij` (net) or `tau (1/n - p_ij)` (balanced); positive attracts. Coincident models
    exert no force on each other.

    Args:
        distance_KK: plain distances between distinct models, float64 `[K, K]`.
        config: form, coupling, reduction and distance.
        eta: server step size; 0 gives no movement.

    Returns:
        float64 `[K, K]`, zero on the diagonal.
    """
    others = len(distance_KK) - 1
    if others == 0:
        return torch.zeros_like(distance_KK)
    nearest = _nearest(distance_KK)
    p_KK = farness(distance_KK, config)
    mean_pull = 1.0 if config.form == "net" else config.tau
    force_KK = mean_pull / others - config.tau * p_KK
    if config.coupling == "joint":
        force_KK = force_KK + force_KK.T
    if config.distance == "squared":
        slope_KK = torch.full_like(distance_KK, 2.0)
    else:
        slope_KK = 1.0 / distance_KK.clamp_min(nearest)
    a_KK = eta * force_KK * slope_KK * (others if config.reduction == "sum" else 1)
    a_KK = a_KK.masked_fill(distance_KK <= nearest, 0.0)
    if config.max_pull is not None:
        a_KK = a_KK * (config.max_pull / a_KK.sum(1).max().clamp_min(config.max_pull))
    return a_KK


def farness(distance_KK: Tensor, config: Config) -> Tensor:
    """`p_ij = softmax_{k != i}(tau d_ik)` at j, or of squared distances: farther is larger, `[K, K]`."""
    measure_KK = distance_KK.square() if config.distance == "squared" else distance_KK
    apart = measure_KK[distance_KK > _nearest(distance_KK)]
    logits_KK = config.tau * measure_KK / _scale(apart, config.distance_scale)
    return logits_KK.fill_diagonal_(-torch.inf).softmax(1)


def _nearest(distance_KK: Tensor) -> Tensor:
    """Distances up to this one are rounding: the models coincide."""
    return 1e-6 * distance_KK.max() + 1e-12


def _scale(measures: Tensor, kind: str) -> Tensor | float:
    """A typical one of these measures; those of coincident models are left out, they could make it zero."""
    if kind == "none":
        return 1.0
    return measures.median() if kind == "median" else measures.square().mean().sqrt()
