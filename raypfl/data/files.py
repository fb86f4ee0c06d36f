"""Data files on disk: checksums, one download a node, and archives that are never unpickled."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shlex
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raypfl.errors import DataError


class Expected(NamedTuple):
    """A file that must be there with exactly this content."""

    path: str
    """Relative to the root."""
    algorithm: str
    """`md5` or `sha256`."""
    checksum: str


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """The file's checksum in hex, read in pieces."""
    # Not for security: MD5 is what torchvision and MedMNIST publish.
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def require(
    name: str,
    root: Path,
    files: Sequence[Expected],
    *,
    download: Callable[[Path], object] | None,
    python: str,
) -> None:
    """Make sure that all files are under root and intact.

    Files that are there are never overwritten. Missing ones are downloaded into a scratch folder under a
    lock and moved when they are complete, so processes of one node download once, and an interrupted
    download leaves nothing behind that looks like data.

    Args:
        name: the data set, for the lock and for messages.
        root: the folder.
        files: what must be in it.
        download: puts the files, with the same relative paths, into the folder that it is given; None
            when downloading is not allowed.
        python: the Python statement that downloads the files into root, for messages.

    Raises:
        DataError: a file is missing and cannot be downloaded, or its content is not the expected one.
    """
    mend = f"{shlex.quote(sys.executable)} -c {shlex.quote(python)}"
    if download is not None and _missing(root, files):
        try:
            with _lock(root, name):
                if missing := _missing(root, files):
                    _download(root, missing, download)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            raise DataError(
                f"{name}: the download into {root} failed: {error}\n    Try again, or put the files there "
                f"and set data.root. With a connection this command downloads them: {mend}"
            ) from error
    for file in files:
        _verify(name, root / file.path, file, mend)


def read_npz(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file; pickled objects are refused.

    Raises:
        DataError: no such file, not a readable archive, or a required array is not in it.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check the path, or copy the file there.")
    try:
        # Opened here: numpy.load leaves its own file open when the archive is damaged.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{path}: a single .npy array, not an .npz archive. Save it with numpy.savez."
                )
            if absent := [key for key in required if key not in archive.files]:
                raise DataError(
                    f"{path}: no array {', '.join(absent)}; it has {', '.join(archive.files) or 'none'}. "
                    f"An .npz file here needs {', '.join(required)}."
                )
            return {key: archive[key] for key in (*required, *optional) if key in archive.files}
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(
            f"{path}: cannot be read as an .npz archive: {error} (sha256 found: {checksum(path)}).\n    It "
            f"is truncated, damaged or holds pickled objects. Copy it again from its source and compare: "
            f"sha256sum {shlex.quote(str(path))}"
        ) from error


def verify_sha256(path: Path, expected: str) -> None:
    """Compare a user's own file with the checksum that the configuration gives.

    Raises:
        DataError: they differ, or there is no such file.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: no such file (expected sha256 {expected}). Check the path, or copy the file there."
        )
    if (found := checksum(path)) != expected.lower():
        raise DataError(
            f"{path}: sha256 expected {expected}, found {found}.\n    Copy the file again from its source "
            f"and compare with: sha256sum {shlex.quote(str(path))}. If the file is right, correct "
            "data.sha256."
        )


def _missing(root: Path, files: Sequence[Expected]) -> list[Expected]:
    return [file for file in files if not (root / file.path).is_file()]


def _verify(name: str, path: Path, file: Expected, mend: str) -> None:
    if not path.is_file():
        raise DataError(
            f"{name}: {path} is missing (expected {file.algorithm} {file.checksum}).\n    Set data.root to "
            f"where the files are, set data.download=true, or run: {mend}"
        )
    if (found := checksum(path, file.algorithm)) != file.checksum:
        raise DataError(
            f"{name}: {path} is corrupt: {file.algorithm} expected {file.checksum}, found {found}.\n    "
            f"Run: rm {shlex.quote(str(path))} && {mend}"
        )


def _download(root: Path, missing: Sequence[Expected], download: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as scratch:
        download(Path(scratch))
        for file in missing:
            (root / file.path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(scratch) / file.path, root / file.path)


@contextmanager
def _lock(root: Path, name: str) -> Iterator[None]:
    """Wait for, then hold, the only right on this node to download the data set into root."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
