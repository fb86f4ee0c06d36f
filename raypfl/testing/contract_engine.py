"""What every method promises when engines run it: the same bits wherever its clients live."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from raypfl.configuration import to_dict
from raypfl.engine.local import LocalEngine
from raypfl.methods.contract import SERVER
from raypfl.records import checkpoints
from raypfl.records.manifest import Manifest
from raypfl.records.storage import Place
from raypfl.testing.harness import NETS, SIZES, Net, Simulation, Toy, same, toy, trace, world
from raypfl.testing.row import Row
from raypfl.training import Cohort

N = len(SIZES)

three_nets = pytest.mark.parametrize(
    "net",
    [NETS["mlp"], NETS["conv with local statistics"], NETS["trunk"]],
    ids=["mlp", "conv", "trunk"],
)


@pytest.fixture(scope="module")
def federation() -> Toy:
    return toy()


def engine_of(row: Row, federation: Toy, net: Net = NETS["mlp"], **settings: Any) -> LocalEngine:
    fraction = {"participation": {"fraction": 0.67}}
    return LocalEngine(*world(row, federation, net, **{**fraction, **settings}))


def layout(hosts: int, *, block: int, width: int) -> dict[str, Any]:
    return {"engine": {"num_actors": hosts, "block": block, "width": width}}


def commit(engine: LocalEngine, folder: Path, round: int) -> Place:
    parts = engine.save(building := checkpoints.begin(folder, round))
    config = to_dict(engine.hub.world.config)
    manifest = Manifest(
        round=round, config=config, block=2, width=2, threads=1, partition="toy", data="toy", device="cpu"
    )
    return checkpoints.commit(building, manifest, parts)


@three_nets
def test_blocks_of_any_size_give_the_same_bits_at_width_one(row: Row, net: Net, federation: Toy) -> None:
    """Among the clients are three whose last batch has one sample, where alignment of a row decides bits."""
    traces = [
        trace(engine_of(row, federation, net, **layout(1, block=block, width=1)), (1, 2))
        for block in (1, 3, N)
    ]
    assert same(traces[0], traces[1]) and same(traces[0], traces[2])


@three_nets
def test_one_two_and_three_hosts_give_the_same_bits(row: Row, net: Net, federation: Toy) -> None:
    traces = [
        trace(engine_of(row, federation, net, **layout(hosts, block=2, width=2)), (1, 2))
        for hosts in (1, 2, 3)
    ]
    assert same(traces[0], traces[1]) and same(traces[0], traces[2])


@three_nets
def test_resumed_on_other_hosts_continues_to_the_same_bits(
    row: Row, net: Net, federation: Toy, tmp_path: Path
) -> None:
    undisturbed = engine_of(row, federation, net, **layout(2, block=2, width=2))
    trace(undisturbed, (1, 2))
    expected = trace(undisturbed, (3, 4))

    interrupted = engine_of(row, federation, net, **layout(2, block=2, width=2))
    trace(interrupted, (1, 2))
    checkpoint = commit(interrupted, tmp_path, 2)
    trace(interrupted, (3,))

    resumed = engine_of(row, federation, net, **layout(3, block=2, width=2))
    resumed.restore(checkpoint)
    assert same(trace(resumed, (3, 4)), expected)
    interrupted.restore(checkpoint)
    assert same(trace(interrupted, (3, 4)), expected)


def test_restored_to_the_start_is_the_start(row: Row, federation: Toy) -> None:
    engine = engine_of(row, federation)
    first = trace(engine, (1, 2))
    engine.restore(None)
    assert same(trace(engine, (1, 2)), first)


def test_engine_runs_the_contract(row: Row, federation: Toy) -> None:
    """The engine in float32 against the bare contract in float64, all clients taking part."""
    engine = engine_of(row, federation, participation={"fraction": 1.0})
    found = trace(engine, (1, 2))
    expected = Simulation(row, NETS["mlp"].float64(), federation).run(2)
    for fields, reference in ((found.state, (*expected.state, expected.kept)), (found.hub, expected.hub)):
        for field, exact in zip(fields, reference, strict=True):
            torch.testing.assert_close(field.double(), exact.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fraction, participants", [(0.1, 1), (0.5, 5), (1.0, 10)])
def test_any_share_of_clients_may_take_part(row: Row, fraction: float, participants: int) -> None:
    clients = toy((*SIZES, 2, 6, 3, 1))
    engine = engine_of(row, clients, participation={"fraction": fraction})
    found = trace(engine, (1, 2))
    trained = {key: figures for key, figures in found.records.items() if key[4] == "train"}
    training = participants if row.trains == "sampled" else 10
    assert Counter(round for round, *_ in trained) == {1: training, 2: training}
    senders = {src for src, dst, *_ in found.messages if dst == SERVER}
    assert len(senders) <= 2 * participants
    # Everybody is evaluated, those who are absent with what they have.
    for round, point in [(0, "pre"), (1, "post"), (1, "pre"), (2, "post")]:
        evaluated = [
            figures
            for (at, _, when, model, split), figures in found.records.items()
            if (at, when, model, split) == (round, point, "personalised", "test")
        ]
        assert len(evaluated) == 10
        assert all(
            0 <= accuracy <= 1 and loss > 0 and samples == 2 for accuracy, loss, samples, _ in evaluated
        )
        taking_part = sum(participant for *_, participant in evaluated)
        assert taking_part == training


def test_ledger_has_the_payload_of_the_table(row: Row, federation: Toy) -> None:
    engine = engine_of(row, federation, participation={"fraction": 0.5})
    found = trace(engine, (1,))
    participants = {client for (_, client, _, _, split) in found.records if split == "train"}
    training = N // 2 if row.trains == "sampled" else N
    assert len(participants) == training
    sent: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    masks, counts = 0, 0
    for src, dst, kind, values, size in found.messages:
        assert {src, dst} - {-1} <= participants
        if kind in row.packed_down:
            packed[kind] += size
            continue
        assert size in ((8 * values,) if kind == "meta" else (values, 4 * values, 8 * values))
        if size == values:
            assert dst == -1
            masks += values
        elif size == 8 * values and kind != "meta":
            assert dst == -1
            counts += values
        else:
            sent["up" if dst == -1 else "down"] += values
    net = engine.hub.net
    uploading = sorted({src for src, dst, *_ in found.messages if dst == -1} or participants)
    present = (engine.hub.clients.label_counts[uploading] > 0).sum(1)
    up = row.up(net, N // 2) * (N // 2) + row.up_per_class(net, N // 2) * present.sum()
    # Down nothing for classes: there was no round before the first.
    payload = {"up": int(up), "down": row.down(net, N // 2) * training}
    assert packed == {kind: size(net, N // 2) * (N // 2) for kind, size in row.packed_down.items()}
    assert masks == row.masks_up(net, N // 2) * (N // 2)
    assert counts == row.counts_up_per_class(net, N // 2) * int(present.sum())
    assert sent == {way: values for way, values in payload.items() if values}


def test_data_set_is_not_written(row: Row, federation: Toy) -> None:
    prepared, pool = world(row, federation, NETS["conv"])
    digest = hashlib.sha256(pool.x.tobytes() + pool.y.tobytes()).digest()
    trace(LocalEngine(prepared, pool), (1,))
    assert hashlib.sha256(pool.x.tobytes() + pool.y.tobytes()).digest() == digest


def test_what_is_evaluated_is_what_clients_make_of_their_models(
    row: Row, federation: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models adapted to zeros lose log 3, in and out of training; nothing else notices."""
    expected = trace(engine_of(row, federation), (1, 2))
    engine = engine_of(row, federation)
    asked: list[tuple[int, int]] = []

    def adapted(cohort: Cohort, w: torch.Tensor) -> torch.Tensor:
        asked.extend((cohort.round, client) for client in cohort.ids.tolist())
        assert len(w) == len(cohort)
        return torch.zeros_like(w)

    for host in engine.hosts:
        monkeypatch.setattr(host.method, "adapted", adapted)
    found = trace(engine, (1, 2))
    losses = {key: figures[1] for key, figures in found.records.items() if key[4] == "test"}
    for (round, client, point, model, split), loss in losses.items():
        known = expected.records[round, client, point, model, split][1]
        assert loss == pytest.approx(math.log(3) if model == "personalised" else known)
    # Before and after each of two rounds.
    assert Counter(asked) == {(round, client): [1, 2, 1][round] for round in range(3) for client in range(N)}
    assert same(found._replace(records=expected.records), expected)


__all__ = ["federation", *(name for name in dir() if name.startswith("test_"))]
