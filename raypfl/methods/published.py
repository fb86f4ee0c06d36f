"""What methods share in which clients keep models of their own and the server their latest uploads.

The server works on the uploads of this round's participants. A client's model changes only when the client
trains, and it uploads right after; so the rows the server kept are the models that the participants of the
next round would upload at its start, whoever they are. In the first round that is the common start.
"""

# N clients, S participants, K clients of a cohort, P parameters.

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from raypfl.algebra import (
    pairwise_distances,
    pull_together,
    replace_rows,
    row_distances,
    row_norms,
    rows_of,
)
from raypfl.config import StrictModel
from raypfl.methods.contract import (
    AS_FEDAVG,
    Clients,
    Method,
    Pairs,
    Plan,
    every_pair,
    same_for_all,
)
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, cross_entropy


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The latest upload of every client, `[N, P]`: parameters, no running statistics."""


class State(NamedTuple):
    """Held by a client."""

    w: Tensor
    """The client's own model with its own running statistics, `[N, width]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The parameters of the client's model after local training, `[K, P]`."""


ConfigT = TypeVar("ConfigT", bound=StrictModel)
DownT = TypeVar("DownT", bound=tuple[Tensor, ...])


class Published(Method[ConfigT, Hub, State, DownT, Up]):
    """Every client has its own model, starts each round from it, and uploads it."""

    hub_type = Hub
    state_type = State

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.num_weights)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.weights].expand(len(clients.ids), -1))

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(common_start(net, self.seed, len(clients.ids)))

    def personalised(self, net: Network, state: State, down: DownT, up: Up | None = None) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(replace_rows(hub.w, plan.ids, up.w))


class Down(NamedTuple):
    """To a participant."""

    anchor: Tensor
    """The server's combination of all participants' models for this client, `[S, P]`."""


class Anchored(Published[ConfigT, Down]):
    """Incremental proximal methods: one server step on a loss between models, then a proximal problem.

    Server: `W~ = C W` over the participants. Client: `argmin F_i(w) + rho/2 ||w - w~_i||^2`, started at the
    client's own model; the anchor lives for one round and never overwrites it.
    """

    columns = frozenset({"w", "anchor"})

    @abstractmethod
    def attraction(self, w_SP: Tensor, round: int) -> Tensor:
        """The off-diagonal part `A` of `C = A + diag(1 - A 1)`: float64 `[S, S]`."""

    @abstractmethod
    def rho(self, round: int) -> float:
        """The weight of the proximal term."""

    def cost(self) -> float:
        return AS_FEDAVG

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        w_SP = rows_of(hub.w, plan.ids)
        return Down(pull_together(self.attraction(w_SP, plan.round), w_SP))

    def diagnose(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, float]:
        """Distances, coefficients and how far the server moved the models.

        `pulled_distance` and `pushed_distance` are the mean distances of pairs with a positive and a negative
        coefficient; `pushed` is how many models a client is pushed from, on average.
        """
        w_SP = rows_of(hub.w, plan.ids)
        if len(w_SP) == 1:
            return {}
        off_diagonal_SS = ~torch.eye(len(w_SP), dtype=torch.bool, device=w_SP.device)
        distance_SS, a_SS = pairwise_distances(w_SP), self.attraction(w_SP, plan.round)
        distances = distance_SS[off_diagonal_SS]
        moved_S = row_distances(down.anchor, w_SP)
        return {
            "distance_min": float(distances.min()),
            "distance_median": float(distances.median()),
            "distance_max": float(distances.max()),
            "pulled_distance": float(distance_SS[a_SS > 0].mean()),
            "pushed_distance": float(distance_SS[a_SS < 0].mean()),
            "pushed": float((a_SS < 0).sum(1).double().mean()),
            "self_weight_min": float(1.0 - a_SS.sum(1).max()),
            "anchor_shift": float(moved_S.mean()),
            "anchor_shift_relative": float(moved_S.mean() / distances.median()),
            "weight_norm_max": float(row_norms(w_SP).max()),
        }

    def relations(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, Pairs]:
        """C with its diagonal, and the distances between the models that it was made of.

        Nothing in the first round, in which all models are the common start.
        """
        w_SP = rows_of(hub.w, plan.ids)
        if plan.round == 1:
            return {}
        a_SS = self.attraction(w_SP, plan.round)
        c_SS = a_SS + (1.0 - a_SS.sum(1)).diag()
        distance_SS = pairwise_distances(w_SP)
        return {
            "coefficient": every_pair(plan.ids, c_SS),
            "distance": every_pair(plan.ids, distance_SS),
        }

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        rho = self.rho(cohort.round)
        pull = (rho, down.anchor) if rho > 0 else None
        w = cohort.fit(state.w, cross_entropy, pull=pull).w
        return State(w), Up(w[:, cohort.net.weights].clone())
