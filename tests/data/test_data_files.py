import hashlib
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from raypfl.data.files import Expected, read_npz, require
from raypfl.errors import DataError

CONTENT = b"the data"
FILE = Expected("set/data.bin", "md5", hashlib.md5(CONTENT, usedforsecurity=False).hexdigest())


class Download:
    """Writes the file, and counts how often it was asked to."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        time.sleep(0.05)  # long enough for others to come and see that the file is missing
        (folder / "set").mkdir()
        (folder / FILE.path).write_bytes(self.content)


def get(root: Path, download: Download | None) -> None:
    require("toy", root, [FILE], download=download, python="fetch()")


def test_missing_files_are_downloaded_once_by_many_at_the_same_time(tmp_path: Path) -> None:
    download = Download()
    everyone = [threading.Thread(target=get, args=(tmp_path / "new", download)) for _ in range(8)]
    for one in everyone:
        one.start()
    for one in everyone:
        one.join()
    assert download.calls == 1
    assert (tmp_path / "new" / FILE.path).read_bytes() == CONTENT


def test_present_files_are_not_downloaded(tmp_path: Path) -> None:
    download = Download()
    get(tmp_path, download)
    get(tmp_path, download)
    assert download.calls == 1


def test_an_interrupted_download_leaves_nothing_that_looks_like_data(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "set").mkdir()
        (folder / FILE.path).write_bytes(CONTENT[:3])
        raise ConnectionError("reset by peer")

    with pytest.raises(DataError, match=r"toy: the download into .* failed: reset by peer"):
        require("toy", tmp_path, [FILE], download=interrupted, python="fetch()")
    assert [path.name for path in tmp_path.iterdir()] == [".toy.lock"]


def test_a_missing_file_names_path_checksum_and_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        get(tmp_path, None)
    for part in (str(tmp_path / FILE.path), "missing", FILE.checksum, "-c 'fetch()'", "data.download=true"):
        assert part in str(error.value)


def test_a_corrupt_file_names_both_checksums_and_the_command_and_is_kept(tmp_path: Path) -> None:
    get(tmp_path, Download())
    (tmp_path / FILE.path).write_bytes(b"other data")
    with pytest.raises(DataError) as error:
        get(tmp_path, Download())
    found = hashlib.md5(b"other data", usedforsecurity=False).hexdigest()
    for part in (f"md5 expected {FILE.checksum}, found {found}", f"rm {tmp_path / FILE.path} && "):
        assert part in str(error.value)
    assert (tmp_path / FILE.path).read_bytes() == b"other data"


def test_a_root_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="toy: the download into"):
        get(tmp_path / "file" / "root", Download())


def test_npz_of_pickled_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{}], object))
    with pytest.raises(DataError, match="pickled"):
        read_npz(tmp_path / "a.npz", ["a"])


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_a_truncated_npz_is_a_data_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.arange(100))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.npz: cannot be read .*\n.*sha256sum"):
        read_npz(path, ["a"])


def test_an_npz_with_a_flipped_byte_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="sha256 found"):
        read_npz(path, ["a"])


def test_other_files_and_missing_arrays_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_npz(tmp_path / "absent.npz", ["a"])
    np.save(tmp_path / "single.npy", np.arange(3))
    with pytest.raises(DataError, match=r"a single \.npy array"):
        read_npz(tmp_path / "single.npy", ["a"])
    np.savez(tmp_path / "b.npz", b=np.arange(3))
    with pytest.raises(DataError, match="no array a; it has b"):
        read_npz(tmp_path / "b.npz", ["a", "b"])
