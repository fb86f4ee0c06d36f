"""What a checkpoint says about itself, and whether a configuration may continue from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import ConfigDict, JsonValue, model_validator

from raypfl.config import StrictModel
from raypfl.errors import CheckpointError

MAY_DIFFER = (
    "name",
    "storage_path",
    "rounds",
    "engine.name",
    "engine.num_actors",
    "engine.clients_per_actor",
    "engine.address",
    "resources.*",
    "server.*",
    "checkpoint.*",
    "watch",
    "faults.*",
    # The data themselves are compared by their fingerprint.
    "data.root",
    "data.file",
    "data.download",
)
"""Keys that say where, how long or how safely a run goes, and do not change its numbers."""

ABSENT = "(absent)"


class Part(StrictModel):
    """One file of a checkpoint."""

    file: str
    bytes: int
    sha256: str


class Manifest(StrictModel):
    """Everything beside the tensors that a run needs to continue to the same bits."""

    model_config = ConfigDict(ser_json_inf_nan="constants", allow_inf_nan=True)

    format: Literal[1] = 1
    round: int  # completed server updates
    config: dict[str, JsonValue]  # complete and resolved
    config_sha256: str = ""  # filled in from `config`; found again when the manifest is read
    block: int  # ids per unit of dealing
    width: int  # rows a forward
    threads: int  # torch threads per process
    partition: str  # fingerprint of the clients' sample indices
    data: str  # fingerprint of the data set as normalised
    device: str  # kind of device that clients train on
    dropped: int = 0  # clients that were left out of rounds so far, each round of each counted
    parts: tuple[Part, ...] = ()  # filled in by `commit`

    @model_validator(mode="before")
    @classmethod
    def _check_config_hash(cls, values: JsonValue) -> JsonValue:
        if not isinstance(values, dict) or "config" not in values:
            return values
        digest = config_hash(values["config"])
        if (stated := values.get("config_sha256", digest)) != digest:
            raise ValueError(f"its config has SHA-256 {digest} instead of {stated}")
        return {**values, "config_sha256": digest}


def config_hash(config: JsonValue | Mapping[str, JsonValue]) -> str:
    """SHA-256 of a resolved configuration; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def check_same(
    what: str,
    before: Mapping[str, JsonValue],
    config: Mapping[str, JsonValue],
    *,
    may_differ: Collection[str] = MAY_DIFFER,
) -> None:
    """Refuse to continue under a configuration that would give other numbers.

    Args:
        what: what has the earlier configuration, for the message.
        before: the complete resolved configuration it began with.
        config: the complete resolved configuration now.
        may_differ: dotted keys, or patterns like `resources.*`, that are not compared.

    Raises:
        CheckpointError: lists each key that differs, with the earlier value and the one now.
    """
    then, now = dict(leaves(before)), dict(leaves(config))
    differences = [
        f"    {key}: {then.get(key, ABSENT)} -> {now.get(key, ABSENT)}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and not any(fnmatchcase(key, pattern) for pattern in may_differ)
    ]
    if differences:
        listed = "\n".join(differences)
        raise CheckpointError(
            f"{what} belongs to another configuration (key: then -> now):\n{listed}\n"
            "Resume without these changes, or start a new run under another `name=`."
        )


def leaves(config: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as JSON, in which tuples equal lists, as in the manifest's file."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)
