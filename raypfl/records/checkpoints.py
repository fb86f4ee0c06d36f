"""Checkpoints: safetensors and JSON, whole or absent.

    checkpoints/round-000010/   hub.safetensors   state-*.safetensors   manifest.json
                                clock.safetensors where there is a virtual clock

A checkpoint is built in a hidden folder (`begin`), where the hub and every host write their own part
(`write_part`), each in its own process. `commit` writes the manifest last and then gives the folder its
name, so a folder of that name has everything. On other storage, which may not be able to rename, a checkpoint
is built where it stays, and is one from when its manifest is there. Parts carry client ids: readers ask for
clients, not for parts, and a run resumes on another number of hosts. They read from this machine, from the
folder that `at_hand` gives.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from raypfl.errors import CheckpointError
from raypfl.records.files import replacing, storage_errors, sync, write_text
from raypfl.records.manifest import Manifest, Part
from raypfl.records.storage import Place, Remote

HUB = "hub"
CLOCK = "clock"
OF_THE_HUB = frozenset({f"{HUB}.safetensors", f"{CLOCK}.safetensors"})
MANIFEST = "manifest.json"
IDS = "_ids"  # no field of a NamedTuple can have this name

# A NamedTuple type whose fields are tensors; typing has no name for "any NamedTuple".
RowsT = TypeVar("RowsT", bound=tuple[Tensor, ...])


class _PartFile(Protocol):
    """What is used of safetensors' `safe_open`, which has no types."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...


def begin(checkpoints: Place, round: int) -> Place:
    """A new, empty folder for the parts of this round's checkpoint; removes what a crash left.

    Raises:
        StorageError: the folder cannot be made.
    """
    with storage_errors(checkpoints):
        if isinstance(checkpoints, Remote):
            for found in checkpoints.glob("round-*"):
                if found.name == _name(round) or not (found / MANIFEST).is_file():
                    _remove(found)
            return checkpoints / _name(round)
        checkpoints.mkdir(parents=True, exist_ok=True)
        for abandoned in checkpoints.glob(".round-*"):
            shutil.rmtree(abandoned)
        building = checkpoints / f".{_name(round)}"
        building.mkdir()
    return building


def write_part(building: Place, name: str, rows: RowsT, ids: Tensor | None = None) -> Part:
    """Write a part's file, put it on disk, and describe it for `commit`.

    Args:
        building: the folder from `begin`, on storage that the committing process sees too.
        name: `HUB`, or any other name that is unique in this checkpoint for client rows.
        rows: NamedTuple of tensors of any dtype, layout and device, possibly without fields.
        ids: int64 [clients], one id per leading row of every field; None for the hub (fields of any shape).

    Raises:
        StorageError: the file cannot be written.
    """
    tensors = dict(zip(_fields(type(rows)), rows, strict=True))
    if ids is not None:
        wrong = {field: tuple(t.shape) for field, t in tensors.items() if t.dim() == 0 or len(t) != len(ids)}
        assert not wrong, f"part '{name}': {len(ids)} client ids, but fields of shape {wrong}"
        tensors[IDS] = ids
    path = building / f"{name}.safetensors"
    if isinstance(path, Remote):
        with storage_errors(path), replacing(path) as here, _safetensors_as_os_errors():
            save_file(_separate(tensors), here)
            return Part(file=path.name, bytes=here.stat().st_size, sha256=_sha256(here))
    with storage_errors(path), _safetensors_as_os_errors():
        save_file(_separate(tensors), path)
        sync(path)
    return Part(file=path.name, bytes=path.stat().st_size, sha256=_sha256(path))


def write_clock(building: Place, state: Mapping[str, Tensor]) -> Part:
    """Write what a virtual clock goes on from: tensors by name.

    Raises:
        StorageError: the file cannot be written.
    """
    return write_part(building, CLOCK, namedtuple("State", state)(**state))


def commit(building: Place, manifest: Manifest, parts: Sequence[Part]) -> Place:
    """Make the checkpoint valid, in one step, and return its folder.

    Raises:
        CheckpointError: a part is not there, or not whole.
        StorageError: the manifest or the folder's name cannot be written.
    """
    for part in parts:
        path = building / part.file
        with storage_errors(path, "read"):
            whole = path.is_file() and _size(path) == part.bytes
        if not whole:
            raise CheckpointError(
                f"{path}, {part.bytes} bytes as another process wrote it, is not here or has another size. "
                "storage_path must be one folder that every node shares."
            )
    complete = manifest.model_copy(update={"parts": tuple(parts)})
    write_text(building / MANIFEST, complete.model_dump_json(indent=2) + "\n")
    if isinstance(building, Remote):
        return building
    folder = building.with_name(_name(manifest.round))
    with storage_errors(folder):
        if folder.exists():
            _remove(folder)
        os.rename(building, folder)
        sync(folder.parent)
    return folder


def latest(checkpoints: Place) -> Place | None:
    """The newest committed checkpoint, or None."""
    with storage_errors(checkpoints, "read"):
        return max(_committed(checkpoints), key=str, default=None)


