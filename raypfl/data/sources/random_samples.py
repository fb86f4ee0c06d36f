"""Random inputs and labels of any shape: for measuring time and memory, where nothing is to be learned."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from raypfl.config import StrictModel
from raypfl.data.pool import Pool, fingerprint
from raypfl.rng import key, numpy_generator


class RandomConfig(StrictModel):
    """Standard normal inputs, uniform labels that have nothing to do with them."""

    name: Literal["random"] = "random"
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 28, 28)
    """Of a sample; images are [channels, height, width]."""
    num_classes: Annotated[int, Field(ge=2)] = 10
    train_samples: PositiveInt = 5_000
    """In the training split, for all clients together."""
    test_samples: PositiveInt = 1_000

    def load(self, seed: int) -> Pool:
        """Draw the samples: the same for every seed, so that only the size of a run makes a difference."""
        draw = numpy_generator(key(0, "random data"))
        total = self.train_samples + self.test_samples
        x = draw.standard_normal((total, *self.shape), dtype=np.float32)
        y = draw.integers(self.num_classes, size=total)
        name = f"random {'x'.join(map(str, self.shape))}"
        return Pool(name, x, y, self.train_samples, self.num_classes, None, fingerprint("random", x, y))
