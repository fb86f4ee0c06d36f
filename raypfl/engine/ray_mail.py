"""Uploads on their way from hosts to hubs on Ray: by reference, and out of a host's own memory early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray

from raypfl.algebra.columns import Shard
from raypfl.engine.host import Upload
from raypfl.engine.messages import encode
from raypfl.engine.sharding import cut_uploads

OUTBOX_BYTES = 2**26
"""Uploads that a host holds in its own memory before they go to the object store."""


class Outbox:
    """A host's uploads of one step: much goes to the object store while the host works on.

    Attributes:
        mail: for each hub, references to lists of uploads, and last the uploads that are not in the store.
    """

    def __init__(self, columns: frozenset[str], num_hubs: int) -> None:
        self._columns = columns
        self._shards = [Shard(index, num_hubs) for index in range(num_hubs)]
        self._bytes = 0
        self.mail: list[list[Any]] = [[] for _ in self._shards]

    def put(self, upload: Upload) -> None:
        """Take one block's upload."""
        for mail, shard in zip(self.mail, self._shards, strict=True):
            mail += [own._replace(up=encode(own.up)) for own in cut_uploads([upload], self._columns, shard)]
        self._bytes += sum(field.nbytes for field in upload.up)
        if self._bytes > OUTBOX_BYTES:
            for mail in self.mail:
                sent = [one for one in mail if isinstance(one, ray.ObjectRef)]
                mail[:] = [*sent, ray.put(mail[len(sent) :])]
            self._bytes = 0


def received(mail: Sequence[Any]) -> Iterator[Upload]:
    """The uploads in an outbox's mail, in the order in which they were put in."""
    for one in mail:
        yield from ray.get(one) if isinstance(one, ray.ObjectRef) else [one]
