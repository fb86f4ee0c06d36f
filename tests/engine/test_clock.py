"""The clock of a run, by hand: orders, paces, links, who is late, who fails, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import CONFIG, NUM_CLIENTS, assert_same_run, drive, small_world

import raypfl
from raypfl.engine.local import LocalEngine
from raypfl.errors import CheckpointError, ConfigError
from raypfl.methods.peers import Gossip
from raypfl.records import checkpoints
from raypfl.result import Result
from raypfl.training import Cohort

FULL = "topology={name: full, weights: uniform}"
WEIGHTS = 8 * 64 + 8 + 10 * 8 + 10
MODEL = 4 * WEIGHTS
"""Bytes of a model."""


def engine_of(*overrides: str, method: str = "peer_fedavg", clock: str = "{}") -> LocalEngine:
    topology = (FULL,) if method == "peer_fedavg" else ()
    return LocalEngine(*small_world(*topology, f"clock={clock}", *overrides, method=method))


def stays(engine: LocalEngine, round: int) -> list[tuple[Any, ...]]:
    """The clock's rows of a round: client, iteration, start, end, outcome, heard, staleness, at most."""
    found = engine.round(round, evaluate_pre=False, evaluate_post=False).clock
    assert found is not None
    return sorted(zip(*found.values(), strict=True), key=lambda stay: (stay[0] < 0, stay[2], stay[0]))


def times(engine: LocalEngine, round: int) -> list[tuple[Any, ...]]:
    """Client, start, end and outcome."""
    return [(client, start, end, how) for client, _, start, end, how, *_ in stays(engine, round)]


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that mix and do not train."""
    monkeypatch.setattr(Gossip, "train", lambda self, cohort, w: w)


def mixed(clock: str, values: list[float], rounds: int = 1) -> list[float]:
    """What becomes of models that are `values` in every column."""
    partition = f"partition.num_clients={len(values)}"
    engine = engine_of(partition, "rounds=4", clock=clock)
    theta = torch.tensor(values, dtype=torch.float32)[:, None]
    engine.hub.hub = engine.hub.hub._replace(w=theta.expand(-1, WEIGHTS).clone())
    for round in range(1, rounds + 1):
        engine.round(round, evaluate_pre=False, evaluate_post=False)
    w = engine.hub.hub.w
    assert (w == w[:, :1]).all()
    return [float(value) for value in w[:, 0]]


@pytest.mark.usefixtures("untrained")
def test_two_peers_by_hand() -> None:
    assert mixed("{}", [0, 1]) == [0.5, 0.5]
    assert mixed("{order: gs_index}", [0, 1]) == [0.5, 0.75]
    assert mixed("{order: gs_index}", [0, 1], rounds=2) == [0.625, 0.6875]
    assert mixed("{mode: async}", [0, 1]) == [0.5, 0.5]
    slots = "{mode: async, compute: 1, period: 2, offset: {name: given, values: [0, 1]}}"
    assert mixed(slots, [0, 1]) == [0.5, 0.75]
    assert mixed(slots, [0, 1], rounds=2) == [0.625, 0.6875]
    late = "{mode: async, compute: 1, period: 2, offset: {name: given, values: [1, 0]}}"
    assert mixed(late, [0, 1]) == [0.25, 0.5]


@pytest.mark.usefixtures("untrained")
def test_who_begins_before_another_has_published_hears_what_was_there_before() -> None:
    # Peer 0 has [0, 2], peer 1 [1, 3]: peer 1 begins before 0 has published, and 0 begins again before 1 has.
    overlapping = "{mode: async, compute: 2, offset: {name: given, values: [0, 1]}}"
    assert mixed(overlapping, [0, 1]) == [0.5, 0.5]
    # Then 0 begins at 2 with its 0.5 and the old 1 of peer 1; peer 1 at 3 with two halves.
    assert mixed(overlapping, [0, 1], rounds=2) == [0.75, 0.5]


@pytest.mark.usefixtures("untrained")
def test_a_random_order_is_one_of_all_and_changes() -> None:
    found = {tuple(mixed("{order: gs_random}", [0, 1], rounds)) for rounds in (1, 2, 3)}
    assert mixed("{order: gs_random}", [0, 1]) in ([0.5, 0.75], [0.25, 0.5])
    assert len(found) == 3


def test_times_of_a_round_with_a_server_by_hand() -> None:
    """Latency 1, a model's bytes at MODEL / 2 a second, one epoch of a second; client 3 takes 5."""
    compute = "{name: given, values: [1, 1, 1, 5]}"
    links = f"latency: 1, bandwidth: {MODEL / 2}"
    engine = engine_of(method="fedavg", clock=f"{{compute: {compute}, {links}}}")
    # Down 1 + 2, training, up 1 + 2.
    assert times(engine, 1) == [
        (0, 0, 7, "done"),
        (1, 0, 7, "done"),
        (2, 0, 7, "done"),
        (3, 0, 11, "done"),
        (-1, 0, 11, "done"),
    ]
    assert times(engine, 2)[-1] == (-1, 11, 22, "done")
    limited = engine_of(method="fedavg", clock=f"{{compute: {compute}, {links}, deadline: 8}}")
    assert times(limited, 1)[2:] == [(2, 0, 7, "done"), (3, 0, 11, "late"), (-1, 0, 8, "done")]
    assert times(limited, 2)[0] == (0, 8, 15, "done")


