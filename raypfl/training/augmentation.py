"""Random crops and flips of training images, drawn anew whenever a client meets a sample.

As torchvision's RandomCrop with padding and RandomHorizontalFlip, but for what the border is: images come
normalised, and it is 0 (the mean colour under `data.normalise: statistics`), where those would put black.
"""

# K clients, T steps, B samples a batch, k clients of one batch.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import pad

from raypfl.config import StrictModel
from raypfl.errors import ConfigError
from raypfl.rng import numpy_generator


class Augmentation(StrictModel):
    """What happens to training images; evaluation, statistics and validation see them as they are."""

    crop: int = Field(4, ge=0, description="pixels: shifted by up to so many in each direction; 0: not")
    flip: bool = Field(True, description="left and right exchanged with probability 1/2")

    @model_validator(mode="after")
    def _something(self) -> Augmentation:
        if not self.crop and not self.flip:
            raise ValueError("crop 0 and flip false change nothing; leave training.augment out.")
        return self

    def check(self, shape: Sequence[int]) -> None:
        """Make sure that samples of this shape can be cropped and flipped.

        Raises:
            ConfigError: they are no images, or smaller than the crop.
        """
        found = " x ".join(map(str, shape))
        if len(shape) != 3:
            raise ConfigError(
                f"training.augment is for images [channels, height, width]; samples have shape {found}. "
                "Leave it out."
            )
        if self.crop >= min(shape[1:]):
            raise ConfigError(
                f"training.augment.crop = {self.crop} shifts images of {found} out of themselves. "
                f"Use less than {min(shape[1:])}."
            )


class Changes(NamedTuple):
    """What happens to each sample of each step, `[K, T, B]`; nothing behind a client's last sample.

    On the host, so that what is drawn alike can be moved together without asking a GPU.
    """

    down: np.ndarray
    """Where the crop begins in the padded image, 0 to 2 `crop`."""
    right: np.ndarray
    """Likewise in the other direction."""
    flip: np.ndarray
    """1 where left and right are exchanged."""
    crop: int

    def apply(self, x: Tensor, rows: slice | Tensor, step: int) -> Tensor:
        """A batch `[k, B, C, H, W]` of clients `rows` as they meet it in this step."""
        num, length, channels, height, width = x.shape
        own = rows if isinstance(rows, slice) else rows.cpu().numpy()
        down, right, flip = (field[own, step, :length].reshape(-1) for field in self[:3])
        moved = x.reshape(num * length, channels, height, width)
        if self.crop:
            bordered = pad(moved, (self.crop,) * 4)
            # A copy for each shift that occurs, not an index for each pixel: ten times as fast.
            lines = torch.empty_like(bordered[:, :, :height])
            for shift, at in _alike(down, x.device):
                lines[at] = bordered[at, :, shift : shift + height]
            moved = torch.empty_like(moved)
            for shift, at in _alike(right, x.device):
                moved[at] = lines[at, :, :, shift : shift + width]
        elif flip.any():
            moved = moved.clone()
        at = torch.from_numpy(np.flatnonzero(flip)).to(x.device)
        moved[at] = moved[at].flip(3)
        return moved.view(x.shape)


def _alike(values: np.ndarray, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Every value with the places where it stands."""
    for value in np.unique(values).tolist():
        yield value, torch.from_numpy(np.flatnonzero(values == value)).to(device)


def draw_changes(options: Augmentation, shapes: Sequence[tuple[int, int]], draws: Sequence[int]) -> Changes:
    """The changes of clients with so many steps and samples a step each, by a key each."""
    steps, length = (max(sizes) for sizes in zip(*shapes, strict=True))
    drawn = np.zeros((3, len(shapes), steps, length), np.int64)
    drawn[:2] = options.crop
    for client, ((own_steps, own_length), draw) in enumerate(zip(shapes, draws, strict=True)):
        generator = numpy_generator(draw)
        shift = generator.integers(0, 2 * options.crop + 1, (2, own_steps, own_length))
        drawn[:2, client, :own_steps, :own_length] = shift
        if options.flip:
            drawn[2, client, :own_steps, :own_length] = generator.integers(0, 2, (own_steps, own_length))
    down, right, flip = drawn
    return Changes(down, right, flip, options.crop)
