"""A run's log, which also says whose run it is: two processes in one would overwrite each other's tables."""

from __future__ import annotations

import fcntl
import io
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TypeAlias

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors, write_json, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.storage import Remote

SEND_SECONDS = 30.0
"""How often the log of a run on other storage is sent there."""


@contextmanager
def run_log(folder: RunFolder) -> Iterator[Log]:
    """The log, to write to, while this process has the run to itself. What it is told never fails.

    On this machine's file systems the log is locked. Other storage has no locks: there who comes last owns
    the run, and who had it before stops when it notices (`Ownership`).

    Raises:
        StorageError: another process has the run; or the log cannot be opened.
    """
    if isinstance(folder.log, Remote):
        with closing_quietly(RemoteLog(folder.log)) as log:
            yield log
        return
    with storage_errors(folder.log):
        file = folder.log.open("a")
    with closing_quietly(KeptLog(file)) as kept:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{folder.path} is in use by another process. Wait for it, or end it."
            ) from None
        yield kept


@contextmanager
def closing_quietly(log: Log) -> Iterator[Log]:
    """Close it at the end; a log that cannot be written to its end is no reason to lose a result."""
    try:
        yield log
    finally:
        with suppress(OSError, StorageError):
            log.close()


class KeptLog(io.TextIOBase):
    """A file that takes up what it could not write when it can again."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._kept = b""

    def write(self, text: str) -> int:
        """Write, or keep for later."""
        self._kept += text.encode()
        with suppress(OSError):
            while self._kept:
                self._kept = self._kept[os.write(self._file.fileno(), self._kept) :]
        return len(text)

    def close(self) -> None:
        """Give up the file, and its lock."""
        self._file.close()
        super().close()


class RemoteLog(io.TextIOBase):
    """A text that is sent as a whole, now and then."""

    def __init__(self, path: Remote) -> None:
        with storage_errors(path, "read"):
            self._text = path.read_text() if path.is_file() else ""
        self._path, self._sent = path, 0.0

    def write(self, text: str) -> int:
        """Add to it."""
        self._text += text
        return len(text)

    def flush(self) -> None:
        """Send it, if that was not done a moment ago."""
        if not self.closed and time.monotonic() - self._sent > SEND_SECONDS:
            with suppress(StorageError):
                write_text(self._path, self._text)
            self._sent = time.monotonic()

    def close(self) -> None:
        """Send all of it.

        Raises:
            StorageError: it cannot be sent.
        """
        if not self.closed:
            write_text(self._path, self._text)
        super().close()


class Ownership:
    """Whose a run on storage without locks is: that process's which wrote `owner.json` last."""

    def __init__(self, folder: RunFolder) -> None:
        """Take the run.

        Raises:
            StorageError: the storage cannot be written.
        """
        self._path = folder.path / "owner.json"
        self._token = uuid.uuid4().hex
        if isinstance(self._path, Remote):
            write_json(self._path, {"token": self._token, "host": platform.node(), "process": os.getpid()})

    def check(self) -> None:
        """Make sure that it still is this process's.

        Raises:
            StorageError: another one has taken it.
        """
        if not isinstance(self._path, Remote):
            return
        with storage_errors(self._path, "read"):
            found = json.loads(self._path.read_text())
        if found["token"] != self._token:
            raise Taken(
                f"{self._path.parent} was taken over by process {found['process']} on {found['host']}. "
                "This one stops, and writes nothing more."
            )


class Taken(StorageError):
    """Another process goes on with the run."""


Log: TypeAlias = KeptLog | RemoteLog
