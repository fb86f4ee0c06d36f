"""Runs on storage that is no folder of this machine: whole files, whole checkpoints, the same bits."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
import pytest
import torch
import yaml
from failures import Notes
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs
from small_runs import CONFIG, assert_same_run, drive, small_world
from torch import Tensor
from typer.testing import CliRunner

import raypfl
from raypfl.cli import app
from raypfl.engine.faults import Patience
from raypfl.engine.local import LocalEngine
from raypfl.errors import ConfigError, StorageError
from raypfl.records import checkpoints, storage
from raypfl.records.files import replacing, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.log import Ownership, Taken
from raypfl.records.manifest import Manifest
from raypfl.records.storage import Remote, place
from raypfl.result import Result


class Flaky(MemoryFileSystem):
    """Storage in this process's memory that refuses everything while it is down, or the next few requests."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    down = False
    refuse_next = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace("flaky://", "memory://"))

    def info(self, path: str, **options: Any) -> Any:
        self._perhaps_refuse()
        return super().info(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._perhaps_refuse()
        return super()._open(path, mode, **options)

    def _perhaps_refuse(self) -> None:
        if Flaky.down or Flaky.refuse_next > 0:
            Flaky.refuse_next -= 1
            raise OSError("503 Slow Down")


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(params=["local", "memory", "mock", "subtree"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """An empty place on one of several file systems."""
    systems = {
        "mock": lambda: fs._MockFileSystem(),
        "subtree": lambda: fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()),
    }
    if request.param in systems:
        made = systems[request.param]()
        monkeypatch.setattr(storage, "_connected", lambda *_: (made, ""))
    return Remote(f"local://{tmp_path}/bucket" if request.param == "local" else f"memory://{tmp_path.name}/a")


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setattr(storage, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    yield Remote("flaky://bucket/runs")
    Flaky.down, Flaky.refuse_next = False, 0
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]


def test_addresses_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place("runs") == place(Path("runs")) == tmp_path / "runs"
    assert place(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    there = place("s3://bucket/runs/?region=eu-central-1")
    assert str(there) == "s3://bucket/runs?region=eu-central-1"
    assert isinstance(there, Remote)
    below = there / "run" / "metrics/rounds.parquet"
    assert str(below) == "s3://bucket/runs/run/metrics/rounds.parquet?region=eu-central-1"
    assert below.parent.parent == there / "run" and below.with_name("x").name == "x"
    assert pickle.loads(pickle.dumps(below)) == below and hash(below) == hash(place(below))


def test_a_password_is_not_written_into_configurations() -> None:
    with pytest.raises(ConfigError, match="has a password in it") as refused:
        small_world("storage_path=s3://key:secret@bucket/runs")
    assert "secret" not in str(refused.value)


def test_an_address_with_too_few_strokes_is_no_folder() -> None:
    with pytest.raises(ConfigError, match=r"storage_path = .*s3:/bucket/runs.*: is no address; write s3://"):
        small_world("storage_path=s3:/bucket/runs")


def test_storage_that_nobody_knows_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no file system for nowhere://.*s3://, gs://"):
        raypfl.run({**CONFIG, "storage_path": "nowhere://bucket/runs"})


def test_files_and_folders(remote: Remote, tmp_path: Path) -> None:
    assert not remote.exists() and list(remote.iterdir()) == [] and list(remote.glob("*/x")) == []
    (remote / "a").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        (remote / "a").mkdir()
    for text in ("first", "second, longer"):
        write_text(remote / "a" / "x", text)
        assert (remote / "a" / "x").read_text() == text
    write_text(remote / "b" / "x", "b")
    assert [found.name for found in remote.iterdir()] == ["a", "b"]
    assert [str(found) for found in remote.glob("*/x")] == [f"{remote}/a/x", f"{remote}/b/x"]
    assert list(remote.glob("c*/x")) == [] and (remote / "a" / "x").size() == 14
    with pytest.raises(ZeroDivisionError), replacing(remote / "a" / "x") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert (remote / "a" / "x").read_text() == "second, longer"
    (remote / "a" / "x").fetch(tmp_path / "fetched")
    assert (tmp_path / "fetched").read_text() == "second, longer"
    (remote / "a" / "x").unlink()
    (remote / "a" / "x").unlink(missing_ok=True)
    (remote / "b").rmtree()
    assert not (remote / "a" / "x").is_file() and not (remote / "b").is_dir()


class Rows(NamedTuple):
    w: Tensor


def manifest(round: int) -> Manifest:
    settled = {"block": 1, "width": 1, "threads": 1, "partition": "p", "data": "d", "device": "cpu"}
    return Manifest(round=round, config={}, **settled)


def save(folder: Remote, round: int, *, until: str = "the end") -> None:
    building = checkpoints.begin(folder, round)
    parts = [
        checkpoints.write_part(building, checkpoints.HUB, Rows(torch.full((3,), float(round)))),
        checkpoints.write_part(building, "state-000", Rows(torch.arange(4.0)[:, None]), torch.arange(4)),
    ]
    if until == "the end":
        checkpoints.commit(building, manifest(round), parts)


def test_a_checkpoint_is_whole_or_absent(remote: Remote) -> None:
    assert checkpoints.latest(remote) is None
    save(remote, 2)
    save(remote, 4)
    save(remote, 6, until="its manifest")
    found = checkpoints.latest(remote)
    assert found == remote / "round-000004" and checkpoints.read_manifest(found).round == 4
    with checkpoints.at_hand(found, of_clients=True) as here:
        assert checkpoints.read_rows(here, torch.tensor([3, 1]), Rows).w.tolist() == [[3.0], [1.0]]
    with checkpoints.at_hand(found, of_clients=False) as here:
        assert checkpoints.read_hub(here, Rows).w.tolist() == [4.0] * 3
        assert sorted(path.name for path in here.iterdir()) == ["hub.safetensors", "manifest.json"]
    save(remote, 8)
    assert not (remote / "round-000006").exists(), "what was abandoned is cleared away"
    checkpoints.prune(remote, 1)
    assert [folder.name for folder in remote.iterdir()] == ["round-000008"]
    write_text(found.with_name("round-000008") / "state-000.safetensors", "something else")
    with pytest.raises(checkpoints.CheckpointError, match="is damaged"):
        checkpoints.read_manifest(found.with_name("round-000008"))


def test_a_run_is_the_same_elsewhere_is_resumed_and_read(tmp_path: Path) -> None:
    config = {**CONFIG, "name": "run", "rounds": 4}
    here = raypfl.run({**config, "storage_path": tmp_path})
    there = raypfl.run({**config, "storage_path": "memory://bucket/runs", "rounds": 2})
    assert str(there.path) == "memory://bucket/runs/run"
    result = CliRunner().invoke(app, ["resume", "memory://bucket/runs/run", "rounds=4"])
    assert result.exit_code == 0, result.output
    assert_same_run(there.path, here.path)
    names = {found.name for found in there.path.iterdir()}
    assert names == {found.name for found in here.path.iterdir()} | {"owner.json"}
    assert yaml.safe_load((there.path / "config.yaml").read_text())["rounds"] == 4
    assert "round 4/4" in (there.path / "run.log").read_text()
    assert Result("memory://bucket/runs/run").summary["rounds"] == 4
    with pytest.raises(StorageError, match="exists already.*raypfl resume memory://bucket/runs/run"):
        raypfl.run({**config, "storage_path": "memory://bucket/runs"})
    with pytest.raises(StorageError, match="is not a run"):
        raypfl.resume("memory://bucket/runs/other")


def test_several_runs_are_read_below_one_address() -> None:
    config = {**CONFIG, "name": "both", "rounds": 1, "storage_path": "memory://several"}
    result = raypfl.run(config, ["seed=[1, 2]"])
    assert [run.path.name for run in result.runs] == ["fedamp-seed1", "fedamp-seed2"]
    assert set(result.clients()["seed"]) == {1, 2}


def test_a_moment_of_trouble_is_not_noticed(flaky: Remote) -> None:
    write_text(flaky / "x", "text")
    Flaky.refuse_next = 3
    assert (flaky / "x").read_text() == "text"
    Flaky.refuse_next = 4
    with pytest.raises(StorageError, match="cannot write flaky://bucket/runs/x: 503 Slow Down"):
        write_text(flaky / "x", "other")
    assert (flaky / "x").read_text() == "text"


def test_a_run_goes_on_while_storage_elsewhere_is_down(flaky: Remote, tmp_path: Path) -> None:
    world, pool = small_world("evaluation.every=1")
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")

    def set_down(down: bool) -> None:
        Flaky.down = down

    notes = Notes({3: lambda: set_down(True), 5: lambda: set_down(False)})
    drive(world, LocalEngine(world, pool), flaky / "run", notes, patience=Patience(60, sleep=lambda _: None))
    assert "503 Slow Down" in notes.texts[0] and notes.texts[1] == "Storage works again."
    assert_same_run(flaky / "run", undisturbed)


def test_who_comes_last_has_a_run_where_nothing_can_be_locked(flaky: Remote) -> None:
    folder = RunFolder.create(str(flaky), "run")
    first = Ownership(folder)
    first.check()
    second = Ownership(folder)
    second.check()
    with pytest.raises(Taken, match="was taken over by process"):
        first.check()
