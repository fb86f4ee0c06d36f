"""What a host and the hub both know of one run, before its first round."""

# N clients.

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from raypfl.algebra.columns import COLUMN_BLOCK, sections
from raypfl.data import Federation, Pool
from raypfl.engine.timing import check_clock
from raypfl.errors import ConfigError, PlacementError
from raypfl.methods import METHODS, Clients, Method
from raypfl.models import Architecture, build
from raypfl.rng import key, numpy_generator, torch_seeded
from raypfl.settings import RunConfig
from raypfl.training import ClientData, Network, Samples
from raypfl.training.dense import dense_parts
from raypfl.training.splitting import check_split, split_at

AnyMethod = Method[Any, Any, Any, Any, Any]

WIDTH_ON_CPU = 10
"""Models a forward where it pays: a batched matrix product of a few small models beats them one by one.
A grouped convolution does not, so networks with convolutions run one model at a time on a CPU, unless they
have a trunk."""
WIDTH_WITH_TRUNK = 4
WIDTH_ON_GPU = 64
FEWEST_BLOCKS = 4
"""Clients are cut into at least this many blocks, since a block cannot be shared between hosts."""
FEWEST_WITH_TRUNK = 8
"""Of models with convolutions, whose width gains less than what a host loses that waits for another."""


class World(NamedTuple):
    """One run, as it travels to every process that takes part in it."""

    config: RunConfig
    federation: Federation
    input_shape: tuple[int, ...]
    num_classes: int
    label_counts: np.ndarray
    """Training samples a client and class, int64 `[N, C]`."""
    data: str
    """Fingerprint of the data set."""
    block: int
    """Client ids are dealt, and their rows kept, in blocks of this many."""
    width: int
    """Models a forward pass."""
    phases: bool = False
    """Whether the server's seconds are split by what they are spent on."""

    @property
    def num_clients(self) -> int:
        """N."""
        return self.federation.num_clients

    def network(self, device: torch.device) -> Network:
        """The network whose rows the clients hold."""
        return make_network(self.config, self.input_shape, self.num_classes, device)

    def method(self) -> AnyMethod:
        """The method with its options and the run's seed."""
        config = self.config
        return METHODS[config.method.name](config.method, config.seed, config.topology)

    def clients(self, device: torch.device) -> Clients:
        """What the server knows of its clients."""
        counts = torch.from_numpy(self.label_counts).to(device)
        return Clients(torch.arange(self.num_clients, device=device), counts.sum(1), counts)

    def blocks(self) -> list[Tensor]:
        """All client ids in ascending order, cut without regard to hosts."""
        return list(torch.arange(self.num_clients).split(self.block))

    def sample(self, round: int) -> Tensor:
        """The clients that are selected in a round, ascending: a uniform sample without replacement.

        Those who take part, unless a virtual clock has more selected than are wanted.
        """
        count = self.config.participation.participants(self.num_clients)
        if self.config.clock is not None:
            # 1.1 * 10 is 11.000000000000002 in binary, and means 11.
            count = min(ceil(self.config.clock.over_selection * count - 1e-9), self.num_clients)
        return _sample(key(self.config.seed, "participants", round), self.num_clients, count)

    def evaluated(self, round: int) -> Tensor:
        """The clients that are evaluated after a round, ascending."""
        wanted = self.config.evaluation.clients
        if wanted == "all":
            return torch.arange(self.num_clients)
        return _sample(key(self.config.seed, "evaluation", round), self.num_clients, wanted)

    def client_data(self, samples: Samples, ids: Tensor) -> ClientData:
        """The share of some clients in the data set."""
        own = [self.federation.clients[client] for client in ids.tolist()]
        return ClientData(
            samples,
            self.num_classes,
            [client.train for client in own],
            [client.validation for client in own],
            [client.test for client in own],
        )


def make_world(config: RunConfig, pool: Pool, federation: Federation) -> World:
    """Settle what `auto` leaves open: block and width, by rules that look at no host and no clock."""
    input_shape = pool.x.shape[1:]
    modules, in_parts = [], []
    for model in (config.model, *config.personal_model):
        with torch_seeded(0):
            module, head = build(model, input_shape, pool.num_classes)
        check_split(module, head, torch.tensor(pool.x[:2]))
        modules.append(module)
        extractor, rest = split_at(module, head)
        # As `Network` decides.
        parts = dense_parts(extractor, rest, input_shape, trunks=model.buffers != "fedbn")
        in_parts.append(parts is not None and config.training.precision != "bfloat16")
    width = _width(config, nn.ModuleList(modules), all(in_parts), federation.num_clients)
    block = min(_block(config, width, federation.num_clients), federation.num_clients)
    counts = federation.label_counts(pool.y, pool.num_classes)
    world = World(
        config, federation, input_shape, pool.num_classes, counts, pool.fingerprint, block, min(width, block)
    )
    cpu = torch.device("cpu")
    _check_norms(config)
    if config.training.augment is not None:
        config.training.augment.check(input_shape)
    world.method().check(world.network(cpu), world.clients(cpu), config.training)
    check_clock(world)
    _check_sharding(config, world.network(cpu).num_weights)
    return world


