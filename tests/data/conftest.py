from collections.abc import Callable, Sequence

import numpy as np
import pytest

from raypfl.data import Pool

MakePool = Callable[..., Pool]


@pytest.fixture
def make_pool() -> MakePool:
    """A pool of labels alone: so many training and test samples of each class, in mixed order."""

    def make(train: Sequence[int], test: Sequence[int], owner: np.ndarray | None = None) -> Pool:
        mix = np.random.default_rng(0)
        y = np.concatenate([mix.permutation(np.repeat(np.arange(len(c)), c)) for c in (train, test)])
        return Pool("toy", np.zeros((len(y), 0), np.float32), y, sum(train), len(train), owner, "")

    return make
