"""scikit-learn's digits: 1,797 real 8x8 images, 10 classes, which come with the package.

There is no official split. Ours is fixed and stratified: floor(20 %) of each class to test, drawn with
key(0, "digits-test-split", 0, class), the same for every run, so results are comparable over seeds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from raypfl.data.sources.images import ImageConfig, Images
from raypfl.rng import key, numpy_generator

NUM_CLASSES = 10


class DigitsConfig(ImageConfig):
    """Digits of scikit-learn, [1, 8, 8], grey levels 0..16; 1,442 training and 355 test images."""

    name: Literal["digits"] = "digits"

    def read(self) -> Images:
        """See `ImageConfig.read`."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        y = bunch.target.astype(np.int64)
        is_test = np.zeros(len(y), bool)
        for label in range(NUM_CLASSES):
            rows = np.flatnonzero(y == label)
            draw = numpy_generator(key(0, "digits-test-split", client=label))
            is_test[draw.permutation(rows)[: len(rows) // 5]] = True
        order = np.argsort(is_test, kind="stable")
        x = bunch.images.astype(np.uint8)[order, None]
        return Images(x, y[order], int((~is_test).sum()), NUM_CLASSES, white=16.0)
