"""Where the files of a data set are, and what is said if they are only a part of it, or missing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from raypfl.data.files import read_npz

LAYOUTS = {
    "mnist": "MNIST/raw/train-images-idx3-ubyte",
    "fmnist": "FashionMNIST/raw/train-images-idx3-ubyte",
    "cifar10": "cifar-10-batches-py/data_batch_1",
    "cifar100": "cifar-100-python/train",
    "svhn": "train_32x32.mat",
    "pathmnist": "pathmnist.npz",
}
"""A file, below the folder of the data, by which one sees that the official ones are there."""


def located(data: dict[str, Any], folder: Path | None) -> tuple[dict[str, Any] | None, str]:
    """Options of the data source that read from a folder, and a remark.

    The official files if they are there; else an .npz file with MedMNIST's keys that lies in the folder or
    one below it and is called after the data set, such as `cifar10.npz` or `cifar10/part.npz`: a part of it.

    Args:
        data: options as the paper has them.
        folder: None leaves them as they are: the source's own folder, with a download if need be.

    Returns:
        The options, None where there is no file; what to remark.
    """
    name = data["name"]
    if folder is None or name not in LAYOUTS:
        return data, ""
    if (folder / LAYOUTS[name]).is_file():
        return {**data, "root": str(folder), "download": False}, ""
    part = _part(folder, name)
    if part is None:
        return None, f"no data: {name} is not in the given folder"
    # Constants that were published for the official files mean nothing to a source of any name.
    normalise = {key: value for key, value in data.items() if key == "normalise" and value != "published"}
    train, test = _sizes(part)
    remark = f"data: not the official {name} but {train:,} training and {test:,} test images of {part.name}"
    return {"name": "npz", "file": str(part), **normalise}, remark


def _part(folder: Path, name: str) -> Path | None:
    return next(iter(sorted({*folder.glob(f"{name}.npz"), *folder.glob(f"{name}/*.npz")})), None)


@cache
def _sizes(part: Path) -> tuple[int, int]:
    """Training and test images of a file."""
    labels = read_npz(part, ["train_labels", "test_labels"])
    return len(labels["train_labels"]), len(labels["test_labels"])
