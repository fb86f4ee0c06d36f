"""How the programs in `cluster/` end: with a message and a status, as `raypfl` does."""

from __future__ import annotations

import sys
from collections.abc import Callable

from raypfl.cli import INTERRUPTED, USER_ERROR
from raypfl.errors import RaypflError


def ended(program: Callable[[], int]) -> int:
    """Run a program, and tell the errors of its user in words; the exit status of this process."""
    try:
        return program()
    except RaypflError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