def _check_sharding(config: RunConfig, num_weights: int) -> None:
    """Refuse more servers than there are sections of a row."""
    wanted, most = config.server.sharding, len(sections(num_weights))
    if wanted > most:
        raise ConfigError(
            f"server.sharding = {wanted}: the {num_weights:,} parameters of this model are cut into {most} "
            f"section(s) of at least {COLUMN_BLOCK:,}, of which a server holds whole ones. "
            f"Use server.sharding of at most {most}."
        )


def _check_norms(config: RunConfig) -> None:
    name = config.method.name
    if config.model.buffers == "fedbn" and not METHODS[name].norms_at_home:
        able = [other for other, method in METHODS.items() if method.norms_at_home]
        raise ConfigError(
            f"model.buffers = fedbn: method {name} sends whole models; parameters of normalisation layers "
            f"can stay at home with {', '.join(able)}. Use buffers average or local, or one of these methods."
        )


def _width(config: RunConfig, models: nn.Module, in_parts: bool, num_clients: int) -> int:
    """Models a forward.

    Args:
        config: the run's.
        models: all architectures.
        in_parts: each of them is linear layers alone, or a trunk and linear layers.
        num_clients: N.
    """
    if config.engine.width != "auto":
        return config.engine.width
    participants = config.participation.participants(num_clients)
    if training_device(config).type == "cuda":
        return min(WIDTH_ON_GPU, ceil(participants / FEWEST_BLOCKS))
    if not any(isinstance(part, _ConvNd) for part in models.modules()):
        return min(WIDTH_ON_CPU, ceil(participants / FEWEST_BLOCKS))
    return min(WIDTH_WITH_TRUNK, ceil(participants / FEWEST_WITH_TRUNK)) if in_parts else 1


def _block(config: RunConfig, width: int, num_clients: int) -> int:
    """As many clients as give `width` participants on average."""
    if config.engine.block != "auto":
        return config.engine.block
    block = ceil(width * num_clients / config.participation.participants(num_clients))
    return min(block, config.engine.clients_per_actor or block)


def make_network(
    config: RunConfig, input_shape: tuple[int, ...], num_classes: int, device: torch.device
) -> Network:
    """The configured model as a network of rows, with those of clients' own models."""

    def of(model: Architecture, personal: Sequence[Network] = ()) -> Network:
        return Network(
            lambda: build(model, input_shape, num_classes).module,
            build(model, input_shape, num_classes).head,
            buffers=model.buffers,
            input_shape=input_shape,
            device=device,
            personal=personal,
            precision=config.training.precision,
        )

    return of(config.model, [of(model) for model in config.personal_model])


def training_device(config: RunConfig) -> torch.device:
    """The device that clients train on, the same wherever it is asked.

    On Ray, actors see the GPUs that they ask for and no others, whatever the driver's machine has.

    Raises:
        PlacementError: `resources.device` is cuda, and there is none.
    """
    wanted, there = config.resources.device, torch.cuda.is_available()
    if config.engine.name == "ray":
        return torch.device("cuda" if wanted != "cpu" and config.resources.num_gpus_per_actor else "cpu")
    if wanted == "cuda" and not there:
        raise PlacementError("resources.device = cuda, and this machine has no usable GPU. Use auto or cpu.")
    return torch.device("cuda" if wanted != "cpu" and there else "cpu")


def server_device(config: RunConfig) -> torch.device:
    """The device of the server: on Ray the one it asks for, else the clients'."""
    if config.engine.name == "ray" and not config.resources.num_gpus_server:
        return torch.device("cpu")
    return training_device(config)


def is_evaluated(config: RunConfig, round: int) -> bool:
    """Whether models are evaluated after `round`: every so often, and always after the last."""
    return round % config.evaluation.every == 0 or round == config.rounds


def samples_on(device: torch.device, x: np.ndarray, y: np.ndarray) -> Samples:
    """The data set on a device; on a CPU it stays where it is, and is never written."""
    return Samples(as_tensor(x).to(device), as_tensor(y).to(device))


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor on the memory of an array, which may be read-only: nothing received is modified in place."""
    with warnings.catch_warnings():
        # torch cannot protect read-only memory, and says so once; contract tests hash what was received.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def settle_arithmetic(threads: int) -> None:
    """Whatever the bits of a sum depend on: the number of threads, and what a GPU may choose or round."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def server_threads(config: RunConfig, device: torch.device, hosts: int = 1) -> int:
    """Pieces that one server works on at once, while hosts wait for it.

    Args:
        config: the run's.
        device: the server's.
        hosts: client hosts in other processes.
    """
    wanted = config.server.threads
    if device.type != "cpu":
        return 1
    if wanted != "auto":
        return wanted
    cores = len(os.sched_getaffinity(0)) // config.engine.threads
    return max(1, min(hosts, cores) // config.server.sharding)


@contextmanager
def settled_arithmetic(threads: int) -> Iterator[None]:
    """`settle_arithmetic` for a while, in a process that is somebody else's."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = torch.get_num_threads(), matmul.allow_tf32
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    settle_arithmetic(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32 = before[1]
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = flags


def _sample(draw: int, population: int, count: int) -> Tensor:
    if count == population:
        return torch.arange(population)
    chosen = numpy_generator(draw).permutation(population)[:count]
    return torch.from_numpy(np.sort(chosen))
