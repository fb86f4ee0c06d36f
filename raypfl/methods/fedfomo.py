"""FedFomo: a client weighs other clients' models by what they gain on its own validation samples.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization,
ICLR 2021. Client i receives the models v_j that its affinities favour; o_i is its model before its last local
training:

    r_ij = (Lval_i(o_i) - Lval_i(v_j)) / (||v_j - o_i|| + 1e-5)
    w_i  = sum_j omega_ij v_j,  omega_ij = max(r_ij, 0) / sum_k max(r_ik, 0)
    Q_i. += r_i.                at the models received; the server sends the M with the largest Q_i.

and then trains w_i on the samples that are not validation ones. Evaluated after local training, as in PFLlib.

With no positive r the paper's formula gives o_i, which undoes the local training; PFLlib keeps the trained
model, and so does the default (`no_gain`). As in PFLlib there is no exploration by default; the authors' code
explores (`epsilon`). Unlike PFLlib: the validation samples are drawn once (it takes the last in stored order,
which is a wrong split where they are sorted by class), batches are shuffled, and a short one is kept. A model
that equals o_i gains exactly nothing. A client with a single sample trains and validates on it. Scores are
sent for the M models received; PFLlib sends a row for all clients, zero elsewhere.

The server keeps every client's latest upload, and who has not uploaded is a candidate only where fewer than M
have: its model is the common start. In the first round that is everybody, so all r are 0 and nothing changes.
Others' models are run with their owners' statistics where these travel, mixtures with the client's own.

Memory. A row for each pair of receiver and model is S M rows; instead each host gets every model once that
one of its participants receives. At P = 50,890 (204 kB a row):
    S = 40 of 40, M = 5:       41 MB as pairs,   8 MB a host
    S = 40 of 40, M = 39:     318 MB as pairs,   8 MB a host
    S = 100 of 1,000, M = 5:  102 MB as pairs; at most that in all hosts together, as a host gets its own only
The server's Q has N x N numbers in the models' precision: 4 MB for 1,000 clients, 400 MB for 10,000. Models
are tried one after another, so a client in work holds two rows more than in local training, not M.
"""

# N clients, S participants, K clients of a cohort, P parameters, M models received, U that somebody receives.

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import replace_rows, row_distances, rows_of
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Message, Method, Pairs, Plan, same_for_all
from raypfl.methods.pools import peer_messages, pool_of
from raypfl.methods.start import common_start
from raypfl.rng import key, numpy_generator
from raypfl.training import Batch, Cohort, Network, Rows, cross_entropy, cross_entropy_per_sample

GUARD = 1e-5
"""Added to distances; the authors' code and PFLlib."""


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The latest upload of every client, `[N, P]`; before its first one the common start."""
    statistics: Tensor
    """Its running statistics, where they travel, `[N, b]`."""
    affinity: Tensor
    """Q, what each client has gained from each model so far, `[N, N]`; the identity at the start."""
    uploads: Tensor
    """How often each client has uploaded, int64 `[N]`."""


class State(NamedTuple):
    """Held by a client."""

    w: Tensor
    """The client's own model after its last training, `[N, width]`."""
    before: Tensor
    """o_i: the model that this training started from, with the statistics it had, `[N, width]`."""


class Down(NamedTuple):
    """To a participant."""

    models: Tensor
    """Every model that somebody receives, once, `[1, U, P]`."""
    statistics: Tensor
    """Their running statistics, where they travel, `[1, U, b]`."""
    place: Tensor
    """Which of them a participant receives, in the order of their owners, int64 `[S, M]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The parameters of the client's model after local training, `[K, P]`."""
    statistics: Tensor
    """Its running statistics, where they travel, `[K, b]`."""
    gain: Tensor
    """r_i. of the models received, in their order, `[K, M]`."""


class Config(StrictModel):
    """Options of FedFomo."""

    name: Literal["fedfomo"] = "fedfomo"
    num_models: int = Field(
        5, ge=1, description="M, models a client receives, its own among them (PFLlib: 5; code: 5 or 10)"
    )
    validation: float = Field(
        0.2, gt=0.0, lt=1.0, description="share of a client's training samples to weigh models on (both: 0.2)"
    )
    no_gain: Literal["keep", "paper"] = Field(
        "keep", description="with no positive r: keep the trained model (PFLlib), or return to o_i (paper)"
    )
    distance: Literal["l2", "l1"] = Field("l2", description="norm of v_j - o_i (paper: l2; code: l1, or l2)")
    epsilon: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="how often a random model is sent in place of the next best (code: 0.3; PFLlib: 0)",
    )
    epsilon_decay: float = Field(0.05, ge=0.0, description="what epsilon falls by a round (code: 0.05)")