def test_epochs_take_their_time() -> None:
    engine = engine_of("training.epochs=3", method="fedavg", clock="{compute: 2}")
    assert times(engine, 1)[-1] == (-1, 0, 6, "done")
    steps = engine_of("training={steps: 5, batch_size: 10}", method="fedavg", clock="{compute: 2}")
    assert times(steps, 1)[-1] == (-1, 0, 5, "done"), "5 of the 2 batches of an epoch"
    samples = engine_of(method="fedavg", clock="{compute: 0.5, unit: sample}")
    assert times(samples, 1)[-1] == (-1, 0, 10, "done"), "20 samples"


def test_more_are_selected_than_are_wanted() -> None:
    compute = "{name: given, values: [4, 3, 2, 1]}"
    clock = f"{{compute: {compute}, over_selection: 2}}"
    engine = engine_of("participation.fraction=0.5", method="fedavg", clock=clock)
    report = engine.round(1, evaluate_pre=True, evaluate_post=True)
    assert report.participants == 2
    assert report.clock is not None
    assert report.clock["outcome"] == ["surplus", "surplus", "done", "done", "done"]
    assert report.clock["end"][-1] == 2
    downloads, uploads = report.traffic[0], report.traffic[1]
    assert sorted(downloads["dst"].tolist()) == [0, 1, 2, 3] and sorted(uploads["src"].tolist()) == [2, 3]
    taking_part = {
        point: [
            bool(each)
            for block in report.clients
            if (block["point"], block["split"], block["model"]) == (point, "test", "personalised")
            for each in block["participant"]
        ]
        for point in ("pre", "post")
    }
    assert taking_part["post"] == [False, False, True, True] == taking_part["pre"]


def test_what_comes_late_is_as_if_it_had_not_been_selected(tmp_path: Path) -> None:
    """A mean of two of four, whoever the two others were."""
    clock = "{compute: {name: given, values: [1, 9, 9, 1]}, deadline: 2}"
    engine = engine_of(method="fedavg", clock=clock)
    engine.round(1, evaluate_pre=False, evaluate_post=False)
    plain = engine_of(method="fedavg")
    plain.hub.sample = lambda round: torch.tensor([0, 3])  # type: ignore[method-assign]
    plain.round(1, evaluate_pre=False, evaluate_post=False)
    assert torch.equal(engine.hub.hub.w, plain.hub.hub.w)


def test_a_round_without_participants_changes_nothing(tmp_path: Path) -> None:
    world, pool = small_world("rounds=3", "clock={drop_out: 0.9}", "checkpoint.every=0", method="fedavg")
    engine = LocalEngine(world, pool)
    path = drive(world, engine, tmp_path / "run")
    rounds, clock = Result(path).rounds(), Result(path).clock()
    failed = clock[clock["outcome"] == "failed"].groupby("round").size()
    assert (failed == NUM_CLIENTS).any(), "the seed of the test has such a round"
    trained = rounds.query("split == 'train'").set_index("round")
    assert (trained["participants"] == NUM_CLIENTS - failed.reindex(trained.index, fill_value=0)).all()
    assert (trained["download_bytes"] == NUM_CLIENTS * MODEL).all()


def test_times_of_peers_by_hand() -> None:
    """Everyone hears everyone, 16 bytes a second into 3 and more elsewhere."""
    into = [3.0 * (MODEL + 8), 3.0 * (MODEL + 8), 3.0 * (MODEL + 8), (MODEL + 8) / 2]
    clock = f"{{latency: 0.5, compute: 2, bandwidth: {{name: given, values: {into}}}}}"
    # An answer takes 2 (0.5 + 0.5); 3 is as slow to send as to receive: one model in 2 s, three in 6.
    engine = engine_of(clock=clock)
    assert times(engine, 1) == [
        (0, 0, 6, "done"),
        (1, 0, 6, "done"),
        (2, 0, 6, "done"),
        (3, 0, 10, "done"),
        (-1, 0, 10, "done"),
    ]
    turns = engine_of(clock=clock.replace("{latency", "{order: gs_index, latency", 1))
    assert times(turns, 1) == [
        (0, 0, 6, "done"),
        (1, 6, 12, "done"),
        (2, 12, 18, "done"),
        (3, 18, 28, "done"),
        (-1, 0, 28, "done"),
    ]
    assert times(turns, 2)[0] == (0, 28, 34, "done")


