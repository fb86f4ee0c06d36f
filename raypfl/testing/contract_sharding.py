"""What methods promise that declare `columns`: servers that share them, or see a few at a time, agree."""

from __future__ import annotations

import pytest

from raypfl.algebra import columns
from raypfl.engine import columns as parts
from raypfl.engine.local import LocalEngine
from raypfl.testing.harness import NETS, Net, Toy, Trace, same, toy, trace, world
from raypfl.testing.row import Row
from raypfl.testing.table import only

by_columns = only(lambda row: bool(row.method().columns))


@pytest.fixture(scope="module")
def federation() -> Toy:
    return toy()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sections for networks of a hundred parameters."""
    monkeypatch.setattr(columns, "COLUMN_BLOCK", 16)


def run_on(servers: int, row: Row, federation: Toy, net: Net) -> Trace:
    engine = LocalEngine(
        *world(
            row,
            federation,
            net,
            participation={"fraction": 0.67},
            server={"sharding": servers},
            engine={"num_actors": 2, "block": 2, "width": 2},
        )
    )
    return trace(engine, (1, 2))


@by_columns
@pytest.mark.usefixtures("small_blocks")
def test_one_two_and_four_servers_give_the_same_bits(row: Row, federation: Toy) -> None:
    """With running statistics, which are columns too, and fewer than there are servers."""
    one, *others = (run_on(servers, row, federation, NETS["conv"]) for servers in (1, 2, 4))
    assert all(same(one, other) for other in others)


@by_columns
@pytest.mark.usefixtures("small_blocks")
def test_uploads_taken_in_by_a_few_columns_at_a_time_give_the_same_bits(
    row: Row, federation: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_on(1, row, federation, NETS["mlp"])
    monkeypatch.setattr(parts, "CHUNK_ENTRIES", 100)
    assert same(run_on(1, row, federation, NETS["mlp"]), whole)
