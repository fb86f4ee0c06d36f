"""The command line: arguments reach the library, errors become a message and an exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import raypfl
from raypfl.cli import app
from raypfl.errors import ConfigError


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A stand-in for raypfl.experiment that notes what it is called with."""
    monkeypatch.chdir(tmp_path)
    # `plan` looks whether it is a sweep.
    (tmp_path / "a.yaml").write_text("rounds: 1\n")
    calls: list[tuple[str, str, list[str], list[str]]] = []

    def noting(command: str) -> Any:
        def call(path: str, overrides: list[str], *, allow_imports: list[str], console: object = None) -> str:
            calls.append((command, path, overrides, allow_imports))
            return f"{command} of {path}"

        return call

    fake = SimpleNamespace(calls=calls, **{command: noting(command) for command in ("run", "resume", "plan")})
    monkeypatch.setitem(sys.modules, "raypfl.experiment", fake)
    monkeypatch.setattr(raypfl, "experiment", fake, raising=False)
    return fake


@pytest.mark.parametrize("command", ["run", "resume", "plan"])
def test_a_command_passes_path_and_overrides_on(experiment: SimpleNamespace, command: str) -> None:
    allowed = ["--allow-imports", "mine", "--allow-imports", "yours.nets"]
    result = CliRunner().invoke(app, [command, "a.yaml", "rounds=5", "seed=[1,2]", *allowed])
    assert result.exit_code == 0, result.output
    assert experiment.calls == [(command, "a.yaml", ["rounds=5", "seed=[1,2]"], ["mine", "yours.nets"])]


def test_plan_prints_the_plan(experiment: SimpleNamespace) -> None:
    assert CliRunner().invoke(app, ["plan", "a.yaml"]).stdout == "plan of a.yaml\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("rounds = 0: must be at least 1"), 2, "ConfigError: rounds = 0: must be at least 1\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
)
def test_an_expected_error_is_a_message_and_a_status(
    experiment: SimpleNamespace, error: BaseException, status: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    experiment.run = fail
    result = CliRunner().invoke(app, ["run", "a.yaml"])
    assert result.exit_code == status
    assert result.stderr == message
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "environment"), [(["--traceback"], {}), ([], {"RAYPFL_TRACEBACK": "1"})]
)
def test_the_traceback_is_shown_when_asked_for(
    experiment: SimpleNamespace, arguments: list[str], environment: dict[str, str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("wrong")

    experiment.run = fail
    result = CliRunner().invoke(app, [*arguments, "run", "a.yaml"], env=environment)
    assert isinstance(result.exception, ConfigError)


def test_a_defect_of_ours_keeps_its_traceback(experiment: SimpleNamespace) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AttributeError("ours")

    experiment.run = fail
    assert isinstance(CliRunner().invoke(app, ["run", "a.yaml"]).exception, AttributeError)


@pytest.mark.parametrize(
    ("topic", "names"),
    [
        ("methods", ["local", "fedavg", "fedamp", "diversifed"]),
        ("datasets", ["digits", "mnist", "fmnist", "cifar10", "cifar100", "svhn", "synthetic"]),
        ("partitions", ["dirichlet", "pathological", "practical", "iid"]),
        ("topologies", ["kout", "ring", "regular", "file"]),
        ("models", ["mlp", "lenet5", "resnet8"]),
    ],
)
def test_list_gives_a_line_for_each_name(topic: str, names: list[str]) -> None:
    result = CliRunner().invoke(app, ["list", topic])
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert set(names) <= set(lines)
    assert all(lines.values()), "every name is described"


def test_an_unknown_topic_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["list", "method"])
    assert result.exit_code == 2
    assert "methods" in result.stderr
