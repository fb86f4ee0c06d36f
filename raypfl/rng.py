"""The only source of randomness: every draw belongs to a key (seed, purpose, round, client).

There is no generator state to carry, save or restore: a draw is a function of its key, so it does not
depend on hosts, on the order of clients, or on what was drawn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

NOBODY = -1
"""The client of a draw that belongs to no client (a round's participants, a common initialisation)."""


def key(seed: int, purpose: str, round: int = 0, client: int = NOBODY) -> int:
    """A 63-bit integer that names one draw. Different arguments give independent streams."""
    text = f"{int(seed)}/{purpose}/{int(round)}/{int(client)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_generator(draw: int) -> np.random.Generator:
    """A NumPy generator for the draw that `key` named (Philox: counter-based, cheap to make)."""
    return np.random.Generator(np.random.Philox(key=draw))


@contextmanager
def torch_seeded(draw: int, device: torch.device | None = None) -> Iterator[None]:
    """Run code that can only draw from torch's global generators (module initialisers, dropout).

    The generators are put back afterwards, so nothing outside sees that they were used.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(draw)
        yield
