import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypfl.errors import StorageError
from raypfl.records import tables
from raypfl.records.metrics import SERVER, Metrics

TABLES = ("clients", "rounds", "traffic")


class Clock:
    """Seconds that pass only when told to, and `cost` at each reading."""

    def __init__(self, cost=0.0):
        self.now = 0.0
        self.cost = cost

    def __call__(self):
        self.now += self.cost
        return self.now


def begin(folder, **options):
    return Metrics(folder, method="fedavg", seed=3, reported=("global", "pre"), **options)


def block(round, point, split, clients, *, model="personalised", salt=0.0):
    clients = np.asarray(clients)
    accuracy = np.full(len(clients), np.nan) if split == "train" else (clients + round + salt) % 7 / 10
    return {
        "round": round,
        "client": clients,
        "point": point,
        "model": model,
        "split": split,
        "accuracy": accuracy,
        "loss": 1.0 / (1 + clients + round),
        "samples": 10 + clients,
        "participant": clients % 2 == 0,
    }


def record(metrics, round, *, clients=range(4)):
    """What a driver hands over after a round: the PRE rows of the one before, then its own."""
    metrics.add_round(
        round,
        clients=[
            block(round - 1, "pre", "test", clients, model="global"),
            block(round, "post", "test", clients),
            block(round, "post", "train", [c for c in clients if c % 2 == 0]),
        ],
        traffic=[
            {"src": SERVER, "dst": [0, 2], "kind": "model", "values": 5, "bytes": 20},
            {"src": [0, 2], "dst": SERVER, "kind": ["model", "model"], "values": [5, 6], "bytes": [20, 24]},
        ],
        participants=2,
        round_seconds=float(round),
        server_seconds=0.25,
        evaluation_seconds=0.5,
    )


def finish(metrics, round):
    metrics.add_evaluation([block(round, "pre", "test", range(4), model="global")])
    metrics.flush(force=True)


def read(folder):
    return {name: pq.read_table(folder / f"{name}.parquet") for name in TABLES}


def as_text(folder):
    """Rows with every digit, and with NaN equal to NaN."""
    return {name: [str(row) for row in table.to_pylist()] for name, table in read(folder).items()}


def test_columns_and_types(tmp_path):
    record(metrics := begin(tmp_path), 1)
    metrics.flush(force=True)
    text, types = pa.dictionary(pa.int32(), pa.string()), {}
    for name, table in read(tmp_path).items():
        types[name] = dict(zip(table.schema.names, table.schema.types, strict=True))
    run = {"method": text, "seed": pa.int64(), "round": pa.int32()}
    group = {"point": text, "model": text, "split": text}
    assert types["clients"] == {
        **run,
        "client": pa.int32(),
        **group,
        "accuracy": pa.float64(),
        "loss": pa.float64(),
        "samples": pa.int64(),
        "participant": pa.bool_(),
    }
    means = ("accuracy_mean", "accuracy_weighted", "accuracy_sd", "accuracy_worst_decile", "loss_mean")
    seconds = ("round_seconds", "server_seconds", "evaluation_seconds")
    assert types["rounds"] == {
        **run,
        **group,
        "clients": pa.int32(),
        **dict.fromkeys(means, pa.float64()),
        "participants": pa.int32(),
        "upload_bytes": pa.int64(),
        "download_bytes": pa.int64(),
        **dict.fromkeys(seconds, pa.float64()),
    }
    message = {"src": pa.int32(), "dst": pa.int32(), "kind": text, "values": pa.int64(), "bytes": pa.int64()}
    assert types["traffic"] == {**run, **message}


def test_tables_are_there_and_empty_before_the_first_round(tmp_path):
    begin(tmp_path / "metrics")
    assert [len(table) for table in read(tmp_path / "metrics").values()] == [0, 0, 0]


