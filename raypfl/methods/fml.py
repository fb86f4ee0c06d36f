"""FML: a client's own model and a meme of the shared model teach each other; the memes are averaged.

Shen et al.: Federated Mutual Learning, arXiv 2006.16765, FITEE 2023. Per batch, both at once and each with
the other held fixed (temperature 1, mean over the batch):

    L_v = alpha CE(v) + (1 - alpha) KL(p_u || p_v)
    L_u = beta CE(u) + (1 - beta) KL(p_v || p_u)

The own model v_i never leaves its client and may have any architecture (`personal_model`; else that of the
shared model, begun at the common start). The meme u is the received model; the server takes the plain mean.
Personalised is v_i after local training.

As in the authors' code, but that its published main script has the download and the merge commented out. It
lowers the learning rate to a tenth after each third of the rounds (`training.lr_decay`, `lr_every`). Momentum
is fresh every round for both models.
"""

# S participants, K clients of a cohort, k clients of a chunk.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.contract import Answer, Clients, Method, Model, Plan, same_for_all
from raypfl.methods.mutual import Point, Side
from raypfl.methods.personal import answer_of_own, own_network, personal_start, run_by_architecture
from raypfl.methods.requirements import require_fresh_momentum
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Moments, Network, TrainingConfig


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The shared model's travelling columns, `[1, shared]`."""


class State(NamedTuple):
    """Held by a client."""

    v: Tensor
    """Its own model, of its own architecture, `[N, widest]`."""
    private: Tensor
    """Running statistics of the shared model that do not travel, `[N, private]`; usually none."""


class Down(NamedTuple):
    """To a participant."""

    w: Tensor
    """The shared model, the same for everyone, `[1, shared]`."""


class Up(NamedTuple):
    """From a participant."""

    u: Tensor
    """The meme model after local training, `[K, shared]`."""


class Config(StrictModel):
    """Options of FML; defaults of the authors' code."""

    name: Literal["fml"] = "fml"
    alpha: float = Field(
        0.5, ge=0.0, le=1.0, description="share of the labels in the loss of the own model (code: 0.5)"
    )
    beta: float = Field(
        0.5, ge=0.0, le=1.0, description="share of the labels in the loss of the meme model (code: 0.5)"
    )


class FML(Method[Config, Hub, State, Down, Up]):
    """v_i, u <- steps on labels and on each other; upload u; w <- mean of u."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"w"})
    columns = frozenset({"w", "u"})
    reported = ("personalised", "post")
    personal_models = True
    summary = "FML: own and shared models in mutual learning; any architecture for the own ones"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_fresh_momentum(training, "fml")

    def cost(self) -> float:
        """A gradient of each of two models."""
        return 2.5

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.shared.stop)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.shared].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        private = common_start(net, self.seed, len(clients.ids))[:, net.private].clone()
        return State(personal_start(net, self.seed, clients.ids), private)

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        u = net.assemble(down.w, state.private)
        v, u, cohort.losses = run_by_architecture(cohort, self._train, state.v, u)
        return State(v, u[:, net.private].clone()), Up(u[:, net.shared].clone())

    def _train(self, chunk: Cohort, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v_i, u_i and the mean of L_v."""
        optimizer, shares = chunk.training.optimizer, (self.config.alpha, self.config.beta)
        lr = optimizer.lr * chunk.training.decay(chunk.round)
        sides = Side.of(own_network(chunk), v), Side.of(chunk.net, u)
        memories = [optimizer.moments(side.w) for side in sides]
        loss_sum, samples = v.new_zeros(len(v)), v.new_zeros(len(v))
        for batch in chunk.batches():
            at = batch.rows
            points = [Point(now, now.w, batch) for now in (side.at(at) for side in sides)]
            slopes = [
                point.slope(peer, share, 1.0 - share)
                for point, peer, share in zip(points, points[::-1], shares, strict=True)
            ]
            with torch.no_grad():
                for side, point, memory, (slope, _) in zip(sides, points, memories, slopes, strict=True):
                    w, own = point.w.detach().clone(), Moments(*(field[at] for field in memory))
                    optimizer.step(w, slope, own, lr)
                    side.put(at, w, point.side.statistics)
                    for field, part in zip(memory, own, strict=True):
                        field[at] = part
            loss_sum[at] += slopes[0][1] * batch.sizes
            samples[at] += batch.sizes
        v, u = (side.rows_of(side.w) for side in sides)
        return v, u, loss_sum / samples

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return state.v

    def answer(self, net: Network, model: Model, ids: Tensor, rows: Tensor) -> Answer:
        if model == "global":
            return super().answer(net, model, ids, rows)
        return answer_of_own(net, ids, rows)

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(down.w, state.private)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(weighted_mean(torch.ones_like(plan.sizes), up.u))
