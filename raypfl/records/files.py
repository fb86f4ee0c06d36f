"""Files that are either the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raypfl.errors import StorageError


@contextmanager
def storage_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn an operating system's refusal into a StorageError with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot {action} {path}: {error.strerror or error}. "
            "Check the path, its permissions and the free space, or set another storage_path."
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; on success its content takes the place of `path` in one step.

    The content is on disk before the name changes. Readers that have the old file open keep it.

    Raises:
        StorageError: the file cannot be written; `path` is as it was.
    """
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


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")