def prune(checkpoints: Place, keep: int) -> None:
    """Remove all but the newest `keep` (at least 1) committed checkpoints."""
    assert keep >= 1, keep
    with storage_errors(checkpoints):
        for folder in sorted(_committed(checkpoints), key=str)[:-keep]:
            _remove(folder)


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest and check every part against it, byte for byte.

    Raises:
        CheckpointError: no manifest, one of another format, or a damaged part.
        StorageError: other storage cannot be read.
    """
    manifest = _manifest(folder)
    for part in manifest.parts:
        path = folder / part.file
        with storage_errors(path, "read"):
            if not path.is_file():
                raise _damaged(folder, f"{part.file} is missing")
            if (size := _size(path)) != part.bytes:
                raise _damaged(folder, f"{part.file} has {size} bytes instead of {part.bytes}")
            if (found := _sha256(path)) != part.sha256:
                raise _damaged(folder, f"{part.file} has SHA-256 {found} instead of {part.sha256}")
    return manifest


@contextmanager
def at_hand(folder: Place, *, of_clients: bool) -> Iterator[Path]:
    """A committed checkpoint on this machine, as long as it is read: the parts of clients, or the others.

    Raises:
        StorageError: other storage cannot be read.
    """
    if not isinstance(folder, Remote):
        yield folder
        return
    with TemporaryDirectory() as copied:
        local = Path(copied)
        for part in _manifest(folder).parts:
            if (part.file not in OF_THE_HUB) == of_clients:
                with storage_errors(folder / part.file, "read"):
                    (folder / part.file).fetch(local / part.file)
        with storage_errors(folder / MANIFEST, "read"):
            (folder / MANIFEST).fetch(local / MANIFEST)
        yield local


def read_hub(folder: Path, like: type[RowsT]) -> RowsT:
    """The hub's tensors, on the CPU.

    Raises:
        CheckpointError: the part is unreadable, or has other fields than `like`.
    """
    with _opened(folder, f"{HUB}.safetensors") as part:
        _check_fields(folder, set(part.keys()), like)
        return like(*(part.get_tensor(field) for field in _fields(like)))


def read_clock(folder: Path) -> dict[str, Tensor]:
    """What `write_clock` wrote, on the CPU.

    Raises:
        CheckpointError: the part is missing or unreadable.
    """
    with _opened(folder, f"{CLOCK}.safetensors") as part:
        return {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118 - not a mapping


def read_rows(folder: Path, ids: Tensor, like: type[RowsT]) -> RowsT:
    """Rows of the given clients, in that order, from whatever parts hold them, on the CPU.

    Parts are mapped, not loaded: only pages with rows that were asked for are read.

    Args:
        folder: a committed checkpoint.
        ids: int64 [K] client ids.
        like: the NamedTuple type that was written.

    Returns:
        `like` with fields [K, ...].

    Raises:
        CheckpointError: a part is unreadable or has other fields, or a client is in no part.
    """
    result: dict[str, Tensor] = {}
    found = torch.zeros(len(ids), dtype=torch.bool)
    for file in (part.file for part in _manifest(folder).parts if part.file not in OF_THE_HUB):
        with _opened(folder, file) as part:
            _check_fields(folder, set(part.keys()) - {IDS}, like)
            at_source, at_result = _matches(part.get_tensor(IDS), ids)
            found[at_result] = True
            for field in _fields(like):
                source = part.get_tensor(field)
                rows = result.setdefault(field, source.new_empty((len(ids), *source.shape[1:])))
                rows[at_result] = source[at_source]
    if not found.all():
        raise _damaged(folder, f"it has no rows of clients {ids[~found].tolist()}")
    return like(*(result[field] for field in _fields(like)))


def _matches(stored: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in `stored` and in `wanted` that hold the same id."""
    order = stored.argsort()
    position = torch.searchsorted(stored[order], wanted).clamp(max=max(len(stored) - 1, 0))
    hit = (stored[order][position] == wanted).nonzero()[:, 0] if len(stored) else wanted.new_empty(0)
    return order[position[hit]], hit


def _fields(rows: type[tuple[Tensor, ...]]) -> tuple[str, ...]:
    fields: tuple[str, ...] = rows._fields  # type: ignore[attr-defined]
    return fields


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: on the CPU, contiguous, no two in one storage."""
    result: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in taken:
            own = own.clone()
        taken.add(own.untyped_storage().data_ptr())
        result[name] = own
    return result


def _name(round: int) -> str:
    return f"round-{round:06d}"


def _committed(checkpoints: Place) -> Iterator[Place]:
    return (manifest.parent for manifest in checkpoints.glob(f"round-*/{MANIFEST}"))


def _remove(folder: Place) -> None:
    """Remove a checkpoint; hidden first, because removing files takes time and may be interrupted."""
    if isinstance(folder, Remote):
        (folder / MANIFEST).unlink(missing_ok=True)
        return folder.rmtree()
    hidden = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def _size(path: Place) -> int:
    return path.size() if isinstance(path, Remote) else path.stat().st_size


def _sha256(path: Place) -> str:
    with path.open() if isinstance(path, Remote) else path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _manifest(folder: Place) -> Manifest:
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            with storage_errors(folder / MANIFEST, "read"):
                raise
        raise CheckpointError(
            f"{folder} is not a checkpoint: its {MANIFEST} cannot be read ({error.strerror})."
        ) from error
    except ValidationError as error:
        raise _damaged(folder, f"{MANIFEST} is not valid: {error.errors()[0]['msg']}") from error


@contextmanager
def _opened(folder: Path, file: str) -> Iterator[_PartFile]:
    try:
        with safe_open(folder / file, framework="pt") as part:
            yield part
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, f"{file} cannot be read ({error})") from error


@contextmanager
def _safetensors_as_os_errors() -> Iterator[None]:
    """The library reports a full or forbidden disk as its own error type."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _check_fields(folder: Path, found: set[str], like: type[tuple[Tensor, ...]]) -> None:
    if found != set(_fields(like)):
        raise CheckpointError(
            f"{folder} has the fields {sorted(found)}, but {like.__name__} has {sorted(_fields(like))}. "
            "Resume with the method and raypfl version that wrote it."
        )


def _damaged(folder: Place, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} is damaged: {what}. "
        "Remove this folder, and the run resumes from the one before it."
    )
