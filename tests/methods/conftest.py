"""A federation small enough to check by hand, on which methods run round by round as engines run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from raypfl.engine.messages import put, take
from raypfl.methods import Clients, Method, Plan, published
from raypfl.models import MLP, Linear, build
from raypfl.training import SGD, Batch, ClientData, Cohort, Network, Rows, Samples, TrainingConfig

AnyMethod = Method[Any, Any, Any, Any, Any]

FULL_BATCH_STEP = TrainingConfig(epochs=1, batch_size=1000, optimizer=SGD(lr=0.5))
"""One step of gradient descent a round."""


class Round(NamedTuple):
    """What one round of a method leaves: all rows of all clients, and what was sent."""

    hub: Any
    state: Any
    down: Any
    up: Any


class Toy:
    """Clients with samples of their own and one linear classifier, or a perceptron.

    Args:
        sizes: training samples of each client.
        features, classes: of the samples; labels of client i are mostly i modulo `classes`.
        hidden: units of a hidden layer (ReLU), which is then the extractor; none by default.
        training: local training; by default a few uneven mini-batches with Adam.
    """

    def __init__(
        self,
        sizes: Sequence[int] = (7, 4, 10, 5),
        *,
        features: int = 4,
        classes: int = 3,
        hidden: int = 0,
        training: TrainingConfig | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.training = training or TrainingConfig(epochs=2, batch_size=3)
        self.seed, self.classes = seed, classes
        draw = np.random.default_rng(0)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        y = np.where(draw.random(len(owner)) < 0.8, owner % classes, draw.integers(classes, size=len(owner)))
        x = draw.normal(size=(len(owner), features)) + np.eye(classes, features)[y]
        self.x, self.y = torch.from_numpy(x).to(dtype), torch.from_numpy(y)
        self.indices = [np.flatnonzero(owner == client) for client in range(len(sizes))]
        self.dtype, self.features = dtype, features
        self.net = self.network(hidden)
        counts = torch.stack([self.y[own].bincount(minlength=classes) for own in self.indices])
        self.clients = Clients(torch.arange(len(sizes)), torch.tensor(sizes), counts)

    def network(self, hidden: int = 0) -> Network:
        """A network for these samples, linear or with a hidden layer."""
        built = (MLP(hidden=(hidden,)) if hidden else Linear()), (self.features,), self.classes
        return Network(
            lambda: build(*built).module,
            build(*built).head,
            input_shape=(self.features,),
            dtype=self.dtype,
        )

    def rows(self, scale: float = 1.0, seed: int = 0) -> Tensor:
        """Models of all clients that differ: `[N, width]`, zeros in the padding."""
        draw = torch.Generator().manual_seed(seed)
        rows = torch.zeros(len(self.indices), self.net.width, dtype=self.net.dtype)
        rows[:, self.net.weights] = scale * torch.randn(
            len(rows), self.net.num_weights, generator=draw, dtype=rows.dtype
        )
        return rows

    def weights(self, rows: Tensor) -> Tensor:
        """The parameters of rows, without padding."""
        return rows[:, self.net.weights]

    def targets(self) -> Tensor:
        """Every client's mean sample, the minimum of its objective where that is quadratic."""
        return torch.stack([self.x[own].mean(0) for own in self.indices])

    def plan(self, round: int = 1, ids: Sequence[int] | None = None) -> Plan:
        """A round of these participants, or of everybody."""
        chosen = torch.arange(len(self.indices)) if ids is None else torch.tensor(ids)
        return Plan(round, chosen, self.clients.sizes[chosen])

    def plan_of(self, method: AnyMethod, hub: Any, round: int = 1, ids: Sequence[int] | None = None) -> Plan:
        """A method's own plan of a round of these participants, or of everybody."""
        return method.plan(self.net, hub, self.clients, round, lambda round: self.plan(round, ids).ids)

    def cohort(self, plan: Plan) -> Cohort:
        """A plan's participants, with their data."""
        own = [self.indices[client] for client in plan.ids]
        data = ClientData(Samples(self.x, self.y), self.classes, own, own, own)
        return Cohort(
            self.net, data, plan.ids, round=plan.round, seed=self.seed, training=self.training, width=2
        )

    def batches(self, round: int, client: int, **options: Any) -> list[Batch]:
        """The batches that one client meets in a round, as `Cohort.batches` has them."""
        found: list[Batch] = []

        def work(chunk: Cohort, row: Tensor) -> tuple[Tensor]:
            found.extend(chunk.batches(**options))
            return (row,)

        self.cohort(self.plan(round, [client])).run(work, torch.zeros(1, 1))
        return found

    def round(self, method: AnyMethod, hub: Any, state: Any, plan: Plan) -> Round:
        """One round in the order of the contract."""
        down = method.download(self.net, hub, plan)
        cohort = self.cohort(plan)
        if self.training.keeps_momentum:
            cohort.velocity = self.velocity[plan.ids]
        own, up = method.local_update(cohort, take(state, plan.ids), down)
        if cohort.velocity is not None:
            self.velocity[plan.ids] = cohort.velocity
        sent = take(up, plan.uploads.nonzero()[:, 0])
        hub = method.aggregate(self.net, hub, sent, plan.of_senders())
        return Round(hub, put(state, plan.ids, own), down, up)

    def run(
        self,
        method: AnyMethod,
        rounds: int,
        participants: Callable[[int], Sequence[int] | None] = lambda round: None,
    ) -> list[Round]:
        """All rounds from the start; `participants(round)` are ids, or None for everybody."""
        hub, state = method.init_hub(self.net, self.clients), method.init_state(self.net, self.clients)
        self.velocity = torch.zeros(len(self.indices), self.net.num_weights, dtype=self.net.dtype)
        history = []
        for number in range(1, rounds + 1):
            history.append(
                self.round(method, hub, state, self.plan_of(method, hub, number, participants(number)))
            )
            hub, state = history[-1].hub, history[-1].state
        return history

    def step_from(self, method: AnyMethod, w: Tensor, round: int = 1) -> Round:
        """One round of a method whose server has seen the clients' models, from given models `[N, width]`."""
        return self.round(method, published.Hub(self.weights(w)), published.State(w), self.plan(round))

    def gradients(self, w: Tensor) -> Tensor:
        """Gradient of every client's mean cross-entropy over all its samples: `[N, weights]`."""
        leaf = w.clone().requires_grad_()
        total = w.new_zeros(())
        for client, own in enumerate(self.indices):
            one = self.net.bind(leaf[client : client + 1])
            total = total + torch.nn.functional.cross_entropy(one(self.x[own][None])[0], self.y[own])
        return self.weights(torch.autograd.grad(total, leaf)[0])


