"""pFedMe: every client solves a proximal problem around its copy of the global model, which follows.

T. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020. Minimises
`sum_i pi_i M_i(w)`, `M_i(w) = min_theta F_i(theta) + lam/2 ||theta - w||^2`, whose gradient is
`lam (w - theta)`. The personalised model is theta_i after local training, before aggregation.

As in the authors' code: theta goes on from batch to batch, its steps shrink it by `mu` (the paper has 0), and
a last, short batch counts as one. Unlike there: theta_i is a copy, so the personalised score is theirs and
not that of w_i (their stored list is the live model, which w_i overwrites; `pm: w` shows that score);
batches are shuffled, and R batches a round are the next of one stream of passes that goes on from round to
round. By default only participants train; `update_scope: all` is the code's way: everybody downloads w and
trains in every round, and the participants alone upload and are aggregated. Both steps are plain SGD:
`training.optimizer` is not used, while `training.lr_decay` scales `inner_rate` and `rate`.

Running statistics are those of theta. Where they travel they are averaged, and follow the server's beta
up to 1 only: beyond the mean a variance could become negative.
"""

# S participants, K clients of a cohort, k clients of a chunk.

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.beyond import towards
from raypfl.methods.contract import Clients, Method, Plan, same_for_all
from raypfl.methods.scope import UpdateScope, plan_in_scope
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, TrainingConfig, cross_entropy


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The global model's travelling columns, `[1, shared]`."""


class State(NamedTuple):
    """Held by a client."""

    theta: Tensor
    """theta_i after the client's last training, else the common start, `[N, width]`."""
    w: Tensor
    """Its copy w_i of the global model at the same time, parameters only, `[N, P]`."""
    position: Tensor
    """Batches that the client has trained on in rounds of R batches, int64 `[N]`."""


class Down(NamedTuple):
    """To a participant."""

    w: Tensor
    """The global model, the same for everyone, `[1, shared]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The client's copy w_i of the global model after its steps, with the statistics, `[K, shared]`."""


class Config(StrictModel):
    """Options of pFedMe; defaults of the authors' code for MNIST."""

    name: Literal["pfedme"] = "pfedme"
    lam: float = Field(
        15.0,
        ge=0.0,
        description="lambda, weight of the proximal term (code: 15, synthetic data 20, tuned 30)",
    )
    inner_steps: int = Field(5, ge=0, description="K, steps of theta a batch (code: 5)")
    inner_rate: float = Field(
        0.09, gt=0.0, description="delta, step size of theta (code: 0.09, tuned 0.05 to 0.1; CIFAR-10 0.01)"
    )
    rate: float = Field(0.005, ge=0.0, description="eta, step size of w_i (code: 0.005, tuned 0.01)")
    beta: float = Field(
        1.0,
        ge=0.0,
        le=10.0,
        description="server's step to the mean; above 1 goes beyond it (code: 1, tuned 2)",
    )
    mu: float = Field(1e-3, ge=0.0, description="shrinks theta at every step (code: 1e-3; paper: 0)")
    local_batches: int | None = Field(
        None, ge=1, description="R, batches a round (code: 20); absent: what `training` says"
    )
    pm: Literal["theta", "w"] = Field(
        "theta", description="the personalised model: theta_i (paper), or w_i (what the code evaluates)"
    )
    update_scope: UpdateScope = Field(
        "selected", description="who trains: participants (paper), or all clients in every round (code)"
    )

    @model_validator(mode="after")
    def _stable(self) -> Config:
        if self.inner_rate * (self.lam + self.mu) >= 2.0:
            raise ValueError(
                f"inner_rate * (lam + mu) = {self.inner_rate * (self.lam + self.mu):g} must be below 2, or "
                "theta runs away; lower inner_rate"
            )
        if self.rate * self.lam > 1.0 + 1e-9:
            raise ValueError(f"rate * lam = {self.rate * self.lam:g} must be at most 1; lower rate")
        return self


class PFedMe(Method[Config, Hub, State, Down, Up]):
    """theta <- K steps on F_i + lam/2 ||theta - w_i||^2; w_i <- w_i - eta lam (w_i - theta); w <- mean."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"w"})
    reported = ("personalised", "post")
    summary = "pFedMe: personal models in a proximal term around a global one (Moreau envelopes)"

    def cost(self) -> float:
        """K gradients a batch."""
        return self.config.inner_steps + 0.5

    def passes(self, training: TrainingConfig, samples: int) -> float:
        batches = self.config.local_batches
        return training.epochs if batches is None else batches / ceil(samples / training.batch_size)

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.shared.stop)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.shared].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        return State(start, start[:, net.weights].clone(), torch.zeros_like(clients.ids))

    def plan(
        self, net: Network, hub: Hub, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        return plan_in_scope(self.config.update_scope, clients, round, sample(round))

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        start = net.assemble(down.w, state.theta[:, net.private])
        theta, w, losses = cohort.run(self._solve, start, state.position)
        cohort.losses = losses if self.config.inner_steps else None
        position = state.position + (self.config.local_batches or 0)
        return State(theta, w[:, net.weights].clone(), position), Up(w[:, net.shared].clone())

    def _solve(self, chunk: Cohort, start: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """theta_i, w_i (both with the statistics of theta) and the mean of F_i(theta) over all steps."""
        net, config = chunk.net, self.config
        decay = chunk.training.decay(chunk.round)
        inner_rate, follow = config.inner_rate * decay, config.rate * decay * config.lam
        theta, w = start.clone(), start[:, net.weights].clone()
        buffers = start[:, net.statistics].clone()
        loss_sum, samples = start.new_zeros(len(start)), start.new_zeros(len(start))
        batches = (
            chunk.batches()
            if config.local_batches is None
            else chunk.batches(steps=config.local_batches, first=position)
        )
        for batch in batches:
            at = batch.rows
            own, anchor, statistics = theta[at, net.weights], w[at], buffers[at]
            for _ in range(config.inner_steps):
                leaf = own.detach().requires_grad_()
                loss = cross_entropy(net.bind(start[at], statistics, leaf=leaf), batch)
                (g,) = net.slopes(loss, [leaf])
                with torch.no_grad():
                    g.add_(leaf, alpha=config.lam + config.mu).sub_(anchor, alpha=config.lam)
                    own = leaf - inner_rate * g
                loss_sum[at] += loss.detach() * batch.sizes
                samples[at] += batch.sizes
            theta[at, net.weights], buffers[at] = own, statistics
            w[at] = anchor - follow * (anchor - own)
        theta[:, net.statistics] = buffers
        return theta, net.assemble(w, buffers), loss_sum / samples

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return state.theta if self.config.pm == "theta" else _w_of(net, state)

    def alternative(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """The other of theta_i and w_i."""
        return _w_of(net, state) if self.config.pm == "theta" else state.theta

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(down.w, state.theta[:, net.private])

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(towards(net, hub.w, weighted_mean(plan.sizes, up.w), self.config.beta))


def _w_of(net: Network, state: State) -> Tensor:
    return net.assemble(state.w, state.theta[:, net.statistics])
