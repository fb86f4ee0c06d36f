"""Any number of servers that hold the columns together give the bits of one, and say where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from small_runs import CONFIG, assert_same_run, drive, small_world

import raypfl
from raypfl.algebra import columns, pairwise_distances
from raypfl.algebra.columns import Held, NoSums, Shard, SumAsked, holding
from raypfl.console import Console
from raypfl.engine.contract import RoundReport
from raypfl.engine.local import LocalEngine
from raypfl.engine.placement import Placement
from raypfl.engine.ray import Crew, RayEngine, share
from raypfl.engine.world import server_threads
from raypfl.errors import ConfigError
from raypfl.methods import METHODS
from raypfl.records.manifest import Part

THREE_SECTIONS = "model={name: mlp, hidden: [300]}"
"""22,510 parameters."""


def sharded(count: int) -> str:
    return f"server.sharding={count}"


def test_shards_are_whole_sections_and_hold_every_column_once():
    for num_columns in (0, 1, 8192, 8193, 50_890, 1_260_000, 11_173_962):
        for count in (1, 2, 3, 4, 16):
            cuts = [Shard(index, count).of(num_columns) for index in range(count)]
            held = [cut for cut in cuts if cut.start < cut.stop]
            assert [cut.start for cut in held] == [0, *(cut.stop for cut in held[:-1])][: len(held)]
            assert (held[-1].stop if held else 0) == num_columns
            assert all(cut.start % columns.COLUMN_BLOCK == 0 for cut in held)
            if count <= len(columns.sections(num_columns)):
                assert len(held) == count
    assert len(columns.sections(11_173_962)) == columns.MOST_SECTIONS


def test_rows_that_are_many_come_in_narrower_blocks():
    widths = {rows: next(columns.column_blocks(10**6, rows)).stop for rows in (16, 40, 8192, 10_000, 10**6)}
    assert widths == {16: 8192, 40: 2048, 8192: 1024, 10_000: 512, 10**6: 256}


def test_a_sum_is_asked_for_once_and_then_known(monkeypatch):
    monkeypatch.setattr(columns, "COLUMN_BLOCK", 4)
    w_KP = torch.randn(5, 18, generator=torch.Generator().manual_seed(0))
    parts = []
    for index in range(2):
        shard = Shard(index, 2)
        with holding(Held(shard, 18, [])), pytest.raises(SumAsked) as asked:
            pairwise_distances(w_KP[:, shard.of(18)])
        parts.append(asked.value.parts)
    assert [len(part) for part in parts] == [2, 3]
    total = columns.add(torch.cat(parts))
    with holding(Held(Shard(0, 2), 18, [total])):
        found = pairwise_distances(w_KP[:, Shard(0, 2).of(18)])
    assert torch.equal(found, pairwise_distances(w_KP))


def test_sums_of_other_rows_or_where_there_are_none_are_mistakes():
    w_KP = torch.zeros(2, 7)
    with holding(Held(Shard(0, 2), 20_000, [])), pytest.raises(AssertionError, match="7 columns, where 8192"):
        pairwise_distances(w_KP)
    with holding(NoSums()), pytest.raises(AssertionError, match="when it aggregates"):
        pairwise_distances(w_KP)


ROUNDS = ("evaluation.diagnostics=true", "checkpoint.every=1", THREE_SECTIONS)


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world, pool = small_world("rounds=4", *ROUNDS)
    return drive(world, LocalEngine(world, pool), tmp_path_factory.mktemp("one") / "run")


def finished(folder: Path, *overrides: str) -> Path:
    config = {**CONFIG, "name": "run", "storage_path": str(folder)}
    path = raypfl.run(config, [*ROUNDS, "rounds=2", *overrides]).path
    return path


@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_servers(
    first: int, then: int, one_server: Path, tmp_path: Path
) -> None:
    path = finished(tmp_path, sharded(first))
    files = {file.name for file in path.glob("checkpoints/round-000002/hub*")}
    assert files == (
        {f"hub-00{index}.safetensors" for index in range(first)} if first > 1 else {"hub.safetensors"}
    )
    raypfl.resume(path, ["rounds=4", sharded(then)])
    assert_same_run(path, one_server)
    assert same_diagnostics(path, one_server)


@pytest.mark.parametrize("servers", [1, 2])
def test_threads_of_servers_leave_the_bits(servers: int, one_server: Path, tmp_path: Path) -> None:
    path = finished(tmp_path, "server.threads=3", sharded(servers))
    raypfl.resume(path, ["rounds=4"])
    assert_same_run(path, one_server)
    assert same_diagnostics(path, one_server)


def test_a_server_takes_the_cores_of_hosts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    cpu = torch.device("cpu")

    def threads(hosts: int, *overrides: str, device: torch.device = cpu) -> int:
        return server_threads(small_world(*overrides)[0].config, device, hosts)

    assert threads(1) == 1, "in the process of a host that has one thread"
    assert threads(3) == 3
    assert threads(20) == 8
    assert threads(20, "engine.threads=2") == 4
    assert threads(20, sharded(3), THREE_SECTIONS) == 2
    assert threads(1, "server.threads=5") == 5
    assert threads(20, device=torch.device("cuda")) == 1


@pytest.mark.slow
def test_on_ray_servers_are_actors(cluster: Path, one_server: Path, tmp_path: Path) -> None:
    path = finished(tmp_path, "engine.name=ray", "engine.num_actors=2", sharded(3))
    raypfl.resume(path, ["rounds=4", sharded(2)])
    assert_same_run(path, one_server)
    assert same_diagnostics(path, one_server)


class Notes(Console):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
def test_a_lost_server_is_replaced_and_the_round_done_again(
    cluster: Path, one_server: Path, tmp_path: Path
) -> None:
    world, pool = small_world("rounds=4", *ROUNDS, sharded(2))
    world = world._replace(phases=True)
    with closing(Crew(Placement(1, 1, 0, 0, 0, num_servers=2))) as crew:
        engine = RayEngine(world, share(pool), crew)
        save = engine.save

        def save_and_lose(building: Path) -> Sequence[Part]:
            parts = save(building)
            if building.name == ".round-000002":
                ray.kill(crew.hubs[1])
            return parts

        engine.save = save_and_lose  # type: ignore[method-assign]
        reports, round = list[RoundReport](), engine.round

        def round_and_tell(*arguments: Any, **options: Any) -> RoundReport:
            reports.append(round(*arguments, **options))
            return reports[-1]

        engine.round = round_and_tell  # type: ignore[method-assign]
        console = Notes()
        path = drive(world, engine, tmp_path / "run", console)
        assert list(crew.processes()) == ["hub", "hub-1", "host-0"]
    assert len(console.notes) == 1 and "back to round 2" in console.notes[0]
    assert_same_run(path, one_server)
    spent = reports[-1].server_phases
    assert spent is not None and set(spent) == {"distances", "mixing", "sampling", "messages", "other"}
    assert sum(own.seconds for own in spent.values()) <= reports[-1].server_seconds


def same_diagnostics(left: Path, right: Path) -> bool:
    tables = [raypfl.Result(path).diagnostics().drop(columns="run") for path in (left, right)]
    return bool(len(tables[0]) and tables[0].equals(tables[1]))


@pytest.mark.parametrize("method", [name for name, known in METHODS.items() if not known.columns])
def test_methods_that_need_whole_rows_say_so(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"sharding = 2: the server of {method} does not .* diversifed"):
        small_world(sharded(2), method=method)


def test_a_model_may_be_too_small_to_be_shared() -> None:
    with pytest.raises(ConfigError, match=r"the 22,510 parameters .* 3 section\(s\).* at most 3"):
        small_world(THREE_SECTIONS, sharded(4))


def test_a_virtual_clock_has_one_server() -> None:
    with pytest.raises(ConfigError, match="knows one server"):
        small_world(THREE_SECTIONS, sharded(2), "clock={latency: 1.0}")
