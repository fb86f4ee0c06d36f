"""Named workloads: settings whose speed is watched, on random samples of their shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from raypfl.data import Federation, Pool
from raypfl.data.federation import ClientIndices
from raypfl.engine.world import World, make_world
from raypfl.errors import ConfigError
from raypfl.explain import suggest
from raypfl.rng import key, numpy_generator
from raypfl.settings import RunConfig

SEED = 0
LR = 1e-3
HOST_CPUS = 0.5
"""What a host asks Ray for: engines that work in turn share the cores, each of their hosts has one thread."""


@dataclass(frozen=True)
class Workload:
    """One setting: who trains what on how much, with Adam, fresh every round."""

    name: str
    data: str
    """The data set whose shapes these are; its files are not needed."""
    input_shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    train_samples: int
    """A client's."""
    test_samples: int
    model: str
    epochs: int = 10
    batch_size: int = 100
    method: str = "diversifed"

    def samples(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """One client's inputs and labels, the training samples first: the same wherever they are drawn."""
        draw = numpy_generator(key(SEED, "bench samples", client=client))
        total = self.train_samples + self.test_samples
        x = draw.standard_normal((total, *self.input_shape), dtype=np.float32)
        return x, draw.integers(self.num_classes, size=total)

    def pool(self) -> Pool:
        """All clients' samples, one client after the other."""
        x, y = zip(*map(self.samples, range(self.num_clients)), strict=True)
        return Pool(
            self.name, np.concatenate(x), np.concatenate(y), 0, self.num_classes, None, f"random {self}"
        )

    def config(self, num_hosts: int = 1) -> RunConfig:
        """The workload as a run that is evaluated once a round, after local training."""
        return RunConfig.model_validate(
            {
                "seed": SEED,
                "rounds": 1,
                "method": {"name": self.method},
                "data": {"name": self.data},
                "partition": {"name": "dirichlet", "num_clients": self.num_clients},
                "model": {"name": self.model},
                "training": {
                    "epochs": self.epochs,
                    "batch_size": self.batch_size,
                    "optimizer": {"name": "adam", "lr": LR},
                },
                "evaluation": {"points": ["post"], "models": ["personalised"]},
                "engine": {"num_actors": num_hosts, "threads": 1},
                "resources": {"device": "cpu", "num_cpus_per_actor": HOST_CPUS},
            }
        )

    def world(self, pool: Pool, num_hosts: int = 1) -> World:
        """The same with the clients' samples in it."""
        return make_world(self.config(num_hosts), pool, self.federation())

    def federation(self, validation: int = 0) -> Federation:
        """Whose samples are whose; `validation` of those that are not for training are for validation."""
        total = self.train_samples + self.test_samples
        rows = np.arange(self.num_clients * total).reshape(self.num_clients, total)
        cuts = [self.train_samples, self.train_samples + validation]
        return Federation(tuple(ClientIndices(*np.split(own, cuts)) for own in rows))


_MLP = Workload(
    name="mlp",
    data="fmnist",
    input_shape=(1, 28, 28),
    num_classes=10,
    num_clients=40,
    train_samples=300,
    test_samples=100,
    model="mlp",
)
_LENET5 = Workload(
    name="lenet5",
    data="cifar10",
    input_shape=(3, 32, 32),
    num_classes=10,
    num_clients=40,
    train_samples=500,
    test_samples=100,
    model="lenet5",
)

WORKLOADS = {
    workload.name: workload
    for workload in (
        _MLP,
        replace(_MLP, name="mlp-10", batch_size=10),
        _LENET5,
        replace(_LENET5, name="lenet5-10", batch_size=10),
        replace(_LENET5, name="resnet8", model="resnet8", num_clients=8, train_samples=100, epochs=1),
        # A step takes a second: what fits a minute.
        replace(
            _LENET5,
            name="resnet18",
            model="resnet18",
            num_clients=2,
            train_samples=40,
            test_samples=20,
            epochs=2,
            batch_size=20,
        ),
    )
}
"""DiversiFed's two settings, with batches of 100 and of 10, and two residual networks; by name."""


def chosen(
    names: Iterable[str], *, epochs: int | None = None, clients: int | None = None, quick: bool = False
) -> list[Workload]:
    """The workloads of these names; all of them for none.

    Args:
        names: keys of `WORKLOADS`.
        epochs: local epochs instead of each workload's own.
        clients: so many instead of each workload's own.
        quick: few clients and one epoch, to see that everything runs; the figures mean nothing.

    Raises:
        ConfigError: there is no workload of a name.
    """
    names = list(names) or list(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"there is no workload {name!r}. {suggest(name, WORKLOADS)}")
    found = [WORKLOADS[name] for name in names]
    if quick:
        found = [replace(workload, num_clients=8, epochs=1) for workload in found]
    if clients is not None:
        found = [replace(workload, num_clients=clients) for workload in found]
    return [workload if epochs is None else replace(workload, epochs=epochs) for workload in found]
