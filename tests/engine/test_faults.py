"""What a run does about faults, without Ray: who is left out, what is counted, when storage is tried."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import stumbling
import torch
from failures import Notes, break_down, repair
from small_runs import CONFIG, assert_same_run, drive, last_state, small_world

import raypfl
from raypfl.engine.contract import HostsLost, RoundReport
from raypfl.engine.faults import FaultsConfig, Patience, Tolerance
from raypfl.engine.host import all_finite
from raypfl.engine.local import LocalEngine
from raypfl.errors import ClientError, ConfigError, PlacementError, StorageError
from raypfl.records import checkpoints
from raypfl.result import Result


class Failing(LocalEngine):
    """Raises once in each of some rounds, as their engine would."""

    def __init__(self, *arguments: Any, faults: dict[int, Exception]) -> None:
        super().__init__(*arguments)
        self.faults = dict(faults)

    def round(
        self, round: int, *, evaluate_pre: bool, evaluate_post: bool, away: Collection[int] = ()
    ) -> RoundReport:
        report = super().round(round, evaluate_pre=evaluate_pre, evaluate_post=evaluate_post, away=away)
        if round in self.faults:
            # After the round, so that what it left behind has to be undone.
            raise self.faults.pop(round)
        return report


@pytest.mark.parametrize(
    ("method", "clock"),
    [
        ("fedavg", "null"),
        ("fedamp", "null"),
        ("pfedme", "null"),
        ("fedfomo", "null"),
        ("ua_pdfl", "null"),
        ("dispfl", "null"),
        ("fedavg", "{compute: {name: given, values: [1, 2, 3, 4]}, over_selection: 1.3}"),
        ("ua_pdfl", "{order: gs_index}"),
    ],
)
def test_a_client_that_raises_is_left_out_as_if_it_had_not_been_selected(
    method: str, clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["faults.policy=drop_clients", "rounds=4", "evaluation.every=1", f"clock={clock}"]
    if method == "fedavg":
        options.append("participation.fraction=0.75")
    if method == "pfedme":
        options += ["method.update_scope=all", "participation.fraction=0.5"]
    world, pool = small_world(*options, method=method)
    monkeypatch.setenv(stumbling.VARIABLE, str(tmp_path))
    notes = Notes({2: lambda: stumbling.ask(tmp_path, "raise")})
    disturbed = drive(world, LocalEngine(world, pool), tmp_path / "disturbed", notes)
    dropped = Result(disturbed).dropped()
    assert list(dropped["round"]) == [3] and list(dropped["reason"]) == ["raised"]
    assert "raised (RuntimeError: the model stumbled) in round 3; left out of it" in notes.texts[0]
    client = int(dropped["client"][0])
    away = {3: {client: "raised"}}
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed", away=away)
    assert_same_run(disturbed, undisturbed, method)
    plain = drive(world, LocalEngine(world, pool), tmp_path / "plain")
    trained = Result(disturbed).clients().query("round == 3 and split == 'train'")
    assert client not in set(trained["client"])
    assert not Result(plain).rounds().drop(columns=["run"]).equals(Result(disturbed).rounds())


def test_without_the_only_participant_there_is_no_round(tmp_path: Path) -> None:
    world, pool = small_world("participation.count=1", "rounds=2", method="fedavg")
    (selected,) = world.sample(2).tolist()
    with pytest.raises(ClientError, match=rf"round 2 has no participants left: client\(s\) \[{selected}\]"):
        drive(world, LocalEngine(world, pool), tmp_path / "run", away={2: {selected: "hung"}})


def test_so_many_clients_may_be_left_out_and_no_more(tmp_path: Path) -> None:
    options = ["faults={policy: drop_clients, max_dropped: 2}", "rounds=4"]
    world, pool = small_world(*options)
    faults = {round: ClientError("client(s) [1] raised", [1]) for round in (1, 2, 3)}
    with pytest.raises(ClientError, match=r"3 clients would have been left out .*max_dropped = 2.*resume"):
        drive(world, Failing(world, pool, faults=faults), tmp_path / "run")
    assert list(Result(tmp_path / "run").dropped()["round"]) == [1, 2]


def test_who_was_left_out_before_a_run_was_resumed_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stumbling.VARIABLE, str(tmp_path))
    config = {**CONFIG, "name": "run", "storage_path": str(tmp_path)}
    budget = "faults={policy: drop_clients, max_dropped: 2}"

    def ask() -> None:
        for claim in tmp_path.glob("claimed-*"):
            claim.unlink()
        stumbling.ask(tmp_path, "raise")

    ask()
    run = raypfl.run(config, [budget, "rounds=1"]).path
    ask()
    raypfl.resume(run, ["rounds=2"])
    ask()
    with pytest.raises(ClientError, match=r"3 clients would .*, 2 of them before it was resumed, and"):
        raypfl.resume(run, ["rounds=3"])
    ask()
    raypfl.resume(run, ["rounds=3", "faults.max_dropped=3"])
    assert list(Result(run).dropped()["round"]) == [1, 2, 3]


def test_who_fails_in_an_evaluation_is_not_helped_by_being_left_out(tmp_path: Path) -> None:
    world, pool = small_world("faults.policy=drop_clients", "rounds=2")
    engine = Failing(world, pool, faults={2: ClientError("phase evaluation, client(s) [1]")})
    with pytest.raises(ClientError, match="phase evaluation"):
        drive(world, engine, tmp_path / "run")


@pytest.mark.parametrize("fault", [HostsLost("gone."), ClientError("slow.", [1], hung=True)])
def test_fail_stops_and_names_the_last_checkpoint_which_is_whole(fault: Exception, tmp_path: Path) -> None:
    world, pool = small_world("faults.policy=fail")
    with pytest.raises((PlacementError, ClientError)) as stopped:
        drive(world, Failing(world, pool, faults={4: fault}), tmp_path / "run")
    assert "in round 4" in str(stopped.value) and "faults.policy = fail" in str(stopped.value)
    assert f"Last good checkpoint: {tmp_path}/run/checkpoints/round-000002." in str(stopped.value)
    assert str(stopped.value).endswith(f"raypfl resume {tmp_path}/run")
    assert last_state(tmp_path / "run", "fedamp")[0] == 2
    checkpoint = checkpoints.latest(tmp_path / "run/checkpoints")
    assert checkpoint is not None and checkpoints.read_manifest(checkpoint).round == 2


def test_restart_replays_what_is_lost_or_hangs_and_stops_where_code_raises(tmp_path: Path) -> None:
    world, pool = small_world()
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    faults = {3: HostsLost("gone."), 4: ClientError("slow.", [1], hung=True)}
    disturbed = drive(world, Failing(world, pool, faults=faults), tmp_path / "disturbed")
    assert_same_run(disturbed, undisturbed)
    with pytest.raises(ClientError, match="raised.*Last good checkpoint"):
        drive(world, Failing(world, pool, faults={4: ClientError("raised.", [1])}), tmp_path / "stopped")


def test_each_checkpoint_has_a_budget_of_its_own(tmp_path: Path) -> None:
    tolerance = Tolerance(FaultsConfig(budget=1))
    tolerance.survive(HostsLost("gone"), 3, 2)
    tolerance.committed()
    tolerance.survive(HostsLost("gone"), 5, 4)
    with pytest.raises(PlacementError, match="2 times since round 4"):
        tolerance.survive(HostsLost("gone"), 5, 4)


def test_what_cannot_be_had_is_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"faults.deadline = 5 with engine.name = local"):
        small_world("faults.deadline=5", "engine.name=local")
    asynchronous = "clock={mode: async, compute: {name: lognormal, median: 1}}"
    with pytest.raises(ConfigError, match="no round that a client could be left out of"):
        small_world("faults.policy=drop_clients", asynchronous, method="ua_pdfl")


class Time:
    """Passes only when somebody sleeps, or a round is done."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_run_goes_on_while_storage_fails_and_loses_nothing(tmp_path: Path) -> None:
    world, pool = small_world("evaluation.every=1")
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    run, time = tmp_path / "run", Time()

    def pass_time() -> None:
        time.now += 10

    # The checkpoints of rounds 4 and 6 are due meanwhile.
    after = {3: lambda: break_down(run), 4: pass_time, 5: lambda: repair(run)}
    notes = Notes(after)
    patience = Patience(60, clock=time.clock, sleep=time.sleep)
    assert drive(world, LocalEngine(world, pool), run, notes, patience=patience) == run
    first, second = notes.texts
    assert first.startswith("cannot write") and "keeps what it cannot write" in first
    assert second == "Storage works again."
    assert_same_run(run, undisturbed)


