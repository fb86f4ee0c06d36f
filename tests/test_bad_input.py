"""What a person gets wrong is one clear message and exit status 2, with a traceback only if asked for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import stumbling
import yaml
from click.testing import Result
from small_runs import CONFIG
from typer.testing import CliRunner

from raypfl.cli import app


def raypfl(tmp_path: Path, *arguments: str, before: tuple[str, ...] = ()) -> Result:
    """`raypfl run` of the small configuration with these overrides."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(CONFIG)))
    named = ["name=run", f"storage_path={tmp_path}/runs", "rounds=3"]
    given = {argument.partition("=")[0] for argument in arguments}
    named = [default for default in named if default.partition("=")[0] not in given]
    return CliRunner().invoke(app, [*before, "run", f"{tmp_path}/config.yaml", *named, *arguments])


def refused(result: Result, kind: str) -> str:
    """The message, once it is sure that it is all that a person sees."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stderr.count("Error: ") == 1
    assert result.stderr.startswith(f"{kind}: "), result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.epoch=3", ["training.epoch: unknown key", "Did you mean epochs?"]),
        ("method.alpa=3", ["method.alpa: unknown key", "Did you mean alpha?"]),
        ("method.name=fedapm", ["fedapm", "fedamp"]),
        ("training.epochs=many", ["training.epochs", "many"]),
        ("training.epochs=0", ["training.epochs", "0", "1"]),
        ("training.optimizer.lr=-1", ["training.optimizer.lr", "-1"]),
        ("participation.fraction=1.5", ["participation.fraction", "1.5", "1"]),
        (
            "participation.fraction=0.2",
            ["participation.fraction = 0.2 of 4 clients selects 0", "at least 0.25"],
        ),
        ("participation={count: 5}", ["participation.count = 5", "4 clients"]),
        ("engine.num_actors=5", ["engine.num_actors = 5", "at most 4"]),
        ("name=../outside", ["name", "below storage_path"]),
        ("rounds", ["rounds", "key=value"]),
    ],
)
def test_a_wrong_setting(tmp_path: Path, override: str, says: list[str]) -> None:
    message = refused(raypfl(tmp_path, override), "ConfigError")
    for words in says:
        assert words in message
    assert not (tmp_path / "runs").exists(), "nothing is written for a configuration that cannot be"


def test_a_partition_that_cannot_be_drawn_names_class_and_shortage(tmp_path: Path) -> None:
    ask = ["partition.when_short=error", "partition.train_size=600", "partition.alpha=0.1"]
    message = refused(raypfl(tmp_path, *ask), "PartitionError")
    assert re.search(r"class \d", message)
    assert len(re.findall(r"\d+", message)) >= 3, "what was wanted and what there is"


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    message = refused(raypfl(tmp_path, f"data={{name: npz, file: {tmp_path}/absent.npz}}"), "DataError")
    assert f"{tmp_path}/absent.npz: no such file" in message


def test_a_corrupt_data_file_is_named_with_both_checksums_and_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 10
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    path.write_bytes(path.read_bytes()[:-7])
    wanted = "0" * 64
    asked = refused(raypfl(tmp_path, f"data={{name: npz, file: {path}, sha256: '{wanted}'}}"), "DataError")
    assert (
        str(path) in asked and f"sha256 expected {wanted}, found " in asked and f"sha256sum {path}" in asked
    )
    unasked = refused(raypfl(tmp_path, f"data={{name: npz, file: {path}}}", "name=other"), "DataError")
    assert str(path) in unasked and re.search(r"found: [0-9a-f]{64}", unasked) and "sha256sum" in unasked


def test_storage_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = refused(raypfl(tmp_path, f"storage_path={tmp_path}/file/runs"), "StorageError")
    assert f"{tmp_path}/file/runs" in message and "storage_path" in message


def test_a_run_that_is_there_already(tmp_path: Path) -> None:
    assert raypfl(tmp_path, "rounds=1").exit_code == 0
    assert f"raypfl resume {tmp_path}/runs/run" in refused(raypfl(tmp_path, "rounds=1"), "StorageError")


def test_an_error_that_is_put_right_leaves_the_name_free(tmp_path: Path) -> None:
    """A run that never began is not in the way of the one that does."""
    refused(raypfl(tmp_path, f"data={{name: npz, file: {tmp_path}/absent.npz}}"), "DataError")
    assert raypfl(tmp_path, "rounds=1").exit_code == 0


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    message = refused(CliRunner().invoke(app, ["resume", str(tmp_path)]), "StorageError")
    assert f"{tmp_path} is not a run" in message


def test_a_checkpoint_of_another_configuration(tmp_path: Path) -> None:
    assert raypfl(tmp_path, "rounds=1").exit_code == 0
    resumed = CliRunner().invoke(app, ["resume", f"{tmp_path}/runs/run", "rounds=2", "seed=8"])
    assert "seed: 3 -> 8" in refused(resumed, "CheckpointError")


def test_a_diverging_run(tmp_path: Path) -> None:
    message = refused(raypfl(tmp_path, "training.optimizer.lr=1e30"), "DivergedError")
    assert re.match(r"DivergedError: round 1: the model of client\(s\) \[\d\] is no longer finite", message)
    assert "There is no checkpoint yet." in message


def test_a_model_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stumbling.VARIABLE, str(tmp_path))
    stumbling.ask(tmp_path, "raise")
    result = raypfl(tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("ClientError: method fedamp, phase local update, client(s)")
    assert "round 1:" in result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == 1, "the client's own"
    raised, then = result.stderr.rstrip().splitlines()[-2:]
    assert raised == "RuntimeError: the model stumbled"
    assert then.startswith("There is no checkpoint yet.") and f"raypfl resume {tmp_path}/runs/run" in then


def test_more_actors_than_the_machine_has_cores_for(tmp_path: Path) -> None:
    ask = ["engine.name=ray", "engine.num_actors=4", "resources.num_cpus_per_actor=1000"]
    arguments = [f"{tmp_path}/config.yaml", *ask]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(CONFIG)))
    message = refused(CliRunner().invoke(app, ["plan", *arguments]), "PlacementError")
    assert "4 client hosts with 1000 CPU each" in message and "has room for 0 of them" in message


def test_the_traceback_is_there_when_asked_for(tmp_path: Path) -> None:
    result = raypfl(tmp_path, "training.epoch=3", before=("--traceback",))
    assert result.exit_code != 0
    assert type(result.exception).__name__ == "ConfigError"


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedpac", "fedproto", "fedrod", "fedtc"])
def test_a_method_that_splits_a_model_without_hidden_layer(tmp_path: Path, method: str) -> None:
    """Said before there is a folder: the only layer is the head."""
    result = raypfl(
        tmp_path, f"method={{name: {method}}}", "model={name: linear}", "training.optimizer={name: sgd}"
    )
    message = refused(result, "ConfigError")
    assert f"method {method} needs layers before the head" in message
    assert "model.head = 'head' covers every layer" in message
    assert not (tmp_path / "runs").exists()
