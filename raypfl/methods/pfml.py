"""PFML: a shared and a client's own auxiliary model teach each other, both pulled to where they began.

Yang, Tian, Zhang: Regularized Mutual Learning for Personalized Federated Learning, ACML 2021, PMLR 157,
1521-1536. On every batch both models take K personalisation steps on
`CE(u) + KL(p_v || p_u) + lam/2 ||u - anchor||^2`, v the other model, held fixed (temperature 1); then the
models themselves follow their gradients and their personalisations. The auxiliary model m_i never leaves its
client; the server mixes the shared ones. Personalised is theta_i, the last personalisation of m_i, after
local training; global is w.

Read otherwise than printed:
  * Eq. (8) prints `lam (m_prev - m)`; the gradient of the proximal term is `lam (m - m_prev)`.
  * The names of p_m and p_w are swapped after Eqs. (4) and (5); as there, the peer is the target.
  * Algorithm 1 starts m at the received w in every round (`aux: reset`). Then m and w see the same batches
    from the same start, p_m = p_w, and m stays a copy of w. The text calls m_prev the auxiliary model of the
    previous round, so m persists and is its own anchor; `aux: anchor` starts m at w and keeps that anchor.
Open: the step size of the personalisation (here `inner_rate`, absent: `rate`), whether it begins anew with
every batch (it does here), and how batches are drawn (here one stream of reshuffled passes a client, which
goes on where its last round ended). Both steps are plain SGD: `training.optimizer` is not used, while
`training.lr_decay` scales both rates.

`personal_model` gives auxiliary models other architectures, another one for each client if it is a list. They
begin at one draw for all clients that have the architecture, and a client that never took part has that draw;
else m_i begins at the w of its client's first round, and a client that never took part has the newest w.
`update_scope: all`, after pFedMe's code: everybody downloads w and trains in every round, and the
participants alone upload and are aggregated.

Running statistics are those of the personalisation. The shared model's are averaged where they travel, and
follow the server's beta up to 1 only: beyond the mean a variance could become negative.
"""

# S participants, K clients of a cohort, k clients of a batch, P parameters.

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.errors import ConfigError
from raypfl.methods.beyond import towards
from raypfl.methods.contract import Answer, Clients, Method, Model, Plan, same_for_all
from raypfl.methods.mutual import Point, Side
from raypfl.methods.personal import (
    answer_of_own,
    like_the_shared,
    own_network,
    personal_start,
    run_by_architecture,
)
from raypfl.methods.scope import UpdateScope, plan_in_scope
from raypfl.methods.start import common_start
from raypfl.training import Batch, Cohort, Network, TrainingConfig


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The shared model's travelling columns, `[1, shared]`."""


class State(NamedTuple):
    """Held by a client."""

    m: Tensor
    """The auxiliary model m_i after the client's last training, of its own architecture, `[N, widest]`."""
    theta: Tensor
    """theta_i, the last personalisation of m_i, `[N, widest]`."""
    private: Tensor
    """Running statistics of the shared model that do not travel, `[N, private]`; usually none."""
    position: Tensor
    """Batches that the client has trained on so far, int64 `[N]`; 0: it never took part."""


