"""Who holds which samples: the result of a partition."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raypfl.data.files import read_npz
from raypfl.data.pool import Pool
from raypfl.errors import DataError, StorageError


class ClientIndices(NamedTuple):
    """One client's samples: int64 row numbers of the pool."""

    train: np.ndarray
    validation: np.ndarray
    """Taken from the training samples; may be empty."""
    test: np.ndarray


class SplitRow(NamedTuple):
    """One line of the printable table."""

    client: int
    split: str
    samples: int
    per_class: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Federation:
    """The samples of every client. Two are the same if their fingerprints are."""

    clients: tuple[ClientIndices, ...]

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.clients)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Training samples of each client, int64 [N]."""
        return np.array([len(client.train) for client in self.clients], np.int64)

    def label_counts(self, y: np.ndarray, num_classes: int) -> np.ndarray:
        """Training samples of each client and class, int64 [N, C]; `y` is the pool's."""
        return np.stack([np.bincount(y[client.train], minlength=num_classes) for client in self.clients])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of all lists in order: each its length, then its indices, as little-endian int64."""
        digest = hashlib.sha256()
        for rows in self._lists():
            digest.update(np.array(len(rows), "<i8").tobytes())
            digest.update(rows.astype("<i8").tobytes())
        return digest.hexdigest()

    def table(self, pool: Pool) -> list[SplitRow]:
        """Samples and counts per class of every client's non-empty splits."""
        return [
            SplitRow(
                i, split, len(rows), tuple(np.bincount(pool.y[rows], minlength=pool.num_classes).tolist())
            )
            for i, client in enumerate(self.clients)
            for split, rows in client._asdict().items()
            if len(rows)
        ]

    def save(self, path: Path) -> None:
        """Write an .npz file: `lengths` [N, 3] and `indices`, all lists one after the other.

        Raises:
            StorageError: it cannot be written.
        """
        lengths = np.array([[len(rows) for rows in client] for client in self.clients], np.int64)
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, lengths=lengths, indices=np.concatenate(list(self._lists())))
            os.replace(partial, path)
        except OSError as error:
            raise StorageError(
                f"{path}: the partition cannot be written: {error}. Check the folder."
            ) from error

    @classmethod
    def load(cls, path: Path) -> Federation:
        """Read what `save` wrote.

        Raises:
            DataError: it is missing or damaged.
        """
        arrays = read_npz(path, ["lengths", "indices"])
        lengths, indices = arrays["lengths"], arrays["indices"]
        if lengths.ndim != 2 or lengths.shape[1] != 3 or lengths.sum() != len(indices):
            raise DataError(
                f"{path}: lengths {list(lengths.shape)} do not fit {len(indices)} indices; it is not a saved "
                "partition."
            )
        ends = list(accumulate(lengths.ravel().tolist()))
        lists = np.split(indices.astype(np.int64), ends[:-1])
        return cls(tuple(ClientIndices(*lists[i : i + 3]) for i in range(0, len(lists), 3)))

    def _lists(self) -> Iterator[np.ndarray]:
        return (rows for client in self.clients for rows in client)