@pytest.mark.parametrize("order", ["jacobi", "gs_index"])
def test_a_peer_that_does_not_answer_is_heard_by_nobody(order: str) -> None:
    """Links of client 2 are slow: 2 (0 + 4) = 8 s for an answer."""
    clock = f"{{order: {order}, latency: {{name: given, values: [0, 0, 4, 0]}}, timeout: 5}}"
    engine = engine_of(clock=clock)
    before = engine.hub.hub.w.clone()
    rows = stays(engine, 1)
    assert [row[5] for row in rows] == [2, 2, 0, 2, 0]
    assert [row[3] - row[2] for row in rows[:4]] == [6, 6, 6, 6], "all wait for it in vain, and it for them"
    assert not torch.equal(engine.hub.hub.w[2], before[2]), "it trains alone"
    report = engine.round(2, evaluate_pre=False, evaluate_post=False)
    ends = {int(end) for block in report.traffic for end in (*block["src"], *block["dst"])}
    assert ends == {0, 1, 3}


@pytest.mark.parametrize("order", ["jacobi", "gs_index"])
def test_a_peer_that_fails_keeps_its_model_and_is_heard_by_nobody(order: str) -> None:
    engine = engine_of(clock=f"{{order: {order}, drop_out: 0.4}}")
    seen = set()
    for round in range(1, 12):
        before = engine.hub.hub.w.clone()
        rows = [row for row in stays(engine, round) if row[0] >= 0]
        failed = sorted(row[0] for row in rows if row[4] == "failed")
        kept = [
            client for client in range(NUM_CLIENTS) if torch.equal(before[client], engine.hub.hub.w[client])
        ]
        assert kept == failed and len(rows) == NUM_CLIENTS
        there = NUM_CLIENTS - len(failed)
        assert all(row[5] == there - 1 for row in rows if row[4] == "done")
        seen.add(len(failed))
    assert len(seen) > 1


def test_own_paces_by_hand() -> None:
    """Peer 0 takes 1 s, the others 10: a round is four ends of iterations."""
    compute = "{name: given, values: [1, 10, 10, 10]}"
    engine = engine_of("rounds=4", clock=f"{{mode: async, compute: {compute}}}")
    first = stays(engine, 1)
    assert [row[:5] for row in first] == [
        (0, 1, 0, 1, "done"),
        (1, 1, 0, 10, "done"),
        (2, 1, 0, 10, "done"),
        (3, 1, 0, 10, "done"),
        (0, 2, 1, 2, "done"),
        (0, 3, 2, 3, "done"),
        (0, 4, 3, 4, "done"),
    ]
    # Others are 0, 1, 2, 3 versions behind peer 0 while they are in their first iteration.
    assert [row[6:] for row in first if row[0] == 0] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    report = engine.round(2, evaluate_pre=True, evaluate_post=True)
    assert report.participants == 3, "peer 0 is done"
    second = stays(engine, 3)
    assert {row[1] for row in second} == {3}, "the others' second ended in this round, their third began"


def test_keys_and_rates_go_by_the_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    real = Gossip.train

    def train(self: Any, cohort: Cohort, w: torch.Tensor) -> torch.Tensor:
        asked.extend((client, cohort.round) for client in cohort.ids.tolist())
        return real(self, cohort, w)

    monkeypatch.setattr(Gossip, "train", train)
    compute = "{name: given, values: [1, 10, 10, 10]}"
    engine = engine_of("rounds=2", clock=f"{{mode: async, compute: {compute}}}")
    for round in (1, 2):
        report = engine.round(round, evaluate_pre=True, evaluate_post=True)
        assert {int(block["round"]) for block in report.clients} == {round - 1, round}
        counted = [
            (block["round"], block["point"], block["split"], int(client))
            for block in report.clients
            for client in np.atleast_1d(block["client"])
        ]
        assert len(set(counted)) == len(counted), "recorded once, whoever had two turns"
    assert asked[:4] == [(0, 1), (0, 2), (1, 1), (2, 1)]
    assert sorted(asked) == [(client, round) for client in range(4) for round in (1, 2)]