class Down(NamedTuple):
    """To a participant."""

    w: Tensor
    """The shared model, the same for everyone, `[1, shared]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """Its copy of the shared model after local training, `[K, shared]`."""


class Config(StrictModel):
    """Options of PFML; defaults of the paper's MNIST experiments."""

    name: Literal["pfml"] = "pfml"
    lam: float = Field(
        15.0, ge=0.0, description="lambda, proximal weight (paper: 15; perceptron on MNIST 30, Synthetic 20)"
    )
    beta: float = Field(
        2.0, ge=0.0, le=10.0, description="server's step to the mean; above 1 goes beyond it (CIFAR-10: 1)"
    )
    inner_steps: int = Field(3, ge=0, description="K, personalisation steps a batch (paper: 3)")
    rate: float = Field(0.01, ge=0.0, description="eta, step size of both models (paper: 0.01)")
    inner_rate: float | None = Field(
        None, gt=0.0, description="eta_p, step size of the personalisation; absent: rate (not in the paper)"
    )
    local_batches: int = Field(10, ge=1, description="E, batches a round (paper: 10)")
    aux: Literal["persist", "reset", "anchor"] = Field(
        "persist", description="m_i kept; or w each round (Algorithm 1); or w each round, m_i as its anchor"
    )
    inner_order: Literal["jacobi", "gauss_seidel"] = Field(
        "jacobi", description="personalisation steps at once, or the shared model after the auxiliary one"
    )
    agg_weight: Literal["uniform", "size"] = Field(
        "uniform", description="in the server's mean (Eq. 11: uniform; pFedMe's code: size)"
    )
    pm: Literal["theta", "m"] = Field("theta", description="the personalised model (paper: theta)")
    update_scope: UpdateScope = Field(
        "selected", description="who trains: participants (Algorithm 1), or all clients (pFedMe's code)"
    )

    @model_validator(mode="after")
    def _stable(self) -> Config:
        step = self.rate if self.inner_rate is None else self.inner_rate
        if step * self.lam >= 2.0:
            raise ValueError(f"inner_rate * lam = {step * self.lam:g} must be below 2, or theta runs away")
        if self.rate * self.lam > 1.0 + 1e-9:
            raise ValueError(f"rate * lam = {self.rate * self.lam:g} must be at most 1; lower rate")
        return self


