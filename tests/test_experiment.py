"""Whole runs from Python and from the shell: what they leave, and that no disturbance costs anything."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import stumbling
import yaml
from small_runs import CONFIG, IN_ROUND_4, NUM_CLIENTS, STOPPING, assert_same_run, begun
from typer.testing import CliRunner

import raypfl
from raypfl.cli import app
from raypfl.console import Console
from raypfl.errors import (
    CheckpointError,
    ClientError,
    ConfigError,
    DivergedError,
    PlacementError,
    StorageError,
)
from raypfl.records import checkpoints


class Watching(Console):
    """Calls `then(round)` after each round, and keeps the notes."""

    def __init__(self, then: Callable[[int], None] = lambda round: None) -> None:
        self.then, self.rounds, self.notes = then, list[int](), list[str]()

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        self.rounds.append(round)
        self.then(round)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(storage: Path, *overrides: str, console: Console | None = None) -> Path:
    """A run named `run`, unless overridden, below `storage`."""
    named = () if any(override.startswith("name=") for override in overrides) else ("name=run",)
    return raypfl.run(CONFIG, [f"storage_path={storage}", *named, *overrides], console=console).path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every disturbed and resumed run must be equal to."""
    return run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
def test_a_killed_driver_resumes_to_the_same_bits_on_other_hosts(tmp_path: Path, undisturbed: Path) -> None:
    with begun(tmp_path, after=IN_ROUND_4) as (process, path, claim):
        os.kill(stumbling.pid_of(claim), signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    console = Watching()
    raypfl.resume(path, ["engine.num_actors=3"], console=console)
    assert console.rounds == [3, 4, 5, 6]
    assert_same_run(path, undisturbed)


@pytest.mark.slow
def test_ctrl_c_ends_the_round_writes_a_checkpoint_and_says_how_to_resume(
    tmp_path: Path, undisturbed: Path
) -> None:
    with begun(tmp_path, after=IN_ROUND_4) as (process, path, claim):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and process.stderr.readline() == STOPPING
        claim.unlink()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert f"Interrupted after round 4. Continue with: raypfl resume {path}" in out
    latest = checkpoints.latest(path / "checkpoints")
    assert latest is not None and checkpoints.read_manifest(latest).round == 4
    console = Watching()
    raypfl.resume(path, console=console)
    assert console.rounds == [5, 6]
    assert_same_run(path, undisturbed)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_round(tmp_path: Path, undisturbed: Path) -> None:
    with begun(tmp_path, after=IN_ROUND_4) as (process, path, _):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and process.stderr.readline() == STOPPING
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert "round 3/6" in out and "round 4/6" not in out
    raypfl.resume(path)
    assert_same_run(path, undisturbed)


def test_an_interruption_in_the_last_round_stops_the_runs_that_follow(tmp_path: Path) -> None:
    def interrupt(round: int) -> None:
        if round == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "rounds=2", "seed=[1,2]", console=Watching(interrupt))
    assert sorted(path.parent.name for path in tmp_path.glob("run/*/config.yaml")) == ["fedamp-seed1"]
    console = Watching()
    raypfl.resume(tmp_path / "run", console=console)
    assert console.rounds == [1, 2], "of seed 2 only"
    assert set(raypfl.Result(tmp_path / "run").clients()["seed"]) == {1, 2}


def test_an_experiment_resumes_its_unfinished_runs_and_begins_the_missing_ones(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "rounds=3", "seed=[1,2,3]")
    files = {}

    def interrupt(round: int) -> None:
        if console.rounds == [1, 2, 3, 1]:
            files.update(finished_files())
            os.kill(os.getpid(), signal.SIGINT)

    def finished_files() -> dict[Path, int]:
        folder = tmp_path / "run" / "fedamp-seed1"
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    console = Watching(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "rounds=3", "seed=[1,2,3]", console=console)
    console = Watching()
    raypfl.resume(tmp_path / "run", console=console)
    assert console.rounds == [2, 3, 1, 2, 3]
    assert files and finished_files() == files
    for seed in (1, 2, 3):
        assert_same_run(tmp_path / "run" / f"fedamp-seed{seed}", whole / f"fedamp-seed{seed}")


