"""Data sets (`load`) and how they are dealt to clients (`partition`)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from raypfl.data.federation import ClientIndices, Federation, SplitRow
from raypfl.data.partitions.base import Draw, Partition, whole
from raypfl.data.partitions.decentralised import FixedClasses, Iid, Shards
from raypfl.data.partitions.dirichlet_clients import DirichletClients, DirichletMerged
from raypfl.data.partitions.fedpac import FedPac
from raypfl.data.partitions.independent import Dirichlet, Pathological, Practical
from raypfl.data.partitions.pfml import Natural, Pairs, PfmlCifar10
from raypfl.data.partitions.ways_shots import WaysShots
from raypfl.data.pool import Pool
from raypfl.data.sources.digits import DigitsConfig
from raypfl.data.sources.medmnist_sets import MedmnistConfig
from raypfl.data.sources.npz import NpzConfig
from raypfl.data.sources.random_samples import RandomConfig
from raypfl.data.sources.synthetic import SyntheticConfig
from raypfl.data.sources.torchvision_sets import TorchvisionConfig
from raypfl.errors import PartitionError
from raypfl.rng import key, numpy_generator

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "ClientIndices",
    "DataConfig",
    "Federation",
    "PartitionConfig",
    "Pool",
    "SplitRow",
    "load",
    "partition",
]

DataConfig = Annotated[
    DigitsConfig | TorchvisionConfig | MedmnistConfig | NpzConfig | SyntheticConfig | RandomConfig,
    Field(discriminator="name"),
]

PartitionConfig = Annotated[
    Pathological
    | Dirichlet
    | Practical
    | DirichletClients
    | DirichletMerged
    | Iid
    | Shards
    | FixedClasses
    | FedPac
    | WaysShots
    | Pairs
    | PfmlCifar10
    | Natural,
    Field(discriminator="name"),
]

SOURCES: dict[str, str] = {
    "digits": "scikit-learn's digits, 1x8x8, 10 classes, 1,797 images; no download",
    "mnist": "MNIST, 1x28x28, 10 classes, 60,000 + 10,000 images",
    "fmnist": "Fashion-MNIST, 1x28x28, 10 classes, 60,000 + 10,000 images",
    "cifar10": "CIFAR-10, 3x32x32, 10 classes, 50,000 + 10,000 images",
    "cifar100": "CIFAR-100, 3x32x32, 100 classes, 50,000 + 10,000 images",
    "svhn": "SVHN without the extra part, 3x32x32, 10 classes, 73,257 + 26,032 images",
    "pathmnist": "MedMNIST: colon pathology, 3x28x28, 9 classes, 89,996 + 7,180 images",
    "bloodmnist": "MedMNIST: blood cells, 3x28x28, 8 classes, 11,959 + 3,421 images",
    "breastmnist": "MedMNIST: breast ultrasound, 1x28x28, 2 classes, 546 + 156 images",
    "dermamnist": "MedMNIST: skin lesions, 3x28x28, 7 classes, 7,007 + 2,005 images",
    "octmnist": "MedMNIST: retinal OCT, 1x28x28, 4 classes, 97,477 + 1,000 images",
    "organamnist": "MedMNIST: abdominal CT, axial, 1x28x28, 11 classes, 34,561 + 17,778 images",
    "organcmnist": "MedMNIST: abdominal CT, coronal, 1x28x28, 11 classes, 12,975 + 8,216 images",
    "organsmnist": "MedMNIST: abdominal CT, sagittal, 1x28x28, 11 classes, 13,932 + 8,827 images",
    "pneumoniamnist": "MedMNIST: chest X-ray, 1x28x28, 2 classes, 4,708 + 624 images",
    "retinamnist": "MedMNIST: fundus camera, 3x28x28, 5 grades, 1,080 + 400 images",
    "tissuemnist": "MedMNIST: kidney cortex cells, 1x28x28, 8 classes, 165,466 + 47,280 images",
    "npz": "a file of your own (data.file) with MedMNIST's keys",
    "synthetic": "synthetic(alpha, beta) of Li et al., 60 features, 10 classes, natural clients",
    "random": "random samples of any shape (data.shape): nothing to learn, for measuring time and memory",
}
"""Every data source, with one line each."""

PARTITIONS: dict[str, str] = {
    "pathological": "a few classes a client, drawn, in equal numbers; official splits (DiversiFed)",
    "dirichlet": "class shares of each client from a Dirichlet; official splits (DiversiFed)",
    "practical": "groups of clients with 80 % of dominant classes; official splits (DiversiFed)",
    "dirichlet_clients": "each class over clients by a Dirichlet, size cap; 80/20 of training (UA-PDFL)",
    "dirichlet_merged": "each class over clients by a Dirichlet, size cap; 75/25 of both (FedTC)",
    "iid": "a random equal split; 80/20 of training (UA-PDFL)",
    "shards": "sorted by label, two contiguous shards a client; 80/20 of training (FedAvg, UA-PDFL)",
    "fixclass": "a few classes a client, drawn, shared samples; 80/20 of training (UA-PDFL)",
    "fedpac": "s % over all classes, the rest over a dominant group; official splits, disjoint (FedPAC)",
    "ways_shots": "several classes a client, drawn, about as many of each; official splits (FedProto)",
    "pairs": "fixed pairs of classes; 75/25 of both (PFML)",
    "pfml_cifar10": "classes i, i+1, i+2 in log-normal numbers, 20 clients; 75/25 of both (pFedMe, PFML)",
    "natural": "the data set's own clients; 75/25 (synthetic)",
}
"""Every partition, with one line each."""


def load(config: DataConfig, seed: int) -> Pool:
    """Read and normalise a data set.

    Args:
        config: which one, and how.
        seed: the run's; matters only to generated data that ask for it (synthetic with `seed: null`).

    Raises:
        DataError: a file is missing, corrupt or of the wrong form.
    """
    return config.load(seed)


def partition(config: PartitionConfig, pool: Pool, seed: int) -> Federation:
    """Deal the pool to clients.

    Args:
        config: how; its own seed goes before `seed`.
        pool: the data.
        seed: the run's.

    Raises:
        PartitionError: it cannot be drawn from this pool, or leaves a client without samples of a split.
    """
    seed = seed if config.seed is None else config.seed
    try:
        draws = config.draw(pool, seed)
        clients = [_with_validation(config, draw, seed, client) for client, draw in enumerate(draws)]
    except PartitionError as error:
        raise PartitionError(f"partition {config.name} of {pool.name}: {error}") from error
    return Federation(tuple(clients))


def _with_validation(config: Partition, draw: Draw, seed: int, client: int) -> ClientIndices:
    """Hold out whole samples: the copies of one that was drawn twice stay on one side."""
    for split, rows in draw._asdict().items():
        if not len(rows):
            raise PartitionError(
                f"client {client} of {config.num_clients} gets no {split} sample; it needs at least one. "
                "Lower partition.num_clients, or use more data."
            )
    if not config.validation_fraction:
        return ClientIndices(draw.train, draw.train[:0], draw.test)
    samples, sample_of = np.unique(draw.train, return_inverse=True)
    if len(samples) < 2:
        raise PartitionError(
            f"client {client} has 1 training sample, too few for partition.validation_fraction = "
            f"{config.validation_fraction:g}. Set it to 0, or lower partition.num_clients."
        )
    held_out = min(max(whole(config.validation_fraction * len(samples)), 1), len(samples) - 1)
    order = numpy_generator(key(seed, "partition validation", client=client)).permutation(len(samples))
    is_validation = order[sample_of] < held_out
    return ClientIndices(draw.train[~is_validation], draw.train[is_validation], draw.test)