class PFML(Method[Config, Hub, State, Down, Up]):
    """m, w <- personalisations theta, w^ of both on every batch; upload w; w <- (1 - beta) w + beta mean."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"w"})
    reported = ("personalised", "post")
    personal_models = True
    summary = "PFML: shared and auxiliary models in regularised mutual learning; the auxiliary one stays"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        if not like_the_shared(net) and self.config.aux != "persist":
            raise ConfigError(
                f"method.aux = {self.config.aux!r} starts the auxiliary model at the shared one, which has "
                "another architecture with personal_model. Use aux 'persist', or no personal_model."
            )

    def cost(self) -> float:
        """K gradients of both models a batch, and one more where those of the first step cannot serve."""
        again = self.config.inner_order == "gauss_seidel" or self.config.inner_steps == 0
        return 2.0 * (self.config.inner_steps + again) + 0.5

    def passes(self, training: TrainingConfig, samples: int) -> float:
        return self.config.local_batches / ceil(samples / training.batch_size)

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.shared.stop)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.shared].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        m = personal_start(net, self.seed, clients.ids)
        w = common_start(net, self.seed, len(clients.ids))
        return State(m, m, w[:, net.private].clone(), torch.zeros_like(clients.ids))

    def plan(
        self, net: Network, hub: Hub, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        return plan_in_scope(self.config.update_scope, clients, round, sample(round))

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, config = cohort.net, self.config
        w = net.assemble(down.w, state.private)
        kept = _unless_new(net, state, down, state.m)
        m = kept if config.aux == "persist" else w
        anchor = w if config.aux == "reset" else kept
        m, theta, w, cohort.losses = run_by_architecture(cohort, self._train, m, anchor, w, state.position)
        position = state.position + config.local_batches
        return State(m, theta, w[:, net.private].clone(), position), Up(w[:, net.shared].clone())

    def _train(
        self, chunk: Cohort, m: Tensor, anchor: Tensor, w: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """m_i, theta_i, w_i and the mean loss of theta over all its steps."""
        config, decay = self.config, chunk.training.decay(chunk.round)
        own, shared = Side.of(own_network(chunk), m), Side.of(chunk.net, w)
        anchors = anchor[:, own.net.weights], shared.w.clone()
        theta = own.w.clone()
        loss_sum, samples = m.new_zeros(len(m)), m.new_zeros(len(m))
        for batch in chunk.batches(steps=config.local_batches, first=position):
            at = batch.rows
            mine, ours = own.at(at), shared.at(at)
            found = self._personalise(mine, ours, (anchors[0][at], anchors[1][at]), batch, decay)
            theta[at] = found.theta
            for side, now, end, slope in (
                (own, mine, found.theta, found.slope_m),
                (shared, ours, found.w_hat, found.slope_w),
            ):
                w = towards_and_down(now.w, end, slope, config.rate * decay, config.lam)
                side.put(at, w, now.statistics)
            loss_sum[at] += found.loss * batch.sizes
            samples[at] += batch.sizes
        return own.rows_of(own.w), own.rows_of(theta), shared.rows_of(shared.w), loss_sum / samples

    def _personalise(
        self, mine: Side, ours: Side, anchors: tuple[Tensor, Tensor], batch: Batch, decay: float
    ) -> _Personalised:
        """K steps of theta and w^ from m and w, on one batch."""
        config = self.config
        rate = decay * (config.rate if config.inner_rate is None else config.inner_rate)

        def step(point: Point, slope: Tensor, anchor: Tensor) -> Point:
            w = towards_and_down(point.w.detach(), anchor, slope, rate, config.lam)
            return Point(point.side, w, batch)

        start = theta, w_hat = Point(mine, mine.w, batch), Point(ours, ours.w, batch)
        jacobi = config.inner_order == "jacobi"
        slopes: tuple[Tensor, Tensor] | None = None
        losses = []
        for _ in range(config.inner_steps):
            slope, loss = theta.slope(w_hat)
            moved = step(theta, slope, anchors[0])
            slope_w, _ = w_hat.slope(theta if jacobi else moved)
            if jacobi and slopes is None:
                slopes = slope, slope_w
            theta, w_hat = moved, step(w_hat, slope_w, anchors[1])
            losses.append(loss)
        if slopes is None:
            # No step has met both models where they began.
            (slope, loss), (slope_w, _) = start[0].slope(start[1]), start[1].slope(start[0])
            slopes, losses = (slope, slope_w), losses or [loss]
        mean = torch.stack(losses).mean(0)
        return _Personalised(theta.w.detach(), w_hat.w.detach(), *slopes, mean)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        rows = state.theta if self.config.pm == "theta" else state.m
        return _unless_new(net, state, down, rows)

    def alternative(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """The other of theta_i and m_i."""
        rows = state.m if self.config.pm == "theta" else state.theta
        return _unless_new(net, state, down, rows)

    def answer(self, net: Network, model: Model, ids: Tensor, rows: Tensor) -> Answer:
        if model == "global":
            return super().answer(net, model, ids, rows)
        return answer_of_own(net, ids, rows)

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(down.w, state.private)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        sizes = plan.sizes if self.config.agg_weight == "size" else torch.ones_like(plan.sizes)
        return Hub(towards(net, hub.w, weighted_mean(sizes, up.w), self.config.beta))


def _unless_new(net: Network, state: State, down: Down, rows: Tensor) -> Tensor:
    """`rows`, but the shared model where a client has never trained and its own is of that architecture."""
    if not like_the_shared(net):
        return rows
    return torch.where((state.position == 0)[:, None], net.assemble(down.w, state.private), rows)


def towards_and_down(w: Tensor, anchor: Tensor, slope: Tensor, rate: float, lam: float) -> Tensor:
    """`w - rate (slope + lam (w - anchor))`, in two passes over memory."""
    return torch.lerp(w, anchor, rate * lam).sub_(slope, alpha=rate)


class _Personalised(NamedTuple):
    """What the personalisation steps on one batch leave."""

    theta: Tensor
    w_hat: Tensor
    slope_m: Tensor
    """Gradient of CE + KL with respect to m, at the m and w that the batch began with, `[k, P]`."""
    slope_w: Tensor
    """The same with respect to w."""
    loss: Tensor
    """Mean CE + KL of theta over its steps, `[k]`."""