class FedFomo(Method[Config, Hub, State, Down, Up]):
    """w_i <- sum_j omega_ij v_j over the M models received, then local training."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"models", "statistics"})
    columns = frozenset({"w", "statistics", "models"})
    pools = {"models": "place", "statistics": "place"}
    summary = "FedFomo: others' models weighed by their gain on own validation samples"

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        scores = min(self.config.num_models, len(clients.sizes_of_all))
        return same_for_all(net, clients, net.shared.stop + scores)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        start = common_start(net, self.seed)
        num = len(clients.ids)
        return Hub(
            start[:, net.weights].expand(num, -1),
            start[:, net.travelling].expand(num, -1),
            torch.eye(num, dtype=net.dtype, device=net.device),
            torch.zeros_like(clients.ids),
        )

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        return State(start, start)

    def plan(
        self, net: Network, hub: Hub, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        ids = sample(round)
        order = favourites(hub.affinity[ids], hub.uploads > 0, ids)
        num = min(self.config.num_models, order.shape[1])
        peers = order[:, :num]
        epsilon = self.config.epsilon - self.config.epsilon_decay * (round - 1)
        if epsilon > 0:
            draws = [key(self.seed, "fomo exploration", round, client) for client in ids.tolist()]
            explored = [
                explore(own.tolist(), num, epsilon, draw) for own, draw in zip(order, draws, strict=True)
            ]
            peers = torch.tensor(explored, device=ids.device)
        return Plan(round, ids, clients.sizes[ids], peers.sort(1).values)

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        ids, place = pool_of(plan)
        return Down(rows_of(hub.w, ids)[None], rows_of(hub.statistics, ids)[None], place)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        split = cohort.held_out(self.config.validation, "fomo validation")
        gain = self._gain(split, state, down)
        start = self._mixed(net, weights_of(gain), state, down)
        w = split.fit(start, cross_entropy).w
        cohort.losses = split.losses
        up = Up(w[:, net.weights].clone(), w[:, net.travelling].clone(), gain.to(w.dtype))
        return State(w, start), up

    def _gain(self, cohort: Cohort, state: State, down: Down) -> Tensor:
        """r: float64 `[K, M]`; exactly 0 for a model that is o_i."""
        net = cohort.net
        loss = validation_loss(cohort, state.before)
        gain = torch.zeros(down.place.shape, dtype=torch.float64, device=net.device)
        order: Literal[1, 2] = 2 if self.config.distance == "l2" else 1
        for number, place in enumerate(down.place.T):
            v = down.models[0, place]
            model = net.assemble(v, down.statistics[0, place], state.w[:, net.private])
            distance = row_distances(v, state.before[:, net.weights], order)
            r = (loss - validation_loss(cohort, model)) / (distance + GUARD)
            gain[:, number] = torch.where(distance > 0, r, 0.0)
        return gain

    def _mixed(self, net: Network, omega: Tensor, state: State, down: Down) -> Tensor:
        """`sum_j omega_ij v_j` with own statistics; what `no_gain` says where all omega are 0."""
        out = state.w.clone()
        for row, (own, places) in enumerate(zip(omega.tolist(), down.place.tolist(), strict=True)):
            total = torch.zeros(net.num_weights, dtype=torch.float64, device=net.device)
            for weight, place in zip(own, places, strict=True):
                if weight > 0.0:
                    total.add_(down.models[0, place].double(), alpha=weight)
            if any(own):
                out[row, net.weights] = total.to(out.dtype)
            elif self.config.no_gain == "paper":
                out[row, net.weights] = state.before[row, net.weights]
        return out

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        assert plan.peers is not None
        ids = plan.ids
        affinity = hub.affinity[ids].scatter_add(1, plan.peers, up.gain)
        return Hub(
            replace_rows(hub.w, ids, up.w),
            replace_rows(hub.statistics, ids, up.statistics),
            replace_rows(hub.affinity, ids, affinity),
            hub.uploads.index_add(0, ids, torch.ones_like(ids)),
        )

    def relations(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, Pairs]:
        """Q of the participants, as far as it has gathered anything."""
        rows, columns = hub.affinity[plan.ids].nonzero().T
        return {"affinity": Pairs(plan.ids[rows], columns, hub.affinity[plan.ids[rows], columns])}

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        return peer_messages(plan, models=down.models, statistics=down.statistics)


def favourites(affinity_SN: Tensor, uploaded_N: Tensor, ids_S: Tensor) -> Tensor:
    """All clients in the order in which each participant would have their models: int64 `[S, N]`.

    Those that have uploaded come first; among them the largest affinity, then the participant itself, then
    the lowest id.
    """
    every_1N = torch.arange(affinity_SN.shape[1], device=ids_S.device)[None]
    itself_SN = every_1N == ids_S[:, None]
    order_SN = every_1N.expand_as(affinity_SN)
    # Stable sorts, the weightiest criterion last.
    for criterion_SN in (itself_SN.int(), affinity_SN, uploaded_N.int().expand_as(affinity_SN)):
        by = criterion_SN.gather(1, order_SN).sort(dim=1, descending=True, stable=True).indices
        order_SN = order_SN.gather(1, by)
    return order_SN


def explore(order: list[int], count: int, epsilon: float, draw: int) -> list[int]:
    """So many of `order`, each with probability `epsilon` a random one, else the first that is left."""
    rng = numpy_generator(draw)
    left = list(order)
    return [left.pop(int(rng.integers(len(left))) if rng.random() < epsilon else 0) for _ in range(count)]


def weights_of(gain_KM: Tensor) -> Tensor:
    """omega: positive gains over their sum; all zero where none is positive."""
    positive_KM = gain_KM.clamp_min(0.0)
    total_K1 = positive_KM.sum(1, keepdim=True)
    return torch.where(total_K1 > 0, positive_KM / total_K1, 0.0)


def validation_loss(cohort: Cohort, w: Tensor) -> Tensor:
    """Mean cross-entropy of each client's model on its validation samples: float64 `[K]`."""

    def measure(m: Rows, batch: Batch) -> Tensor:
        loss = batch.sum(cross_entropy_per_sample(m(batch.x), batch.y))
        return torch.stack([loss, batch.sizes], 1)

    loss_K, samples_K = cohort.pass_over(w, measure, split="validation").unbind(1)
    return loss_K / samples_K
