"""Any .npz file with MedMNIST's keys.

train_images, test_images, [val_images]  uint8 (0..255) or float (as they are), [n, H, W] or [n, H, W, C]
train_labels, test_labels, [val_labels]  integers, [n] or [n, 1], classes 0, 1, 2, ... without gaps
[label_names]                            one name a class; else the training labels say how many there are
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from raypfl.data.files import read_npz, verify_sha256
from raypfl.data.sources.images import ImageConfig, Images
from raypfl.errors import DataError

ValidationSplit = Literal["append", "drop"]


class NpzConfig(ImageConfig):
    """An .npz file of your own."""

    name: Literal["npz"] = "npz"
    file: Path
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    """If given, the file must have this checksum."""
    val_split: ValidationSplit = "append"
    """Whether `val_*`, if there, is appended to the training split or left out."""

    @field_validator("file")
    @classmethod
    def _absolute(cls, file: Path) -> Path:
        """A saved configuration means the same file in whatever folder it is read."""
        return file.expanduser().absolute()

    def read(self) -> Images:
        """See `ImageConfig.read`."""
        if self.sha256 is not None:
            verify_sha256(self.file, self.sha256)
        return read_images(self.file, self.val_split)


def read_images(path: Path, val_split: ValidationSplit, num_classes: int | None = None) -> Images:
    """Read a file with MedMNIST's keys.

    Args:
        path: the file.
        val_split: what to do with `val_images` and `val_labels`.
        num_classes: where it is known; else `label_names` or the training labels decide.

    Raises:
        DataError: the file cannot be read or has another form.
    """
    required = ["train_images", "train_labels", "test_images", "test_labels"]
    arrays = read_npz(path, required, ["val_images", "val_labels", "label_names"])
    splits = ["train", "test"]
    if val_split == "append" and "val_images" in arrays:
        splits.insert(1, "val")
        if "val_labels" not in arrays:
            raise DataError(f"{path}: val_images without val_labels. Add them, or set data.val_split=drop.")
    images = [_images(path, f"{split}_images", arrays[f"{split}_images"]) for split in splits]
    labels = [_labels(path, f"{split}_labels", arrays[f"{split}_labels"]) for split in splits]
    for split, x, y in zip(splits, images, labels, strict=True):
        if len(x) != len(y):
            raise DataError(
                f"{path}: {len(x)} {split}_images but {len(y)} {split}_labels. Save one label an image."
            )
        if (x.dtype, x.shape[1:]) != (images[0].dtype, images[0].shape[1:]):
            raise DataError(
                f"{path}: {split}_images are {x.dtype} {list(x.shape[1:])}, train_images {images[0].dtype} "
                f"{list(images[0].shape[1:])} (channels first). All splits need the same form."
            )
    train_labels = np.concatenate(labels[:-1])
    if num_classes is None:
        num_classes = (
            len(arrays["label_names"]) if "label_names" in arrays else int(train_labels.max(initial=-1)) + 1
        )
    white = 255.0 if images[0].dtype == np.uint8 else 1.0
    return Images(np.concatenate(images), np.concatenate(labels), len(train_labels), num_classes, white)


def _images(path: Path, key: str, images: np.ndarray) -> np.ndarray:
    """Channels first, without a copy."""
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"{path}: {key} is {images.dtype}. Images must be uint8 (0..255) or floating point.")
    if images.ndim == 3:
        return images[:, None]
    # [n, 3, 32, 32] would pass for 3 x 32 pixels of 32 channels.
    if images.ndim != 4 or images.shape[3] > 4:
        raise DataError(
            f"{path}: {key} has shape {list(images.shape)}. Images must be [n, height, width] or "
            "[n, height, width, channels] with 1 to 4 channels; transpose channels-first arrays first."
        )
    return np.moveaxis(images, 3, 1)


def _labels(path: Path, key: str, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {key} is {labels.dtype} {list(labels.shape)}. Labels must be integers, [n] or [n, 1] "
            "(one class an image; multi-label data are not supported)."
        )
    return labels.astype(np.int64)
