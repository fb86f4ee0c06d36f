"""What all image sources have in common: their options, their checks, and how they become a `Pool`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from raypfl.config import StrictModel
from raypfl.data.normalise import PUBLISHED, Normalisation, apply_scale, find_scale
from raypfl.data.pool import Pool, fingerprint
from raypfl.errors import DataError


class Images(NamedTuple):
    """Images as stored, training split first."""

    x: np.ndarray
    """[n, C, H, W], uint8 or float."""
    y: np.ndarray
    """int64 [n]."""
    num_train: int
    num_classes: int
    white: float
    """The value of `x` that counts as 1."""


class ImageConfig(StrictModel, ABC):
    """Options of every image source."""

    name: str
    normalise: Normalisation = "statistics"
    """Which offset and divisor; see `raypfl.data.normalise`."""
    pad: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Zero-pad the normalised images to this height and width (28 -> 32: two pixels on each side)."""

    @abstractmethod
    def read(self) -> Images:
        """The images as stored.

        Raises:
            DataError: a file is missing, corrupt or of the wrong form.
        """

    @model_validator(mode="after")
    def _has_published_constants(self) -> Self:
        if self.normalise == "published" and self.name not in PUBLISHED:
            known = ", ".join(PUBLISHED)
            raise ValueError(
                f"normalise = published: no constants were published for {self.name}, only for {known}. "
                "Use statistics (the training split's own)."
            )
        return self

    def load(self, seed: int) -> Pool:
        """Read, check and normalise; the same pool for every seed."""
        images = self.read()
        check(self.name, images)
        scale = find_scale(self.normalise, self.name, images.x, images.num_train, images.white)
        settings = f"{images.num_train}/{images.num_classes}/{images.white:g}/{self.normalise}/{self.pad}"
        return Pool(
            self.name,
            apply_scale(images.x, scale, self.pad),
            images.y,
            images.num_train,
            images.num_classes,
            owner=None,
            fingerprint=fingerprint(settings, images.x, images.y),
        )


class StoredConfig(ImageConfig):
    """Options of sources that keep their files in a folder and can download them."""

    root: Path = Path("~/.cache/raypfl")
    """The folder of the files, laid out as the library that downloads them does."""
    download: bool = True
    """Download what is missing, once a node, with checksums."""

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: Path) -> Path:
        """A saved configuration means the same folder wherever it is read."""
        return root.expanduser().absolute()


def check(name: str, images: Images) -> None:
    """Refuse what would fail, or mislead, much later.

    Raises:
        DataError: lengths differ, an empty split, labels out of range, a class without a training image,
            values that are not finite.
    """
    if len(images.x) != len(images.y):
        raise DataError(
            f"{name}: {len(images.x)} images but {len(images.y)} labels. There must be one label an image."
        )
    for split, rows in (("training", slice(0, images.num_train)), ("test", slice(images.num_train, None))):
        labels = images.y[rows]
        if not len(labels):
            raise DataError(f"{name}: the {split} split is empty. It needs at least one image.")
        wrong = (labels < 0) | (labels >= images.num_classes)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"{name}: label {labels[row]} of {split} image {row} is outside 0..{images.num_classes - 1} "
                f"({int(wrong.sum())} such labels). Classes are numbered from 0, and all occur in the "
                "training split."
            )
    counts = np.bincount(images.y[: images.num_train], minlength=images.num_classes)
    if not counts.all():
        absent = np.flatnonzero(counts == 0).tolist()
        raise DataError(
            f"{name}: {len(absent)} of {images.num_classes} classes have no training image: "
            f"{', '.join(map(str, absent[:10]))}. Number the classes 0, 1, 2, ... without gaps."
        )
    if images.x.dtype.kind == "f" and not np.isfinite(images.x).all():
        raise DataError(f"{name}: images hold NaN or infinite values. Remove them before saving the file.")
