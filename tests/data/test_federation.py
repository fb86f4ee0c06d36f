import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from raypfl.data import ClientIndices, Federation, Pool
from raypfl.errors import DataError, StorageError

NONE = np.array([], np.int64)


@pytest.fixture
def federation() -> Federation:
    return Federation(
        (
            ClientIndices(np.array([4, 1]), np.array([0]), np.array([5])),
            ClientIndices(np.array([2, 3, 4]), NONE, np.array([6, 5])),
        )
    )


def test_fingerprint_is_the_sha256_of_lengths_and_indices(federation: Federation) -> None:
    numbers = [2, 4, 1, 1, 0, 1, 5, 3, 2, 3, 4, 0, 2, 6, 5]
    assert federation.fingerprint == hashlib.sha256(struct.pack("<15q", *numbers)).hexdigest()


def test_moving_a_sample_between_lists_changes_the_fingerprint(federation: Federation) -> None:
    first, second = federation.clients
    moved = first._replace(train=first.train[:1], validation=np.array([1, 0]))
    assert Federation((moved, second)).fingerprint != federation.fingerprint


def test_sizes_counts_and_table(federation: Federation) -> None:
    y = np.array([0, 1, 0, 1, 2, 0, 2])
    pool = Pool("toy", np.zeros((7, 0), np.float32), y, 5, 3, None, "")
    assert federation.num_clients == 2
    assert federation.sizes.tolist() == [2, 3]
    assert federation.label_counts(y, 3).tolist() == [[0, 1, 1], [1, 1, 1]]
    assert federation.table(pool) == [
        (0, "train", 2, (0, 1, 1)),
        (0, "validation", 1, (1, 0, 0)),
        (0, "test", 1, (1, 0, 0)),
        (1, "train", 3, (1, 1, 1)),
        (1, "test", 2, (1, 0, 1)),
    ]


def test_saved_and_loaded_it_is_the_same(federation: Federation, tmp_path: Path) -> None:
    federation.save(tmp_path / "partition.npz")
    loaded = Federation.load(tmp_path / "partition.npz")
    assert loaded.fingerprint == federation.fingerprint
    assert loaded.clients[1].validation.dtype == np.int64
    assert [path.name for path in tmp_path.iterdir()] == ["partition.npz"]


def test_a_damaged_or_foreign_file_is_a_data_error(federation: Federation, tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    federation.save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"partition\.npz: cannot be read"):
        Federation.load(path)
    np.savez(path, lengths=np.array([[1, 0, 1]]), indices=np.arange(3))
    with pytest.raises(DataError, match="do not fit 3 indices"):
        Federation.load(path)


def test_a_folder_that_is_not_there_is_a_storage_error(federation: Federation, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the partition cannot be written"):
        federation.save(tmp_path / "absent" / "partition.npz")
