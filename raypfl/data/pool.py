"""The data set in memory: every sample of every client, once a node."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

CHUNK = 256
"""Rows handled at a time where float64 copies are made: they stay in cache and out of memory."""


class Pool(NamedTuple):
    """A data set, normalised. Clients are lists of its row numbers."""

    name: str
    x: np.ndarray
    """float32 [n, *shape]; images are [n, C, H, W]."""
    y: np.ndarray
    """int64 [n], in [0, num_classes)."""
    num_train: int
    """Rows [0, num_train) are the official training split, the others the official test split."""
    num_classes: int
    owner: np.ndarray | None
    """int64 [n], the client of each sample, where the data set has natural clients."""
    fingerprint: str
    """sha256 over the content as stored and over how it was normalised."""


def fingerprint(settings: str, *arrays: np.ndarray) -> str:
    """The sha256 (hex) of settings and of the dtype, shape and content of arrays, in C order."""
    digest = hashlib.sha256(settings.encode())
    for array in arrays:
        digest.update(f"/{array.dtype.str}{array.shape}".encode())
        for start in range(0, len(array), CHUNK):
            digest.update(np.ascontiguousarray(array[start : start + CHUNK]).data)
    return digest.hexdigest()
