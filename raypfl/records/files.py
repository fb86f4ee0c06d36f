"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raypfl.errors import StorageError
from raypfl.records.storage import Place, Remote


@contextmanager
def storage_errors(path: Place, action: str = "write") -> Iterator[None]:
    """Turn what an operating system or remote storage refuses into a StorageError with path and reason."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot {action} {path}: {error.strerror or error}. "
            "Check the path, its permissions and the free space, or set another storage_path."
        ) from error


@contextmanager
def replacing(path: Place) -> Iterator[Path]:
    """A temporary path to write; on success its content takes the place of `path` in one step.

    The content is on disk before the name changes. Readers that have the old file open keep it. What belongs
    on other storage is written on this machine and sent there when it is complete.

    Raises:
        StorageError: the file cannot be written; `path` is as it was.
    """
    if isinstance(path, Remote):
        with storage_errors(path), TemporaryDirectory() as folder:
            here = Path(folder) / path.name
            yield here
            path.put(here)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Put a file's content, or a folder's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Place, text: str) -> None:
    """Write UTF-8 text atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Place, value: Mapping[str, Any]) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")
