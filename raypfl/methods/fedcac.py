"""FedCAC: parameters that matter to a client are averaged with similar clients only, the rest with all.

Wu, Liu, Niu, Wang, Tang, Zhu: Bold but Cautious: Unlocking the Potential of Personalized Federated Learning
through Cautiously Aggressive Collaboration, ICCV 2023. A parameter is critical to a client if its last local
training changed it much where it is large, `|(w - w_start) * w|`, among those of its tensor. Clients whose
critical parameters coincide collaborate on them; the threshold for that rises over rounds.

Chosen here: exactly floor(r * size) critical entries a tensor, equal sensitivities by their place (the
authors' code takes all entries from the k-th largest on, so its masks may be larger). The server combines and
sends one model, knowing the client's mask. It combines the participants of a round when their uploads are in,
and who does not take part keeps its model. Running statistics stay at their client. Evaluated after local
training.
"""

# S participants, K clients of a cohort, P parameters, B bytes of packed masks.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import (
    largest,
    mix,
    overlaps,
    pack_bits,
    replace_rows,
    rows_of,
    unpack_bits,
    weighted_mean,
)
from raypfl.config import StrictModel
from raypfl.methods.contract import AS_FEDAVG, Clients, Method, Pairs, Plan, every_pair, same_for_all
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, cross_entropy

SLACK = 1e-12
"""Rounding of the mean overlap; overlaps that differ do so by at least one parameter of all."""


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The model each client starts its next training from, `[N, P]`: as combined after its last one."""
    ids: Tensor
    """The participants of the last round, ascending, int64 `[1, S]`."""
    overlap: Tensor
    """O, the share of a participant's critical parameters that are another's, too; float64 `[1, S, S]`."""
    together: Tensor
    """B, who shared critical parameters with whom, bool `[1, S, S]`."""


class State(NamedTuple):
    """Held by a client."""

    w: Tensor
    """The client's own trained model with its own running statistics, `[N, width]`."""


class Down(NamedTuple):
    """To a participant."""

    w: Tensor
    """Its combined model, `[S, P]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The trained parameters, `[K, P]`."""
    critical: Tensor
    """Which of them are critical, as bits, uint8 `[K, B]`."""


class Config(StrictModel):
    """Options of FedCAC; defaults of the authors' code for CIFAR-10, Dirichlet 0.1."""

    name: Literal["fedcac"] = "fedcac"
    critical_ratio: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="r, share of critical parameters in each tensor (code: 0.5; CIFAR-100: 0.4)",
    )
    beta: float = Field(
        100.0,
        gt=0.0,
        description="rounds until only the closest clients collaborate (code: 100 of 300; CIFAR-100: 170)",
    )


class FedCAC(Method[Config, Hub, State, Down, Up]):
    """w_i <- M_i * mean of w_k over clients k with similar masks + (1 - M_i) * weighted mean of all w."""

    Config = Config
    hub_type = Hub
    state_type = State
    summary = "FedCAC: critical parameters are shared with similar clients, the others with all"

    def cost(self) -> float:
        return AS_FEDAVG

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.num_weights) - (-net.num_weights // 8)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        start = common_start(net, self.seed)[:, net.weights]
        nothing = start.new_zeros(1, 0, 0, dtype=torch.float64)
        ids = clients.ids.new_zeros(1, 0)
        return Hub(start.expand(len(clients.ids), -1), ids, nothing, nothing.bool())

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(common_start(net, self.seed, len(clients.ids)))

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(rows_of(hub.w, plan.ids))

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        w = cohort.fit(self.personalised(net, state, down), cross_entropy).w
        trained = w[:, net.weights].clone()
        critical = critical_entries(net.tensors, down.w, trained, self.config.critical_ratio)
        return State(w), Up(trained, pack_bits(critical))

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return state.w if up is not None else net.assemble(down.w, state.w[:, net.statistics])

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        overlap_SS = critical_overlaps(up.critical)
        friends_SS = collaborators(overlap_SS, plan.round, self.config.beta)
        w = replace_rows(hub.w, plan.ids, combine(up, friends_SS, plan.sizes))
        order = plan.ids.argsort()
        return Hub(
            w,
            plan.ids[None, order],
            overlap_SS[None, order][:, :, order],
            friends_SS[None, order][:, :, order],
        )

    def relations(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, Pairs]:
        """How critical parameters coincided at the end of the round before, and whose were averaged."""
        if hub.ids.shape[1] == 0:
            return {}
        ids = hub.ids[0]
        return {
            "mask overlap": every_pair(ids, hub.overlap[0]),
            "weight of critical parameters": every_pair(ids, mean_over(hub.together[0])),
        }


def critical_entries(tensors: list[slice], start_KP: Tensor, trained_KP: Tensor, ratio: float) -> Tensor:
    """The floor(r * size) entries of each tensor with the largest `|(w - w_start) * w|`: bool `[K, P]`."""
    mask_KP = torch.zeros_like(trained_KP, dtype=torch.bool)
    for columns in tensors:
        trained = trained_KP[:, columns]
        sensitivity = ((trained - start_KP[:, columns]) * trained).abs()
        # 0.29 * 100 is 28.999999999999996 in binary, and means 29.
        mask_KP[:, columns] = largest(sensitivity, int(ratio * trained.shape[1] + 1e-9))
    return mask_KP


def critical_overlaps(critical_SB: Tensor) -> Tensor:
    """`O_ij = |M_i and M_j| / |M_i|`, float64 `[S, S]`; all masks are of one size, of 0 O is 0."""
    shared_SS = overlaps(critical_SB)
    return shared_SS / shared_SS[0, 0].clamp(min=1)


def collaborators(overlap_SS: Tensor, round: int, beta: float) -> Tensor:
    """Who shares critical parameters with whom in this round: bool `[S, S]`, everybody with itself.

    j joins i where `O_ij >= mean + (t / beta) (max - mean)`, mean and maximum taken over pairs of different
    clients.
    """
    itself_SS = torch.eye(len(overlap_SS), dtype=torch.bool, device=overlap_SS.device)
    if len(overlap_SS) == 1 or overlap_SS[0, 0] == 0:
        return itself_SS
    pairs = overlap_SS[~itself_SS]
    threshold = pairs.mean() + round / beta * (pairs.max() - pairs.mean())
    return (overlap_SS >= threshold - SLACK) | itself_SS


def combine(up: Up, friends_SS: Tensor, sizes_S: Tensor) -> Tensor:
    """`M o (diag(1 / B1) B W) + (1 - M) o (1 pi^T W)`: `[S, P]`.

    Args:
        up: models and masks.
        friends_SS: B, bool.
        sizes_S: training samples, which pi is proportional to.
    """
    critical_SP = unpack_bits(up.critical, up.w.shape[1])
    return torch.where(critical_SP, mix(mean_over(friends_SS), up.w), weighted_mean(sizes_S, up.w))


def mean_over(friends_SS: Tensor) -> Tensor:
    """`diag(1 / B1) B`, float64."""
    return friends_SS.double() / friends_SS.sum(1, keepdim=True)