def test_rounds_may_be_raised_on_resume(tmp_path: Path, undisturbed: Path) -> None:
    path = run(tmp_path, "rounds=3")
    raypfl.resume(path, ["rounds=6"])
    assert_same_run(path, undisturbed)


def test_a_run_of_a_version_that_had_fewer_options_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    path = run(tmp_path, "rounds=3")
    config = yaml.safe_load((path / "config.yaml").read_text())
    del config["training"]["augment"], config["clock"]
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    for file in (path / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(file.read_text())
        del manifest["config"]["training"]["augment"], manifest["config"]["clock"], manifest["config_sha256"]
        file.write_text(json.dumps(manifest))
    raypfl.resume(path, ["rounds=6"])
    assert_same_run(path, undisturbed)


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    path = run(tmp_path, "rounds=1")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(StorageError, match=re.escape(f"raypfl resume {path}")):
        run(tmp_path, "rounds=1")
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_checkpoint_of_another_configuration_names_every_key_that_differs(tmp_path: Path) -> None:
    path = run(tmp_path, "rounds=1")
    with pytest.raises(CheckpointError) as refused:
        raypfl.resume(path, ["rounds=2", "training.optimizer.lr=0.2", "seed=4", "engine.num_actors=2"])
    listed = [line.strip() for line in str(refused.value).splitlines() if "->" in line and line[0] == " "]
    assert listed == ["seed: 3 -> 4", "training.optimizer.lr: 0.1 -> 0.2"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(
    tmp_path: Path, undisturbed: Path
) -> None:
    path = run(tmp_path, "rounds=4")
    newest = checkpoints.latest(path / "checkpoints")
    assert newest is not None
    part = newest / "state-000.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    with pytest.raises(
        CheckpointError, match=f"{re.escape(str(newest))} is damaged: {part.name} has SHA-256"
    ):
        raypfl.resume(path, ["rounds=6"])
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    raypfl.resume(path, ["rounds=6"])
    assert_same_run(path, undisturbed)


def test_tables_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    seen: dict[int, int] = {}

    def read(round: int) -> None:
        if round % 2 == 1 and round > 1:  # the checkpoint of the round before has written everything
            table = pq.read_table(tmp_path / "run" / "metrics" / "rounds.parquet")
            seen[round] = max(table["round"].to_pylist())
            assert raypfl.Result(tmp_path / "run").summary["rounds"] == seen[round]

    run(tmp_path, console=Watching(read))
    assert seen.keys() == {3, 5}
    assert all(round - 1 <= recorded <= round for round, recorded in seen.items())


def test_a_diverging_client_is_named_and_what_was_good_is_kept(tmp_path: Path) -> None:
    config = {**CONFIG, "name": "run", "storage_path": str(tmp_path), "checkpoint": {"every": 1}}
    # Of lr 1e30 the first step is finite, the second is not: round 1 has one step a client, round 2 another.
    slow = {"epochs": 1, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 1e30}}
    with pytest.raises(DivergedError) as diverged:
        raypfl.run({**config, "method": {"name": "local"}, "training": slow})
    message = str(diverged.value)
    assert re.search(r"^round 2: the model of client\(s\) \[0\] is no longer finite", message)
    assert f"Last good checkpoint: {tmp_path / 'run' / 'checkpoints' / 'round-000001'}." in message
    assert set(raypfl.Result(tmp_path / "run").clients()["round"]) >= {1}


def test_a_failing_client_shows_its_traceback_once_with_round_and_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stumbling.VARIABLE, str(tmp_path))

    def trip(round: int) -> None:
        if round == 2:
            stumbling.ask(tmp_path, "raise")

    with pytest.raises(ClientError) as failed:
        run(tmp_path, console=Watching(trip))
    message = str(failed.value)
    assert message.startswith("method fedamp, phase local update, client(s) [0], round 3")
    assert message.count("Traceback (most recent call last)") == 1
    assert "\nRuntimeError: the model stumbled\nLast good checkpoint: " in message
    assert failed.value.__cause__ is None and failed.value.__suppress_context__
    raypfl.resume(tmp_path / "run")