@pytest.fixture
def make_toy() -> type[Toy]:
    """Makes federations; see `Toy`."""
    return Toy


@pytest.fixture
def toy() -> Toy:
    """Four clients of 7, 4, 10 and 5 samples in float64, one full gradient step of 0.5 a round."""
    return Toy(training=FULL_BATCH_STEP, dtype=torch.float64)


def half_squared_distance(m: Rows, batch: Batch) -> Tensor:
    """`F_i = mean of ||w - x||^2 / 2` over samples: a quadratic around the mean sample, up to a constant."""
    return batch.mean(0.5 * (m.w[:, None] - batch.x).square().sum(2))


@pytest.fixture
def make_quadratic(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Toy]:
    """Makes federations whose objectives are quadratic, so that local training is exact for a given rho.

    One step of size 1 / (1 + rho) solves `F_i + rho / 2 ||w - anchor||^2`. Samples are points among
    the parameters.
    """
    monkeypatch.setattr(published, "cross_entropy", half_squared_distance)

    def make(rho: float) -> Toy:
        training = TrainingConfig(epochs=1, batch_size=1000, optimizer=SGD(lr=1 / (1 + rho)))
        toy = Toy(features=2, classes=2, training=training, dtype=torch.float64)
        draw = torch.Generator().manual_seed(6)
        toy.x = 3 * torch.randn(len(toy.x), toy.net.num_weights, generator=draw, dtype=torch.float64)
        return toy

    return make