def test_rounds_by_hand(tmp_path):
    record(metrics := begin(tmp_path), 1)
    record(metrics, 2)
    metrics.flush(force=True)
    rounds = pd.read_parquet(tmp_path / "rounds.parquet").set_index(["round", "point", "model", "split"])

    initial = rounds.loc[(0, "pre", "global", "test")]
    assert initial.accuracy_mean == pytest.approx((0.0 + 0.1 + 0.2 + 0.3) / 4)
    assert initial.accuracy_weighted == pytest.approx((0.1 * 11 + 0.2 * 12 + 0.3 * 13) / 46)
    assert initial.accuracy_worst_decile == 0.0
    assert (initial.clients, initial.participants, initial.upload_bytes, initial.round_seconds) == (
        4,
        0,
        0,
        0,
    )

    pre = rounds.loc[(1, "pre", "global", "test")]
    post = rounds.loc[(1, "post", "personalised", "test")]
    for row in (pre, post):  # PRE of round 1 came with round 2, and still has the costs of round 1
        assert (row.participants, row.upload_bytes, row.download_bytes) == (2, 44, 40)
        assert (row.round_seconds, row.server_seconds, row.evaluation_seconds) == (1.0, 0.25, 0.5)

    train = rounds.loc[(2, "post", "personalised", "train")]
    assert train.clients == 2
    assert train.loss_mean == pytest.approx((1 / 3 + 1 / 5) / 2)
    assert np.isnan(train.accuracy_mean)


def test_messages_between_peers_are_both_sent_and_received(tmp_path):
    metrics = begin(tmp_path)
    message = {"src": [0, 1], "dst": [1, 2], "kind": "model", "values": 3, "bytes": 12}
    metrics.add_round(1, clients=[], traffic=[message], participants=3, round_seconds=1.0)
    metrics.flush(force=True)
    (row,) = read(tmp_path)["rounds"].to_pylist()
    assert (row["upload_bytes"], row["download_bytes"]) == (24, 24)


def test_a_round_without_evaluation_has_its_training_row(tmp_path):
    metrics = begin(tmp_path)
    metrics.add_round(1, clients=[], traffic=[], participants=0, round_seconds=1.5)
    metrics.flush(force=True)
    (row,) = read(tmp_path)["rounds"].to_pylist()
    assert (row["round"], row["split"], row["clients"], row["round_seconds"]) == (1, "train", 0, 1.5)


def test_the_order_of_blocks_does_not_show(tmp_path):
    whole, cut = begin(tmp_path / "whole"), begin(tmp_path / "cut")
    costs = {"traffic": [], "participants": 7, "round_seconds": 1.0}
    whole.add_round(1, clients=[block(1, "post", "test", range(7))], **costs)
    parts = [block(1, "post", "test", ids) for ids in ([6, 2], [0, 5, 3], [4, 1], [])]
    cut.add_round(1, clients=parts, **costs)
    for metrics in (whole, cut):
        metrics.flush(force=True)
    assert as_text(tmp_path / "whole") == as_text(tmp_path / "cut")


@pytest.mark.parametrize("killed_after_rounds", [3, 5])
def test_truncate_and_go_on_equals_undisturbed(tmp_path, killed_after_rounds):
    undisturbed = begin(tmp_path / "undisturbed")
    for round in range(1, 7):
        record(undisturbed, round)
    finish(undisturbed, 6)

    killed = begin(tmp_path / "killed")
    for round in range(1, killed_after_rounds + 1):
        record(killed, round)
    killed.flush(force=True)
    resumed = begin(tmp_path / "killed")
    resumed.truncate(3)
    for round in range(4, 7):
        record(resumed, round)
    finish(resumed, 6)

    assert as_text(tmp_path / "killed") == as_text(tmp_path / "undisturbed")


def test_truncate_keeps_post_and_drops_pre_of_the_checkpoint(tmp_path):
    metrics = begin(tmp_path)
    for round in (1, 2):
        record(metrics, round)
    finish(metrics, 2)
    metrics.truncate(1)
    kept = {(row["round"], row["point"]) for row in read(tmp_path)["clients"].to_pylist()}
    assert kept == {(0, "pre"), (1, "post")}
    assert {row["round"] for row in read(tmp_path)["traffic"].to_pylist()} == {1}


def test_matrices_are_kept_up_to_the_checkpoint(tmp_path):
    metrics = begin(tmp_path)
    for round in (1, 2):
        entries = {"name": "weight", "receiver": [1, 0], "source": [0, 1], "value": [0.5, float(round)]}
        metrics.add_round(round, clients=[], traffic=[], pairs=[entries], participants=2, round_seconds=1.0)
    metrics.truncate(1)
    rows = pq.read_table(tmp_path / "pairs.parquet").to_pylist()
    run = {"method": "fedavg", "seed": 3, "round": 1, "name": "weight"}
    assert rows == [
        {**run, "receiver": 0, "source": 1, "value": 1.0},
        {**run, "receiver": 1, "source": 0, "value": 0.5},
    ]


