"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, downloaded and read by torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from raypfl.data.files import Expected, require
from raypfl.data.sources.images import Images, StoredConfig

_CLASSES = {
    "mnist": "MNIST",
    "fmnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}

# torchvision publishes MD5s of the compressed files only and never checks the idx files that it reads.
# These are of the official uncompressed files.
_IDX_SHA256 = {
    "MNIST": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}


class TorchvisionConfig(StoredConfig):
    """A data set of torchvision, with its official training and test split."""

    name: Literal["mnist", "fmnist", "cifar10", "cifar100", "svhn"]

    def read(self) -> Images:
        """See `ImageConfig.read`."""
        from torchvision import datasets

        class_name = _CLASSES[self.name]
        dataset = getattr(datasets, class_name)
        splits: list[dict[str, Any]] = [{"train": True}, {"train": False}]
        if self.name == "svhn":
            splits = [{"split": "train"}, {"split": "test"}]

        def download(folder: Path) -> None:
            for split in splits:
                dataset(folder, download=True, **split)

        statements = "; ".join(
            f"{class_name}({str(self.root)!r}, download=True, {option}={value!r})"
            for split in splits
            for option, value in split.items()
        )
        require(
            self.name,
            self.root,
            _files(dataset),
            download=download if self.download else None,
            python=f"from torchvision.datasets import {class_name}; {statements}",
        )
        train, test = (dataset(self.root, **split) for split in splits)
        x = np.concatenate([_channels_first(train), _channels_first(test)])
        y = np.concatenate([_labels(train), _labels(test)])
        return Images(x, y, len(_labels(train)), 100 if self.name == "cifar100" else 10, white=255.0)


def _files(dataset: Any) -> list[Expected]:
    """What torchvision reads for both splits, with checksums."""
    name = dataset.__name__
    if name in _IDX_SHA256:
        return [
            Expected(f"{name}/raw/{file}", "sha256", digest) for file, digest in _IDX_SHA256[name].items()
        ]
    if name == "SVHN":
        return [
            Expected(file, "md5", digest)
            for _, file, digest in (dataset.split_list["train"], dataset.split_list["test"])
        ]
    files = [*dataset.train_list, *dataset.test_list, [dataset.meta["filename"], dataset.meta["md5"]]]
    return [Expected(f"{dataset.base_folder}/{file}", "md5", digest) for file, digest in files]


def _channels_first(dataset: Any) -> np.ndarray:
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        return images[:, None]
    # SVHN comes channels first, CIFAR channels last.
    return images if images.shape[1] == 3 else images.transpose(0, 3, 1, 2)


def _labels(dataset: Any) -> np.ndarray:
    return np.asarray(dataset.labels if hasattr(dataset, "labels") else dataset.targets, dtype=np.int64)
