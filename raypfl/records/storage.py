"""Where runs are kept: a folder of this machine, or a place on any file system that pyarrow knows.

`/data/runs` and `file:///data/runs` are `pathlib.Path`s. `s3://bucket/runs`, `gs://bucket/runs`,
`hdfs://host/runs`, `abfs://...`, and what fsspec adds to them (`memory://`, `sftp://host/runs`) are
`Remote`s, which have that part of pathlib's words that records need. What is written there is written here
first: a file arrives whole or not at all, also where there is no atomic rename.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pyarrow as pa
from pyarrow import fs

from raypfl.errors import StorageError

T = TypeVar("T")

ATOMIC = frozenset({"s3", "gcs", "abfs"})
"""File systems on which a file that is being written has no name before it is complete."""

FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
"""Refusals that will be the same in a second."""

PAUSES_SECONDS = (0.2, 0.8, 3.2)
"""Before another attempt at something that failed."""


class Remote:
    """A place that is not on this machine's own file system. Travels between processes as its address."""

    def __init__(self, uri: str) -> None:
        """Name a place; nothing is looked up.

        Raises:
            StorageError: there is a password in the address.
        """
        split = urlsplit(uri)
        if split.password:
            raise StorageError(
                f"storage_path = {split.scheme}://...@{split.hostname}{split.path} has a password in it, "
                "which would be written into every config.yaml. Leave it to the environment, as for instance "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY do, or to a profile of the machine."
            )
        self._scheme, self._netloc, self._query = split.scheme, split.netloc, split.query
        self._parts = tuple(part for part in split.path.split("/") if part)

    def __truediv__(self, below: str) -> Remote:
        return self._at((*self._parts, *below.split("/")))

    def __str__(self) -> str:
        path = "".join(f"/{part}" for part in self._parts)
        return f"{self._scheme}://{self._netloc}{path}" + (f"?{self._query}" if self._query else "")

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and str(self) == str(other)

    def __lt__(self, other: Remote) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (str(self),)

    @property
    def name(self) -> str:
        """The last part."""
        return self._parts[-1] if self._parts else self._netloc

    @property
    def parent(self) -> Remote:
        """The place that it is in."""
        return self._at(self._parts[:-1])

    def with_name(self, name: str) -> Remote:
        """The place beside it."""
        return self.parent / name

    @property
    def file_system(self) -> fs.FileSystem:
        """What reads and writes it.

        Raises:
            StorageError: there is no file system for this kind of address.
        """
        return _connected(self._scheme, self._netloc, self._query)[0]

    @property
    def path(self) -> str:
        """Its name on that file system."""
        base = _connected(self._scheme, self._netloc, self._query)[1]
        return "/".join((base.rstrip("/"), *self._parts))

    @property
    def is_atomic(self) -> bool:
        """Whether a file has its name only once it is complete."""
        return self.file_system.type_name in ATOMIC

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return bool(self._info().type != fs.FileType.NotFound)

    def is_file(self) -> bool:
        """Whether there is a file."""
        return bool(self._info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Whether there is a folder; on object stores, whether there is anything in it."""
        return bool(self._info().type == fs.FileType.Directory)

    def size(self) -> int:
        """Bytes of the file."""
        return int(self._info().size)

    def iterdir(self) -> Iterator[Remote]:
        """What is in the folder, by name; nothing if it is not there."""
        wanted = fs.FileSelector(self.path, allow_not_found=True)
        names = sorted(info.base_name for info in retrying(lambda: self.file_system.get_file_info(wanted)))
        return (self / name for name in names)

    def glob(self, pattern: str) -> Iterator[Remote]:
        """What is below it and has such a name, as in `round-*/manifest.json`."""
        first, _, rest = pattern.partition("/")
        if not re.search(r"[*?[]", first):
            found = self / first
            yield from found.glob(rest) if rest else filter(Remote.exists, [found])
            return
        for inside in self.iterdir():
            if fnmatchcase(inside.name, first):
                yield from inside.glob(rest) if rest else [inside]

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder, where there is such a thing.

        Raises:
            FileExistsError: it is there, and that is not `exist_ok`; of two who ask at once both may be told
                that it is not.
        """
        if not exist_ok and self.exists():
            raise FileExistsError(17, "File exists", str(self))
        retrying(lambda: self.file_system.create_dir(self.path, recursive=parents))

    def read_bytes(self) -> bytes:
        """All of the file."""

        def read() -> bytes:
            with self.open() as file:
                content: bytes = file.read()
                return content

        return retrying(read)

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of the file as text."""
        return self.read_bytes().decode(encoding)

    def open(self) -> Any:
        """The file, to read bytes from."""
        return self.file_system.open_input_stream(self.path)

    def fetch(self, local: Path) -> None:
        """Copy the file to this machine."""
        here = fs.LocalFileSystem()
        retrying(
            lambda: fs.copy_files(
                self.path, str(local), source_filesystem=self.file_system, destination_filesystem=here
            )
        )

    def put(self, local: Path) -> None:
        """Make the file what the local file is, in one step."""
        if self.is_atomic:
            return retrying(lambda: self._copy_from(local))
        partial = self.with_name(f".{self.name}.tmp")

        def put() -> None:
            self.file_system.create_dir(self.parent.path)
            partial._copy_from(local)
            self.file_system.move(partial.path, self.path)

        retrying(put)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the file."""
        if not (missing_ok and not self.exists()):
            retrying(lambda: self.file_system.delete_file(self.path))

    def rmtree(self) -> None:
        """Remove the folder with everything in it."""
        retrying(lambda: self.file_system.delete_dir(self.path))

    def _at(self, parts: tuple[str, ...]) -> Remote:
        there = Remote.__new__(Remote)
        there._scheme, there._netloc, there._query = self._scheme, self._netloc, self._query
        there._parts = parts
        return there

    def _info(self) -> fs.FileInfo:
        return retrying(lambda: self.file_system.get_file_info(self.path))

    def _copy_from(self, local: Path) -> None:
        here = fs.LocalFileSystem()
        fs.copy_files(str(local), self.path, source_filesystem=here, destination_filesystem=self.file_system)


Place = Path | Remote
"""Where something is kept."""


def place(path: str | os.PathLike[str] | Remote) -> Place:
    """A folder or file of this machine as an absolute path, or a place elsewhere."""
    if isinstance(path, Remote):
        return path
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(url2pathname(urlsplit(text).path)).absolute()
    if is_remote(text):
        return Remote(text)
    return Path(text).expanduser().absolute()


def is_remote(path: str) -> bool:
    """Whether this is an address and not the name of a folder."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", path) is not None and not path.startswith("file://")


def parquet(path: Place) -> dict[str, Any]:
    """How pyarrow's functions find a file: arguments by name."""
    if isinstance(path, Remote):
        return {"source": path.path, "filesystem": path.file_system}
    return {"source": path}


def retrying(do: Callable[[], T]) -> T:
    """Do it, a few times if it fails for a reason that may pass.

    Raises:
        OSError: it still fails.
    """
    for pause in PAUSES_SECONDS:
        try:
            return do()
        except FINAL:
            raise
        except OSError:
            time.sleep(pause)
    return do()


@lru_cache(maxsize=32)
def _connected(scheme: str, netloc: str, query: str) -> tuple[fs.FileSystem, str]:
    """A file system, and what its paths begin with; made once, since that may take a look at the network."""
    root = f"{scheme}://{netloc}" + (f"?{query}" if query else "")
    try:
        system, base = fs.FileSystem.from_uri(root)
        return system, base
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        return _by_fsspec(scheme, netloc, root, error)


def _by_fsspec(scheme: str, netloc: str, root: str, refused: Exception) -> tuple[fs.FileSystem, str]:
    try:
        import fsspec

        system = fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"storage_path = {root}: there is no file system for {scheme}:// ({error}; pyarrow: {refused}). "
            "Use a folder, s3://, gs://, hdfs:// or abfs://, or install what fsspec asks for."
        ) from None
    return fs.PyFileSystem(fs.FSSpecHandler(system)), str(system._strip_protocol(f"{scheme}://{netloc}"))
