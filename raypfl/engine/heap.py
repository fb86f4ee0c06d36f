"""How the C library gives memory back."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 256 * 2**20
"""Free bytes at the end of the heap that a process keeps."""
LARGEST = 64 * 2**20
"""Bytes of the largest piece that comes from the heap: rows of models of up to 16 million parameters."""


def keep_freed_memory() -> None:
    """Let this process use memory again that it has freed, where the C library is glibc.

    Left to itself glibc returns pieces of megabytes to the system, which hands them out again page by page
    and zeroed: the temporaries of a step on a few models then take longer to make than to compute.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST)
        library.mallopt(M_TRIM_THRESHOLD, KEPT)