@pytest.mark.parametrize("order", ["gs_index", "gs_random"])
def test_ua_pdfl_decides_by_the_answers_of_the_rounds_start(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(method="ua_pdfl", clock=f"{{order: {order}}}")
    engine.round(1, evaluate_pre=False, evaluate_post=False)
    start, read = engine.hub.hub, []
    method, real = engine.hub.method, engine.hub.method.download

    def download(net: Any, hub: Any, plan: Any) -> Any:
        read.append(hub)
        return real(net, hub, plan)

    monkeypatch.setattr(method, "download", download)
    engine.round(2, evaluate_pre=False, evaluate_post=False)
    assert len(read) == NUM_CLIENTS
    assert all(torch.equal(hub.u, start.u) and torch.equal(hub.a, start.a) for hub in read)
    moved = [int((hub.w != start.w).any(1).sum()) for hub in read]
    assert moved == [0, 1, 2, 3], "models are the newest"


def test_a_run_writes_its_times_and_resumes_in_the_middle(tmp_path: Path) -> None:
    clock = "clock={mode: async, compute: {name: lognormal, median: 1, sigma: 1}, drop_out: 0.2}"
    config = {**CONFIG, "method": {"name": "ua_pdfl"}, "storage_path": str(tmp_path), "rounds": 5}
    whole = raypfl.run(config, ["name=whole", clock, "checkpoint.every=2"]).path
    part = raypfl.run(config, ["name=part", clock, "checkpoint.every=2", "checkpoint.keep=9"]).path
    # As if it had been killed after round 4: everything later is replayed.
    (last,) = (part / "checkpoints").glob("round-000005")
    last.rename(part / "removed")
    (part / "summary.md").unlink()
    raypfl.resume(part)
    assert_same_run(part, whole, "ua_pdfl")
    one, other = (Result(path).clock().drop(columns="run") for path in (whole, part))
    assert one.equals(other)
    assert (one.groupby("client").size() == 5).all() and (one["end"] > one["start"]).all()
    assert one["staleness_max"].max() > 0
    with pytest.raises(CheckpointError, match="rounds=5"):
        raypfl.resume(part, ["rounds=6"])


def test_equal_speeds_and_a_barrier_leave_the_same_tables(tmp_path: Path) -> None:
    paths = []
    for name, clock in (("none", "null"), ("equal", "{}")):
        world, pool = small_world("rounds=3", f"clock={clock}", "participation.fraction=0.5", method="fedavg")
        paths.append(drive(world, LocalEngine(world, pool), tmp_path / name))
    assert_same_run(*paths, method="fedavg")
    none, equal = (Result(path).clock() for path in paths)
    assert len(none) == 0
    assert equal.query("client == -1")[["start", "end"]].values.tolist() == [[0, 1], [1, 2], [2, 3]]


def test_a_clock_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    engine = engine_of(method="fedavg", clock="{compute: 3}")
    stays(engine, 1)
    parts = engine.save(building := checkpoints.begin(tmp_path, 1))
    assert [part.file for part in parts] == ["hub.safetensors", "clock.safetensors", "state-000.safetensors"]
    assert float(checkpoints.read_clock(building)["now"]) == 3.0


@pytest.mark.parametrize(
    ("method", "overrides", "says"),
    [
        (
            "fedavg",
            ["clock={deadline: 2, compute: 3, latency: 0.5}"],
            ["clock.deadline = 2", "needs at least 3.5 s", "clock.compute"],
        ),
        (
            "ua_pdfl",
            ["clock={mode: async}", "participation.fraction=0.5"],
            ["clock.mode = async", "selects 2 of 4", "participation={fraction: 1.0}"],
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    method: str, overrides: list[str], says: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        small_world(*overrides, method=method)
    for words in says:
        assert words in str(refused.value)


def test_a_method_that_cannot_take_turns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gossip, "by_turns", False)
    with pytest.raises(
        ConfigError, match="clock.order = gs_index: peers of method peer_fedavg work in rounds"
    ):
        small_world(FULL, "clock={order: gs_index}", method="peer_fedavg")


def test_uploads_of_unknown_size_are_refused_where_size_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    from raypfl.methods.global_model import GlobalModel

    monkeypatch.setattr(GlobalModel, "upload_bytes", lambda self, net, clients: None)
    with pytest.raises(ConfigError, match="how much method fedavg uploads is not known"):
        small_world("clock={deadline: 5, bandwidth: 1e6}", method="fedavg")
    assert times(engine_of(method="fedavg", clock="{deadline: 5, latency: 1}"), 1)[-1] == (-1, 0, 3, "done")
    # Without a choice to make, what was sent tells how long it took.
    free = engine_of(method="fedavg", clock=f"{{bandwidth: {MODEL}}}")
    assert times(free, 1)[-1] == (-1, 0, 3, "done")
