"""A tiny federation, run by the bare method contract in float64, or by the local engine in float32."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raypfl.data import ClientIndices, Federation, Pool
from raypfl.engine.contract import RoundReport
from raypfl.engine.local import LocalEngine
from raypfl.engine.messages import take
from raypfl.engine.world import World, make_world
from raypfl.methods import Clients, Method, Plan
from raypfl.models import BatchNorm2d
from raypfl.rng import key, numpy_generator
from raypfl.settings import RunConfig
from raypfl.testing.row import Row
from raypfl.training import (
    SGD,
    ClientData,
    Cohort,
    Network,
    Samples,
    TrainingConfig,
    cross_entropy_per_sample,
)

CLASSES = 3
SHAPE = (1, 4, 4)
SIZES = (7, 5, 3, 1, 4, 9)
"""Training samples. In batches of 3: whole ones, a last one of one or of two samples, one sample in all."""
ONE_SAMPLE = SIZES.index(1)
BATCH = 3
TRAINING = TrainingConfig(epochs=2, batch_size=BATCH, optimizer=SGD(lr=0.1, momentum=0.5))
NOBODY = torch.zeros(0, dtype=torch.int64)


def training(row: Row) -> TrainingConfig:
    """Local training as a row has it."""
    return TRAINING.model_copy(update={"momentum_state": row.momentum})


def mlp(hidden: int = 5) -> nn.Module:
    layers = [("flatten", nn.Flatten()), ("fc", nn.Linear(16, hidden)), ("act", nn.Tanh())]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(hidden, CLASSES))]))


def wide() -> nn.Module:
    """Wider than `mlp`."""
    return mlp(11)


def conv() -> nn.Module:
    """Batch normalisation couples the samples of a batch, and has statistics that are not parameters."""
    layers = [
        ("conv", nn.Conv2d(1, 2, 3, padding=1, bias=False)),
        ("norm", BatchNorm2d(2)),
        ("act", nn.Tanh()),
    ]
    return nn.Sequential(OrderedDict([*layers, ("flatten", nn.Flatten()), ("head", nn.Linear(32, CLASSES))]))


def trunk() -> nn.Module:
    """Convolutions and linear layers, of which several models are done together (`training.trunk`)."""
    layers = [
        ("conv", nn.Conv2d(1, 3, 3, padding=1)),
        ("relu", nn.ReLU()),
        ("pool", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(12, 5)),
        ("act", nn.Tanh()),
    ]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(5, CLASSES))]))


class Net(NamedTuple):
    """A network of the tests: how it is made, and where running statistics live."""

    build: Callable[[], nn.Module]
    buffers: Literal["average", "local", "fedbn"] = "average"

    def float64(self) -> Network:
        return Network(self.build, "head", buffers=self.buffers, input_shape=SHAPE, dtype=torch.float64)


PERSONAL = {"wide": wide, "conv": conv}
"""Clients' own architectures."""


NETS = {
    "mlp": Net(mlp),
    "conv": Net(conv),
    "conv with local statistics": Net(conv, "local"),
    "trunk": Net(trunk),
}
WITH_OWN_NORMS = Net(conv, "fedbn")
"""For methods that leave normalisation layers at home."""


class Toy(NamedTuple):
    """Images that are a class pattern and noise; every client has two of the three classes."""

    x: np.ndarray
    y: np.ndarray
    clients: tuple[ClientIndices, ...]

    def relabelled(self, order: Sequence[int]) -> Toy:
        """The federation in which client i is this one's client `order[i]`."""
        return self._replace(clients=tuple(self.clients[client] for client in order))

    def with_other_data(self, client: int) -> Toy:
        """The federation in which one client's images are others."""
        x = self.x.copy()
        x[self.clients[client].train] += 1.0
        return self._replace(x=x)

    def data(self) -> ClientData:
        samples = Samples(torch.from_numpy(self.x), torch.from_numpy(self.y))
        return ClientData(samples, CLASSES, *map(list, zip(*self.clients, strict=True)))


def toy(sizes: Sequence[int] = SIZES) -> Toy:
    rng = numpy_generator(key(0, "toy"))
    patterns = rng.normal(size=(CLASSES, *SHAPE))
    per_client = [size + 2 for size in sizes]
    own = [np.array([client, client + 1]) % CLASSES for client in range(len(sizes))]
    y = np.concatenate([rng.choice(classes, count) for classes, count in zip(own, per_client, strict=True)])
    x = patterns[y] + 0.3 * rng.normal(size=(len(y), *SHAPE))
    rows = np.split(np.arange(len(y)), np.cumsum(per_client)[:-1])
    return Toy(x, y, tuple(ClientIndices(mine[:-2], mine[:0], mine[-2:]) for mine in rows))


