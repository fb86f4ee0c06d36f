"""What keeps the memory of large runs bounded changes no result: pieces, places and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import assert_same_run, drive, small_world

import raypfl
from raypfl.algebra import columns as algebra
from raypfl.engine import columns, host, memory, ray_mail
from raypfl.engine.host import Upload
from raypfl.engine.local import LocalEngine
from raypfl.engine.placement import Node
from raypfl.errors import PlacementError
from raypfl.methods.published import Up

OPTIONS = ("rounds=4", "participation.fraction=0.5", "engine.block=2", "engine.num_actors=1")


@pytest.mark.parametrize("method", ["fedamp", "pfedme"])
def test_pieces_give_the_bits_of_the_whole(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints in a part a block, uploads a few columns at a time; then restored from those parts."""
    monkeypatch.setattr(algebra, "COLUMN_BLOCK", 64)
    world, pool = small_world(*OPTIONS, method=method)
    whole = drive(world, LocalEngine(world, pool), tmp_path / "whole")
    monkeypatch.setattr(host, "PART_BYTES", 1)
    monkeypatch.setattr(columns, "CHUNK_ENTRIES", 1)
    world, pool = small_world(*OPTIONS[1:], "rounds=2", method=method)
    half = drive(world, LocalEngine(world, pool), tmp_path / "half")
    parts = {file.name for file in half.glob("checkpoints/round-000002/state-*")}
    assert parts == {"state-000-000.safetensors", "state-000-001.safetensors"}
    raypfl.resume(half, ["rounds=4"])
    assert_same_run(half, whole, method)


def test_rows_are_replaced_in_place_only_where_nobody_else_has_them() -> None:
    world, pool = small_world("participation.fraction=0.5", "engine.block=4")
    engine = LocalEngine(world, pool)
    (only,) = engine.hosts
    places = []
    for round in (1, 2, 3):
        before = only.state[0].w
        kept = before.clone()
        engine.round(round, evaluate_pre=False, evaluate_post=False)
        places.append(only.state[0].w.data_ptr() == before.data_ptr())
        assert places[-1] or torch.equal(before, kept)
    assert places == [False, True, True]


@pytest.mark.slow
def test_uploads_reach_every_hub_through_the_object_store(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(5 * 20_000.0).reshape(5, 20_000)
    monkeypatch.setattr(ray_mail, "OUTBOX_BYTES", 3 * rows[0].nbytes // 2)
    outbox = ray_mail.Outbox(frozenset(Up._fields), 2)
    for client in range(5):
        outbox.put(Upload(torch.tensor([client]), Up(rows[client : client + 1])))
    # After the second and the fourth; the fifth is not worth a reference.
    assert [len(mail) for mail in outbox.mail] == [3, 3]
    received = [list(ray_mail.received(mail)) for mail in outbox.mail]
    parts = [torch.cat([torch.from_numpy(own.up.w.copy()) for own in uploads]) for uploads in received]
    assert [part.shape[1] for part in parts] == [8192, 20_000 - 8192]
    assert torch.equal(torch.cat(parts, 1), rows)
    assert [int(own.ids) for own in received[0]] == list(range(5))


def test_a_server_that_fits_no_node_is_told_to_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight nodes with room for the run, of which none has room for the rows of all clients."""
    monkeypatch.setattr(memory, "PROCESS_BYTES", 0)
    row = 22_510 * 4
    nodes = [Node(1, 0, 6 * row)] * 8
    needed = memory.Memory(
        row=row,
        hosts=2,
        states=2 * row,
        working=0,
        heard=0,
        servers=1,
        server=4 * row,
        step=3 * row,
        sending=0,
        data=0,
        processes=4,
        by_columns=True,
    )
    with pytest.raises(PlacementError, match=r"a server needs about 630\.3 kB .* server.sharding=2 or more"):
        needed.check(nodes)
    needed._replace(servers=2).check(nodes)
    with pytest.raises(PlacementError, match="Use fewer clients or a smaller model"):
        needed._replace(by_columns=False).check(nodes)
