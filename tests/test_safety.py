"""Nothing that is found in storage is executed: neither checkpoints and partitions nor configurations."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small_runs import CONFIG
from typer.testing import CliRunner

import raypfl
from raypfl.cli import app
from raypfl.configuration import load
from raypfl.data import Federation
from raypfl.errors import ConfigError, DataError, RaypflError
from raypfl.records import checkpoints

ROOT = Path(__file__).resolve().parent.parent

UNPICKLING = {
    "pickle": None,
    "cPickle": None,
    "_pickle": None,
    "cloudpickle": None,
    "dill": None,
    "joblib": None,
    "marshal": None,
    "shelve": None,
    "torch": {"load", "hub"},
    "numpy": {"fromregex"},
    "pandas": {"read_pickle", "read_hdf"},
    "builtins": {"eval", "exec"},
}
"""Modules that execute what they read, with the functions that do; None: all."""


def executing(source: str) -> Iterator[str]:
    """What of a source could run code that it reads."""
    tree = ast.parse(source)
    names = {"np": "numpy", "pd": "pandas"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if UNPICKLING.get(alias.name, ()) is None)
        elif isinstance(node, ast.ImportFrom):
            found = UNPICKLING.get(node.module or "", ())
            yield from (f"{node.module}.{alias.name}" for alias in node.names if found is None)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name in (found or ()))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id, node.value.id)
            if node.attr in (UNPICKLING.get(module) or ()):
                yield f"{module}.{node.attr}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield node.func.id
            for keyword in node.keywords:
                harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not harmless:
                    yield "allow_pickle"


SOURCES = [path for path in sorted(ROOT.glob("raypfl/**/*.py")) if "testing" not in path.parts]
"""Without the contract's tests, which pickle messages to see how large they are."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_can_unpickle(path: Path) -> None:
    assert list(executing(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from torch import load", ["torch.load"]),
        ("import torch\ntorch.load('x')", ["torch.load"]),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", ["allow_pickle"]),
        ("import numpy as np\nnp.load('x', allow_pickle=False)", []),
        ("import pandas as pd\npd.read_pickle('x')", ["pandas.read_pickle"]),
        ("module.eval()", []),
        ("eval('1')", ["eval"]),
    ],
)
def test_what_could_is_seen(source: str, found: list[str]) -> None:
    assert list(executing(source)) == found


class Hostile:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run with a checkpoint, to be resumed with more rounds."""
    config = {**CONFIG, "name": "run", "rounds": 2, "storage_path": tmp_path, "model": {"name": "linear"}}
    raypfl.run(config)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "file", ["checkpoints/round-000002/hub.safetensors", "checkpoints/round-000002/state-000.safetensors"]
)
def test_a_pickle_in_place_of_a_checkpoint_is_an_error(file: str, run: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = pickle.dumps(Hostile(mark))
    pickle.loads(pickle.dumps(Hostile(tmp_path / "it would")))
    assert (tmp_path / "it would").exists()
    (run / file).write_bytes(hostile)
    with pytest.raises(RaypflError, match="is damaged"):
        raypfl.resume(run, ["rounds=3"])
    # Also where the manifest agrees.
    manifest = run / "checkpoints/round-000002/manifest.json"
    said = json.loads(manifest.read_text())
    for part in said["parts"]:
        if file.endswith(part["file"]):
            part["bytes"], part["sha256"] = len(hostile), checkpoints._sha256(run / file)
    manifest.write_text(json.dumps(said))
    with pytest.raises(RaypflError, match="cannot be read"):
        raypfl.resume(run, ["rounds=3"])
    assert not mark.exists()


def test_a_pickle_in_a_partition_or_data_file_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    objects = np.array([Hostile(mark)], dtype=object)
    np.savez(tmp_path / "partition.npz", lengths=objects, indices=objects)
    mark.unlink(missing_ok=True)
    with pytest.raises(DataError, match="pickled objects"):
        Federation.load(tmp_path / "partition.npz")
    np.savez(tmp_path / "images.npz", train_images=objects)
    data = {"name": "npz", "file": str(tmp_path / "images.npz")}
    with pytest.raises(DataError):
        raypfl.run({**CONFIG, "data": data, "storage_path": tmp_path})
    assert not mark.exists()


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    touch = f"!!python/object/apply:os.mkdir [{mark}]"
    (tmp_path / "hostile.yaml").write_text(f"rounds: {touch}\n")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        load(tmp_path / "hostile.yaml")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        load(CONFIG, [f"rounds={touch}"])
    assert not mark.exists()


def hostile_model(run: Path, mark: Path, name: str = "shutil:rmtree") -> None:
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    mark.mkdir()
    recorded["model"] = {"name": name, "head": "fc", "kwargs": {"path": str(mark)}}
    (run / "config.yaml").write_text(yaml.safe_dump(recorded))


@pytest.mark.parametrize("command", ["run", "plan", "resume"])
def test_a_file_cannot_name_code_that_nobody_has_allowed(command: str, run: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile_model(run, mark)
    what = str(run) if command == "resume" else str(run / "config.yaml")
    result = CliRunner().invoke(app, [command, what])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "names code of package 'shutil'" in result.stderr
    assert "--allow-imports shutil" in result.stderr and "RAYPFL_ALLOW_IMPORTS=shutil" in result.stderr
    assert mark.is_dir()


PACKAGE = """
from shutil import rmtree
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.body = nn.Linear(64, 4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.body(x.flatten(1)).relu())
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package of a user's own."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "nets.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return name


def test_what_is_allowed_is_imported_and_nothing_that_it_hands_on(
    package: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIG, "rounds": 1, "name": "mine", "storage_path": str(tmp_path)}
    config["model"] = {"name": f"{package}.nets:Net", "head": "fc"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    file = str(tmp_path / "mine.yaml")
    refused = CliRunner().invoke(app, ["run", file])
    assert refused.exit_code == 2 and f"--allow-imports {package}" in refused.stderr
    assert f"{package}.nets" not in sys.modules, "not even imported"
    mark = tmp_path / "mark"
    hostile_model(run, mark, f"{package}.nets:rmtree")
    with pytest.raises(ConfigError, match=f"is code of module 'shutil', and allowed is only {package}"):
        load(run / "config.yaml", allow_imports=[package])
    assert mark.is_dir()
    allowed = CliRunner().invoke(app, ["run", file, "--allow-imports", package])
    assert allowed.exit_code == 0, allowed.output
    again = ["resume", str(tmp_path / "mine"), "rounds=2"]
    assert CliRunner().invoke(app, again).exit_code == 2
    monkeypatch.setenv("RAYPFL_ALLOW_IMPORTS", f"another,{package}.nets")
    assert CliRunner().invoke(app, again).exit_code == 0


def test_what_a_person_types_needs_no_leave(package: str, tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "model": {"name": "linear"}}))
    model = f"{package}.nets:Net"
    assert load(file, [f"model={{name: '{model}', head: fc}}"]).model.name == model
    assert load({**CONFIG, "model": {"name": model, "head": "fc"}}).model.name == model
    with pytest.raises(ConfigError, match="names code of package 'pdb'"):
        hostile = {**CONFIG, "model": {"name": "pdb:Pdb", "head": "fc"}}
        file.write_text(yaml.safe_dump(hostile))
        load(file, [f"name={model}"])