class Simulation:
    """Rounds by the methods' own words: plan, download, local_update, aggregate.

    Args:
        row: the method.
        net: the network, in float64.
        together: whether all participants train in one cohort and forward; else each is a cohort of its own.
    """

    def __init__(
        self,
        row: Row,
        net: Network,
        federation: Toy,
        *,
        together: bool = True,
    ) -> None:
        self.method: Any = row.method()
        self.net, self.data, self.training, self.together = net, federation.data(), training(row), together
        own = [Network(PERSONAL[name], "head", dtype=net.dtype) for name in row.personal]
        net.personal = tuple(own) or (net,)
        sizes = torch.tensor([len(own) for own in self.data.train])
        cohort = self._cohort(torch.arange(len(sizes)), 0)
        self.clients = Clients(torch.arange(len(sizes)), sizes, cohort.label_counts)
        self.hub = self.method.init_hub(net, self.clients)
        self.state = self.method.init_state(net, self.clients)
        self.velocity = torch.zeros(len(sizes), net.num_weights, dtype=net.dtype)
        self.rounds = 0

    def run(
        self, rounds: int, ids: Sequence[int] | None = None, order: Sequence[int] | None = None
    ) -> Simulation:
        """Some rounds; `order` says in which order participants come, ascending by default."""
        for _ in range(rounds):
            self.round(ids, order)
        return self

    def round(
        self, ids: Sequence[int] | None = None, order: Sequence[int] | None = None
    ) -> tuple[Plan, Any, Any]:
        """One round of all clients, or of `ids`; returns the plan and both messages."""
        method, net = self.method, self.net
        self.rounds += 1
        chosen = self.clients.ids if ids is None else torch.tensor(ids)
        plan = method.plan(net, self.hub, self.clients, self.rounds, lambda round: chosen)
        if order is not None:
            shuffled, sizes, peers = plan.ids[list(order)], plan.sizes[list(order)], plan.peers
            peers = None if peers is None else peers[list(order)]
            plan = plan._replace(ids=shuffled, sizes=sizes, peers=peers)
        down = method.download(net, self.hub, plan)
        ups = []
        groups = torch.arange(len(plan.ids)).split(len(plan.ids) if self.together else 1)
        for group in groups:
            here = plan.ids[group]
            cohort = self._cohort(here, self.rounds)
            if self.training.keeps_momentum:
                cohort.velocity = self.velocity[here]
            own, up = method.local_update(cohort, take(self.state, here), take(down, group, method.shared))
            if cohort.velocity is not None:
                self.velocity[here] = cohort.velocity
            fields = zip(self.state, own, strict=True)
            self.state = type(self.state)(*(field.index_copy(0, here, rows) for field, rows in fields))
            ups.append(up)
        up = type(ups[0])(*(torch.cat(parts) for parts in zip(*ups, strict=True)))
        sent = take(up, plan.uploads.nonzero()[:, 0])
        self.hub = method.aggregate(net, self.hub, sent, plan.of_senders())
        return plan, down, up

    @property
    def kept(self) -> Tensor:
        """Momentum as a client keeps it: no columns where it is fresh every round."""
        return self.velocity if self.training.keeps_momentum else self.velocity[:, :0]

    def models(self, ids: Tensor | None = None) -> Tensor:
        """The rows that clients would use now if they were absent from the next round: `[N, width]`."""
        shared = self.shared_download()
        state = self.state if ids is None else take(self.state, ids)
        rows: Tensor = self.method.absent(self.net, state, shared)
        return rows

    def shared_download(self) -> Any:
        """What everybody could fetch now."""
        everyone = self.clients.ids
        plan = self.method.plan(self.net, self.hub, self.clients, self.rounds + 1, lambda round: everyone)
        return take(self.method.download(self.net, self.hub, plan), NOBODY, self.method.shared)

    def loss(self) -> float:
        """Mean training loss of the clients' models."""

        def measure(m: Any, batch: Any) -> Tensor:
            total: Tensor = batch.sum(cross_entropy_per_sample(m(batch.x), batch.y))
            return total

        def bind(ids: Tensor, rows: Tensor) -> Any:
            return self.method.answer(self.net, "personalised", ids, rows)

        cohort = self._cohort(self.clients.ids, self.rounds)
        total = cohort.pass_over(self.models(), measure, bind=bind)
        return float((total / self.clients.sizes).mean())

    def inputs(self) -> Tensor:
        """Two samples for each client, `[N, 2, ...]`."""
        samples: Tensor = self.data.pool.x[: 2 * len(self.clients.ids)].unflatten(0, (-1, 2))
        return samples

    def cohort(self, ids: Tensor) -> Cohort:
        """Some clients with their data, in the round that was last."""
        return self._cohort(ids, self.rounds)

    def _cohort(self, ids: Tensor, round: int) -> Cohort:
        data = self.data.take(ids.tolist())
        width = len(ids) if self.together else 1
        return Cohort(self.net, data, ids, round=round, seed=3, training=self.training, width=width)