def test_truncate_refuses_a_round_that_the_tables_do_not_have(tmp_path):
    record(metrics := begin(tmp_path), 1)
    with pytest.raises(StorageError, match=r"rounds\.parquet has no round 2"):
        metrics.truncate(2)
    assert len(read(tmp_path)["clients"]) == 10


def test_back_to_the_very_beginning(tmp_path):
    record(metrics := begin(tmp_path), 1)
    metrics.flush(force=True)
    metrics = begin(tmp_path)
    metrics.truncate(0)
    assert [len(table) for table in read(tmp_path).values()] == [0, 0, 0]
    record(metrics, 1)
    metrics.flush(force=True)
    assert len(read(tmp_path)["rounds"]) == 3


def test_rewriting_is_paced(tmp_path):
    clock = Clock(cost=0.5)  # each write reads the clock twice: it seems to take 0.5 s, so 10 s of pause
    metrics = begin(tmp_path, clock=clock)

    def rounds_on_disk():
        return len(set(read(tmp_path)["traffic"]["round"].to_pylist()))

    record(metrics, 1)
    assert rounds_on_disk() == 1
    written = clock.now
    record(metrics, 2)
    assert rounds_on_disk() == 1
    clock.now = written + 9.0
    record(metrics, 3)
    assert rounds_on_disk() == 1
    clock.now = written + 10.0
    record(metrics, 4)
    assert rounds_on_disk() == 4
    record(metrics, 5)
    metrics.flush(force=True)
    assert rounds_on_disk() == 5


def test_a_cheap_write_still_waits_two_seconds(tmp_path):
    clock = Clock()
    record(metrics := begin(tmp_path, clock=clock), 1)
    clock.now = 1.9
    record(metrics, 2)
    assert set(read(tmp_path)["traffic"]["round"].to_pylist()) == {1}
    clock.now = 2.0
    record(metrics, 3)
    assert set(read(tmp_path)["traffic"]["round"].to_pylist()) == {1, 2, 3}


def test_readable_while_it_grows(tmp_path):
    metrics = begin(tmp_path)
    with pq.ParquetFile(tmp_path / "clients.parquet") as opened_before:
        for round in range(1, 4):
            record(metrics, round)
            metrics.flush(force=True)
            rows = pd.read_parquet(tmp_path / "clients.parquet")
            assert rows["round"].max() == round
            assert len(rows) == 10 * round
        assert opened_before.read().num_rows == 0  # a reader keeps the file that it opened


def test_many_small_writes_do_not_leave_many_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_PER_GROUP", 16)
    metrics = begin(tmp_path)
    for round in range(1, 9):
        record(metrics, round)
        metrics.flush(force=True)
    with pq.ParquetFile(tmp_path / "clients.parquet") as file:
        assert file.metadata.num_rows == 80
        assert file.num_row_groups <= 80 // 16
    assert pd.read_parquet(tmp_path / "clients.parquet")["round"].is_monotonic_increasing


def test_a_failed_write_loses_nothing(tmp_path, monkeypatch):
    record(metrics := begin(tmp_path), 1)
    metrics.flush(force=True)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    record(metrics, 2)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(StorageError, match=r"traffic\.parquet: No space left on device"):
            metrics.flush(force=True)
    assert set(read(tmp_path)["traffic"]["round"].to_pylist()) == {1}
    metrics.flush(force=True)
    assert read(tmp_path)["traffic"]["round"].to_pylist() == [1] * 4 + [2] * 4


def test_tables_of_another_run_are_refused(tmp_path):
    begin(tmp_path)
    with pytest.raises(StorageError, match="belongs to another run"):
        Metrics(tmp_path, method="fedavg", seed=4, reported=("global", "pre"))


def test_a_damaged_table_is_refused(tmp_path):
    begin(tmp_path)
    (tmp_path / "clients.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(StorageError, match=r"clients\.parquet cannot be read"):
        begin(tmp_path)


def test_a_client_recorded_twice_is_our_mistake(tmp_path):
    with pytest.raises(AssertionError, match="twice"):
        begin(tmp_path).add_evaluation([block(0, "pre", "test", [1, 2]), block(0, "pre", "test", [2])])
