"""Per-FedAvg: a global model that is one gradient step away from a good model of every client.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020. Minimises `sum_i pi_i F_i(w - alpha grad F_i(w))`. One local step, on
disjoint batches D1, D2 (and D3):

    theta = w - alpha g(w; D1);  g2 = g(theta; D2)
    first_order     w <- w - beta g2
    hessian_free    w <- w - beta (g2 - alpha [g(w + delta g2; D3) - g(w - delta g2; D3)] / (2 delta))
    exact           w <- w - beta (I - alpha H(w; D3)) g2

The default is `first_order`, which is what the code behind most published numbers runs. A client is evaluated
with the global model after one step of size alpha on one batch of its training data, which is then thrown
away; that code adapts on two batches of test data, which leaks labels. `training.optimizer` is not used: both
steps are plain SGD. `training.lr_decay` scales beta; alpha is part of the objective. A client with fewer
samples than a step wants splits those it has; with a single sample, all batches are that one.
"""

# K clients of a cohort, k clients of a batch, P parameters.

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.methods.contract import AS_FEDAVG, Clients
from raypfl.methods.global_model import Down, GlobalModel, State, Up, private, upload
from raypfl.methods.start import common_start
from raypfl.training import Batch, Cohort, Network, TrainingConfig, cross_entropy


class Config(StrictModel):
    """Options of Per-FedAvg."""

    name: Literal["per_fedavg"] = "per_fedavg"
    variant: Literal["first_order", "hessian_free", "exact"] = Field(
        "first_order", description="what becomes of the Hessian (public code: first_order)"
    )
    alpha: float = Field(
        0.01, ge=0.0, description="inner step size, also at evaluation (tuned on MNIST: 0.01 to 0.03)"
    )
    beta: float = Field(
        0.01, gt=0.0, description="outer step size (public code: as alpha; to be tuned, 0.001 to 0.1)"
    )
    delta: float = Field(1e-3, gt=0.0, description="hessian_free: how far the difference reaches")
    draw: Literal["batches", "parts"] = Field(
        "batches",
        description="D1, D2 (, D3) are batches of `training.batch_size`, a short rest is left out (public "
        "code); or parts of one such batch, for as many outer steps as other methods take",
    )


class PerFedAvg(GlobalModel[Config, State]):
    """w <- sum_i pi_i w_i, w_i after steps w <- w - beta (I - alpha H) g(w - alpha g(w))."""

    Config = Config
    state_type = State
    summary = "Per-FedAvg: a global model that one local step personalises (MAML)"
    variants = {name: {"variant": name} for name in ("hessian_free", "exact")}

    def cost(self) -> float | None:
        """Two gradients on two batches, or four on three."""
        return {"first_order": AS_FEDAVG, "hessian_free": AS_FEDAVG * 4 / 3}.get(self.config.variant)

    def passes(self, training: TrainingConfig, samples: int) -> float:
        size = self._drawn(training)
        left_out = samples % size if self.config.draw == "batches" and samples > size else 0
        return training.epochs * (1.0 - left_out / samples)

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(private(net, common_start(net, self.seed, len(clients.ids))))

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        w, cohort.losses = cohort.run(self._train, self.global_model(net, state, down))
        return State(private(net, w)), upload(net, w)

    def _train(self, chunk: Cohort, start: Tensor) -> tuple[Tensor, Tensor]:
        """The models after their outer steps, and the mean of F_i(theta)."""
        net = chunk.net
        beta = self.config.beta * chunk.training.decay(chunk.round)
        w, buffers = start[:, net.weights].clone(), start[:, net.statistics].clone()
        loss_sum, samples = start.new_zeros(len(start)), start.new_zeros(len(start))
        for batch, *parts in self._batches(chunk):
            at = batch.rows
            before, statistics = w[at], buffers[at]
            loss, g = self._outer_gradient(net, before, statistics, parts)
            # An index tensor gathers copies; a prefix is a view, and already in place.
            w[at], buffers[at] = before - beta * g, statistics
            loss_sum[at] += loss * parts[1].sizes
            samples[at] += parts[1].sizes
        return net.assemble(w, buffers), loss_sum / samples

    def _batches(self, chunk: Cohort) -> Iterator[tuple[Batch, ...]]:
        """What is drawn for an outer step, and D1, D2 (, D3) of it."""
        whole = self.config.draw == "batches"
        for batch in chunk.batches(batch_size=self._drawn(chunk.training), drop_short=whole):
            yield batch, *batch.split(self._parts)

    @property
    def _parts(self) -> int:
        return 2 if self.config.variant == "first_order" else 3

    def _drawn(self, training: TrainingConfig) -> int:
        """Samples of an outer step."""
        return training.batch_size * (self._parts if self.config.draw == "batches" else 1)

    def _outer_gradient(
        self, net: Network, w: Tensor, statistics: Tensor, parts: list[Batch]
    ) -> tuple[Tensor, Tensor]:
        """F_i(theta; D2) `[k]` and the direction of the outer step `[k, P]`; statistics are written."""
        config = self.config
        _, g1 = gradient(net, w, statistics, parts[0])
        loss, g2 = gradient(net, w - config.alpha * g1, statistics, parts[1])
        if config.variant == "hessian_free":
            # Neither of the two is a model of the client: their statistics are copies.
            ahead, behind = (
                gradient(net, w + reach * g2, statistics.clone(), parts[2])[1]
                for reach in (config.delta, -config.delta)
            )
            g2 = g2 - config.alpha * (ahead - behind) / (2.0 * config.delta)
        elif config.variant == "exact":
            g2 = g2 - config.alpha * curvature(net, w, statistics.clone(), parts[2], g2)
        return loss, g2

    def adapted(self, cohort: Cohort, w: Tensor) -> Tensor:
        """One inner step on the first batch of a shuffle of the client's training samples."""
        return cohort.run(self._adapt, w)[0]

    def _adapt(self, chunk: Cohort, start: Tensor) -> tuple[Tensor]:
        net = chunk.net
        w, buffers = start[:, net.weights].clone(), start[:, net.statistics].clone()
        for batch in chunk.batches(purpose="adaptation", steps=1):
            at = batch.rows
            before, statistics = w[at], buffers[at]
            _, g = gradient(net, before, statistics, batch)
            w[at], buffers[at] = before - self.config.alpha * g, statistics
        return (net.assemble(w, buffers),)


def gradient(net: Network, w: Tensor, statistics: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """F_i `[k]` and its gradient `[k, P]` at `w` on a batch; running statistics are written."""
    leaf = w.detach().requires_grad_()
    loss = cross_entropy(net.bind(leaf, statistics, leaf=leaf), batch)
    (g,) = net.slopes(loss, [leaf])
    return loss.detach(), g


def curvature(net: Network, w: Tensor, statistics: Tensor, batch: Batch, direction: Tensor) -> Tensor:
    """Hessian of F_i at `w` times a direction `[k, P]`, every client's own."""
    leaf = w.detach().requires_grad_()
    loss = cross_entropy(net.bind(leaf, statistics, leaf=leaf), batch)
    (g,) = net.slopes(loss, [leaf], differentiable=True)
    (product,) = net.slopes(g * direction, [leaf])
    return product