class Guard:
    """A method whose every call is checked to leave its arguments as they were."""

    def __init__(self, method: Method[Any, Any, Any, Any, Any], samples: Samples) -> None:
        self._method, self._samples = method, samples
        self.checked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._method, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            with untouched((arguments, self._samples), name):
                self.checked.add(name)
                return found(*arguments)

        return call


@contextmanager
def untouched(arguments: object, what: str) -> Iterator[None]:
    """Fail if any tensor in nested tuples is written to."""
    before = [tensor.clone() for tensor in tensors(arguments)]
    yield
    for tensor, kept in zip(tensors(arguments), before, strict=True):
        assert torch.equal(tensor, kept), f"{what} modified a {tuple(kept.shape)} tensor that it was given"


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)


def world(row: Row, federation: Toy, net: Net = NETS["mlp"], **settings: Any) -> tuple[World, Pool]:
    """The same federation as a run of the engines; `settings` are parts of its configuration."""
    x, y = federation.x.astype(np.float32), federation.y
    pool = Pool("toy", x, y, len(y), CLASSES, None, "toy")
    config = RunConfig(
        rounds=4,
        data={"name": "digits"},
        partition={"name": "iid", "num_clients": len(federation.clients)},
        model={"name": f"{__name__}:{net.build.__name__}", "head": "head", "buffers": net.buffers},
        personal_model=[{"name": f"{__name__}:{name}", "head": "head"} for name in row.personal],
        training=training(row),
        method=row.options,
        seed=3,
        **settings,
    )
    return make_world(config, pool, Federation(federation.clients)), pool


class Trace(NamedTuple):
    """What a run leaves, in the order of clients, whatever hosts and blocks they had."""

    records: dict[tuple[Any, ...], tuple[Any, ...]]
    messages: list[tuple[Any, ...]]
    hub: tuple[Tensor, ...]
    state: tuple[Tensor, ...]


def trace(engine: LocalEngine, rounds: Sequence[int]) -> Trace:
    """Run some rounds, every one of them evaluated before and after."""
    reports = [engine.round(round, evaluate_pre=True, evaluate_post=True) for round in rounds]
    records = dict(record for report in reports for record in records_of(report))
    messages = [message for report in reports for block in report.traffic for message in rows_of(block)]
    parts = [(host.blocks[block], state) for host in engine.hosts for block, state in host.state.items()]
    order = torch.cat([ids for ids, _ in parts]).argsort()
    state = tuple(torch.cat(field)[order] for field in zip(*(state for _, state in parts), strict=True))
    velocity = [rows for host in engine.hosts for rows in host.velocity.values()]
    state = (*state, torch.cat(velocity)[order])
    return Trace(records, sorted(messages), tuple(engine.hub.hub), state)


def same(one: Trace, other: Trace) -> bool:
    """Bit for bit; a missing accuracy equals a missing accuracy."""
    return (
        repr(sorted(one.records.items())) == repr(sorted(other.records.items()))
        and one.messages == other.messages
        and all(map(torch.equal, one.hub, other.hub))
        and all(map(torch.equal, one.state, other.state))
    )


def records_of(report: RoundReport) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Records one by one: which (round, client, point, model, split), and the figures."""
    for block in report.clients:
        for record in rows_of(block):
            yield record[:5], record[5:]


def rows_of(block: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Columns, some of them single values, as rows of plain Python values."""
    length = max(np.size(column) for column in block.values()) if any(map(np.ndim, block.values())) else 0
    columns = [
        np.broadcast_to(np.asarray(column, dtype=object), length).tolist() for column in block.values()
    ]
    return list(zip(*columns, strict=True))