def test_the_result_of_a_run_from_python(undisturbed: Path) -> None:
    result = raypfl.Result(undisturbed)
    assert result.summary["method"] == "fedamp" and result.summary["rounds"] == 6
    clients = result.clients().query("split == 'test' and model == 'personalised' and point == 'post'")
    assert len(clients) == 6 * NUM_CLIENTS
    rounds = result.rounds().query("split == 'test' and model == 'personalised' and point == 'post'")
    means = clients.groupby("round")["accuracy"].mean()
    assert rounds.set_index("round")["accuracy_mean"].tolist() == pytest.approx(means.tolist(), abs=1e-15)
    for name in ("config.yaml", "environment.json", "partition.npz", "partition.csv", "summary.md"):
        assert (undisturbed / name).is_file(), name


def test_overrides_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        run(tmp_path, "training.batch_sizes=5")
    assert not list(tmp_path.iterdir())


def test_a_pipe_gets_one_plain_line_a_round(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(CONFIG)))
    arguments = [f"{tmp_path}/config.yaml", f"storage_path={tmp_path}", "name=run", "rounds=2", "seed=[1,2]"]
    result = CliRunner().invoke(app, ["run", *arguments], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    accuracy, pace = r"accuracy \d+\.\d\d% \(personalised, post\)", r"[\d.]+ clients/s  ETA \d:\d\d:\d\d"
    shape = rf"run/fedamp-seed(\d)  round (\d)/2  {accuracy}  {pace}"
    rounds = [match.groups() for match in map(re.compile(shape).fullmatch, lines) if match]
    assert rounds == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert "[2/2] run/fedamp-seed2: 2 rounds" in lines
    assert f"Results are in {tmp_path / 'run'}. Next:" in lines


def test_fewer_rounds_than_done_are_refused(tmp_path: Path) -> None:
    path = run(tmp_path, "rounds=4")
    with pytest.raises(ConfigError, match="has 4 rounds already, and rounds = 2 asks for fewer"):
        raypfl.resume(path, ["rounds=2"])


def test_rounds_that_were_raised_stay_raised(tmp_path: Path) -> None:
    """Killed again, the experiment goes on to the rounds that were asked for last."""
    methods = "method=[{name: local},{name: fedavg}]"
    path = run(tmp_path, methods, "rounds=2")
    raypfl.resume(path, ["rounds=3"])
    console = Watching()
    raypfl.resume(path, console=console)
    assert console.rounds == []
    assert [note for note in console.notes if "complete" in note] == [
        "local-seed3: complete, 3 rounds",
        "fedavg-seed3: complete, 3 rounds",
    ]


def test_settings_hold_before_the_first_checkpoint_too(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(round: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        run(tmp_path, console=Watching(kill))
    with pytest.raises(CheckpointError, match=r"training\.optimizer\.lr: 0\.1 -> 0\.5"):
        raypfl.resume(tmp_path / "run", ["training.optimizer.lr=0.5"])


def test_a_refused_override_does_not_stick(tmp_path: Path) -> None:
    path = run(tmp_path, "rounds=2", "engine.block=2")
    with pytest.raises(PlacementError, match="4 client hosts for 2 blocks"):
        raypfl.resume(path, ["rounds=3", "engine.num_actors=4"])
    console = Watching()
    raypfl.resume(path, ["rounds=3"], console=console)
    assert console.rounds == [3]


def test_a_folder_is_one_process_own(tmp_path: Path) -> None:
    refusals = []

    def resume_beside(round: int) -> None:
        with pytest.raises(StorageError, match="is in use by another process") as caught:
            raypfl.resume(tmp_path / "run")
        refusals.append(caught.value)

    run(tmp_path, "rounds=1", console=Watching(resume_beside))
    assert len(refusals) == 1


def test_other_data_than_the_run_began_with_are_refused(tmp_path: Path) -> None:
    def write(shade: int) -> None:
        labels = np.arange(80) % 4
        images = np.full((80, 4, 4), shade, np.uint8) + labels[:, None, None].astype(np.uint8)
        half = {"images": images, "labels": labels}
        np.savez(
            tmp_path / "own.npz",
            **{f"{split}_{name}": array for split in ("train", "test") for name, array in half.items()},
        )

    write(0)
    data = f"data={{name: npz, file: {tmp_path / 'own.npz'}}}"
    path = run(tmp_path, data, "rounds=2", "model={name: linear}", "partition={name: iid, num_clients: 4}")
    write(100)
    with pytest.raises(CheckpointError, match=r"the data of its checkpoint is \w+, and is now \w+"):
        raypfl.resume(path, ["rounds=3"])