def test_storage_that_fails_for_too_long_ends_the_run_and_says_what_is_kept(tmp_path: Path) -> None:
    world, pool = small_world("evaluation.every=1")
    run, time = tmp_path / "run", Time()
    notes = Notes({3: lambda: break_down(run)})
    patience = Patience(40, clock=time.clock, sleep=time.sleep)
    with pytest.raises(StorageError) as failed:
        drive(world, LocalEngine(world, pool), run, notes, patience=patience)
    # The last round has nothing else to do than to wait.
    assert time.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 9.0]
    message = str(failed.value)
    assert "Storage has failed for 40 s (faults.storage_seconds = 40)." in message
    assert "could not be written. Continue with: raypfl resume" in message
    repair(run)
    assert last_state(run, "fedamp")[0] == 2
    raypfl.resume(run)
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    assert_same_run(run, undisturbed)


def test_a_loss_while_storage_fails_waits_for_the_checkpoint(tmp_path: Path) -> None:
    world, pool = small_world()
    undisturbed = drive(world, LocalEngine(world, pool), tmp_path / "undisturbed")
    run = tmp_path / "run"

    class Repairing(Time):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 2:
                repair(run)

    time = Repairing()
    patience = Patience(60, clock=time.clock, sleep=time.sleep)
    engine = Failing(world, pool, faults={4: HostsLost("gone.")})
    drive(world, engine, run, Notes({3: lambda: break_down(run)}), patience=patience)
    assert time.slept == [1.0, 2.0]
    assert_same_run(run, undisturbed)


def test_rows_with_a_number_that_is_none():
    rows = torch.zeros(6, 4, 5)
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        rows[row, 2, 3] = value
    rows[3] = torch.finfo(torch.float32).max
    rows[4, 0, 0], rows[4, 0, 1] = math.inf, -math.inf
    assert all_finite(rows).tolist() == [False, False, False, True, False, True]
    assert all_finite(rows[:, 2, 3]).tolist() == [False, False, False, True, True, True]
