"""Normalisation of images: one subtraction and one division, computed in float64, kept in float32.

    statistics  mean and population sd of each channel over the training split
    half        mean = sd = 0.5 of white
    pixel       (x - mean) / (sd + 0.001), each pixel over training and test split together, in the units
                of the file (grey levels 0..255 for uint8), as pFedMe and PFML do
    published   the constants that papers print, where there are any
    none        scaled to [0, 1]

Padding comes after normalising: a border of zeros is what a convolution with that padding would see, so
`pad: 32` on 28x28 images and `padding=2` in the first convolution are the same network.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from raypfl.data.pool import CHUNK
from raypfl.errors import DataError

Normalisation = Literal["statistics", "half", "pixel", "published", "none"]

_MNIST = ((0.1307,), (0.3081,))
PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": _MNIST,
    "fmnist": _MNIST,
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "svhn": ((0.4376, 0.4437, 0.4728), (0.1980, 0.2010, 0.1970)),
    "pathmnist": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and sd per channel, white = 1, in FedPAC's (MNIST, Fashion-MNIST, CIFAR-10) and UA-PDFL's code."""


class Scale(NamedTuple):
    """`(x - offset) / divisor`, float64, broadcastable to one image [C, H, W], in the units of the file."""

    offset: np.ndarray
    divisor: np.ndarray


def find_scale(method: Normalisation, name: str, images: np.ndarray, num_train: int, white: float) -> Scale:
    """The offset and divisor that `method` means for these images.

    Args:
        method: see the module's docstring.
        name: the data set, to look up published constants.
        images: [n, C, H, W] in the units of the file.
        num_train: rows [0, num_train) are the training split.
        white: the value that counts as 1 (255 for uint8).

    Raises:
        DataError: a channel is constant, so it has no sd to divide by.
    """
    if method == "statistics":
        mean, sd = _moments(images[:num_train], (0, 2, 3))
        if not sd.all():
            channel = int(np.flatnonzero(sd == 0)[0])
            raise DataError(
                f"{name}: channel {channel} is constant ({mean.flat[channel]:g}) over the training split, so "
                "data.normalise = statistics would divide by zero. Use data.normalise=half or none."
            )
        return Scale(mean, sd)
    if method == "pixel":
        mean, sd = _moments(images, (0,))
        return Scale(mean, sd + 0.001)
    if method == "published":
        mean, sd = (np.array(constants)[:, None, None] * white for constants in PUBLISHED[name])
        return Scale(mean, sd)
    if method == "half":
        return Scale(np.array(white / 2), np.array(white / 2))
    return Scale(np.array(0.0), np.array(float(white)))


def apply_scale(images: np.ndarray, by: Scale, pad: int | None) -> np.ndarray:
    """Normalise, and pad with zeros to `pad` x `pad` (an odd row or column goes to the bottom and right).

    Args:
        images: [n, C, H, W] in the units of the file; read in chunks, never copied as a whole.
        by: from `find_scale`.
        pad: the new height and width, or None.

    Returns:
        float32 [n, C, pad or H, pad or W], contiguous.

    Raises:
        DataError: `pad` is smaller than the images.
    """
    samples, channels, height, width = images.shape
    if pad is not None and pad < max(height, width):
        raise DataError(
            f"data.pad = {pad} is smaller than the images ({height} x {width}). Use at least their size."
        )
    out = np.zeros((samples, channels, pad or height, pad or width), np.float32)
    top, left = (out.shape[2] - height) // 2, (out.shape[3] - width) // 2
    inner = out[:, :, top : top + height, left : left + width]
    for start in range(0, samples, CHUNK):
        part = slice(start, start + CHUNK)
        inner[part] = (images[part].astype(np.float64) - by.offset) / by.divisor
    return out


def _moments(images: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population sd over `axes` (0 among them), in two passes; the other axes are kept."""
    count = np.prod([images.shape[axis] for axis in axes])

    def total(center: np.ndarray | float, power: int) -> np.ndarray:
        sums = np.zeros([1 if axis in axes else images.shape[axis] for axis in range(1, images.ndim)])
        for start in range(0, len(images), CHUNK):
            part = images[start : start + CHUNK].astype(np.float64) - center
            sums += (part**power).sum(axis=axes, keepdims=True)[0]
        return sums

    mean = total(0.0, 1) / count
    return mean, np.sqrt(total(mean, 2) / count)
