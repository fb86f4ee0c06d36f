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

Running statistics are those of the personalisation. The shared model's are averaged where they travel, and
follow the server's beta up to 1 only: beyond the mean a variance could become negative.
"""

# S participants, K clients of a cohort, k clients of a batch, P parameters.

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Method, Plan
from raypfl.methods.pfedme import towards
from raypfl.methods.start import common_start
from raypfl.training import (
    Batch,
    Cohort,
    Network,
    cross_entropy_per_sample,
    divergence_per_sample,
)


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The shared model's travelling columns, `[1, shared]`."""


class State(NamedTuple):
    """Held by a client."""

    m: Tensor
    """The auxiliary model m_i after the client's last training, `[N, width]`."""
    theta: Tensor
    """theta_i, the last personalisation of m_i, `[N, width]`."""
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
    summary = "PFML: shared and auxiliary models in regularised mutual learning; the auxiliary one stays"

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.shared].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        return State(start, start, start[:, net.private].clone(), torch.zeros_like(clients.ids))

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, config = cohort.net, self.config
        w = net.assemble(down.w, state.private)
        kept = _unless_new(net, state, down, state.m)
        m = kept if config.aux == "persist" else w
        anchor = w if config.aux == "reset" else kept
        m, theta, w, cohort.losses = cohort.run(self._train, m, anchor, w, state.position)
        position = state.position + config.local_batches
        return State(m, theta, w[:, net.private].clone(), position), Up(w[:, net.shared].clone())

    def _train(
        self, chunk: Cohort, m: Tensor, anchor: Tensor, w: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """m_i, theta_i, w_i and the mean loss of theta over all its steps."""
        config, decay = self.config, chunk.training.decay(chunk.round)
        own, shared = _Side.of(chunk.net, m, anchor), _Side.of(chunk.net, w, w)
        theta = own.w.clone()
        loss_sum, samples = m.new_zeros(len(m)), m.new_zeros(len(m))
        for batch in chunk.batches(steps=config.local_batches, first=position):
            mine, ours = own.at(batch.rows), shared.at(batch.rows)
            found = self._personalise(mine, ours, batch, decay)
            theta[batch.rows] = found.theta
            for side, now, end, slope in (
                (own, mine, found.theta, found.slope_m),
                (shared, ours, found.w_hat, found.slope_w),
            ):
                moved = now.w - config.rate * decay * (slope + config.lam * (now.w - end))
                side.put(batch.rows, now._replace(w=moved))
            loss_sum[batch.rows] += found.loss * batch.sizes
            samples[batch.rows] += batch.sizes
        return own.row(own.w), own.row(theta), shared.row(shared.w), loss_sum / samples

    def _personalise(self, mine: _Side, ours: _Side, batch: Batch, decay: float) -> _Personalised:
        """K steps of theta and w^ from m and w, on one batch."""
        config = self.config
        rate = decay * (config.rate if config.inner_rate is None else config.inner_rate)
        theta, w_hat = start = _Point(mine, mine.w, batch), _Point(ours, ours.w, batch)
        slopes: tuple[Tensor, Tensor] | None = None
        losses = []
        for _ in range(config.inner_steps):
            g_theta, loss = _slope(theta, w_hat)
            moved = theta.stepped(g_theta, rate, config.lam)
            jacobi = config.inner_order == "jacobi"
            g_w, _ = _slope(w_hat, theta if jacobi else moved)
            if jacobi and slopes is None:
                slopes = g_theta, g_w
            theta, w_hat = moved, w_hat.stepped(g_w, rate, config.lam)
            losses.append(loss)
        if slopes is None:
            # No step has met both models where they were.
            (g_theta, loss), (g_w, _) = _slope(*start), _slope(*start[::-1])
            slopes = g_theta, g_w
            losses = losses or [loss]
        mean = torch.stack(losses).mean(0)
        return _Personalised(theta.w.detach(), w_hat.w.detach(), *slopes, mean)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        rows = state.theta if self.config.pm == "theta" else state.m
        return _unless_new(net, state, down, rows)

    def alternative(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """The other of theta_i and m_i."""
        rows = state.m if self.config.pm == "theta" else state.theta
        return _unless_new(net, state, down, rows)

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(down.w, state.private)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        sizes = plan.sizes if self.config.agg_weight == "size" else torch.ones_like(plan.sizes)
        return Hub(towards(net, hub.w, weighted_mean(sizes, up.w), self.config.beta))


def _unless_new(net: Network, state: State, down: Down, rows: Tensor) -> Tensor:
    """`rows` of clients that have taken part, and the shared model for those that never have."""
    return torch.where((state.position == 0)[:, None], net.assemble(down.w, state.private), rows)


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


class _Side(NamedTuple):
    """One of the two models of k clients, with what it is pulled to."""

    net: Network
    rows: Tensor
    """`[k, width]` as the round began; only their shape and padding are read."""
    w: Tensor
    """`[k, P]`."""
    statistics: Tensor
    """Running statistics `[k, b]`, written by forwards."""
    anchor: Tensor
    """`[k, P]`."""

    @classmethod
    def of(cls, net: Network, rows: Tensor, anchor: Tensor) -> _Side:
        """A side that may be written."""
        w, statistics = rows[:, net.weights].clone(), rows[:, net.statistics].clone()
        return cls(net, rows, w, statistics, anchor[:, net.weights])

    def at(self, rows: slice | Tensor) -> _Side:
        """The side of some of the clients."""
        return self._replace(**{name: getattr(self, name)[rows] for name in self._fields[1:]})

    def put(self, rows: slice | Tensor, part: _Side) -> None:
        """Write back what some of the clients have become."""
        self.w[rows], self.statistics[rows] = part.w, part.statistics

    def row(self, w: Tensor) -> Tensor:
        """Models `[k, width]` of weights, with the statistics of this side."""
        return self.net.assemble(w, self.statistics)


class _Point:
    """Models of one side, somewhere on their way through a batch."""

    def __init__(self, side: _Side, w: Tensor, batch: Batch) -> None:
        self.side, self.w, self.batch = side, w.detach().requires_grad_(), batch

    @cached_property
    def logits(self) -> Tensor:
        """`[k, B, C]`; computed once, when they are first asked for."""
        side = self.side
        return side.net.bind(side.rows, side.statistics, leaf=self.w)(self.batch.x)

    def stepped(self, slope: Tensor, rate: float, lam: float) -> _Point:
        """One step on the loss of that gradient and the proximal term."""
        w = self.w.detach()
        return _Point(self.side, w - rate * (slope + lam * (w - self.side.anchor)), self.batch)


def _slope(own: _Point, peer: _Point) -> tuple[Tensor, Tensor]:
    """Gradient `[k, P]` and value `[k]` of CE(own) + KL(peer || own), the peer held fixed."""
    batch = own.batch
    loss = batch.mean(
        cross_entropy_per_sample(own.logits, batch.y) + divergence_per_sample(peer.logits, own.logits)
    )
    (slope,) = torch.autograd.grad(loss.sum(), own.w, retain_graph=True)
    return slope, loss.detach()
