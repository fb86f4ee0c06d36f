"""The README's way from nothing to a method of one's own, walked as it is written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypfl.errors import ConfigError, StorageError
from raypfl.scaffold import new_method


def section(repository: Path) -> str:
    text = (repository / "README.md").read_text()
    return text[text.index("### A method of yours") : text.index("\n## Results")]


def diffs(text: str) -> list[list[str]]:
    return [block.splitlines() for block in re.findall(r"```diff\n(.*?)```", text, re.DOTALL)]


def applied(source: str, diff: list[str]) -> str:
    """Whole lines: those with a blank or a minus are there, those with a blank or a plus will be."""
    before = "\n".join(line[1:] for line in diff if line[0] in " -")
    after = "\n".join(line[1:] for line in diff if line[0] in " +")
    assert source.count(f"{before}\n") == 1, f"{before!r} is not one place of the file"
    return source.replace(f"{before}\n", f"{after}\n")


@pytest.mark.slow
def test_the_walk_through_of_the_readme(repository, tmp_path, python, monkeypatch) -> None:
    text = section(repository)
    (package, site) = tmp_path / "fedprox", tmp_path / "site"
    monkeypatch.chdir(tmp_path)
    new_method("fedprox", Path())
    option, term, promise = diffs(text)
    method, tests = package / "fedprox.py", package / "test_fedprox.py"
    method.write_text(applied(applied(method.read_text(), option), term))
    tests.write_text(applied(tests.read_text(), promise))
    # As `pip install fedprox`, with what is here already: without the network, and not into this environment.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    done = subprocess.run([*pip, "--target", str(site), str(package)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PYTHONPATH", f"{site}:{repository}")
    contract = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(package))
    assert contract.returncode == 0, contract.stdout[-3000:]
    passed = int(re.search(r"(\d+) passed", contract.stdout)[1])
    assert passed >= 50
    (command,) = re.findall(r"^    raypfl (run .*fedprox.*)$", text, re.MULTILINE)
    few = ["rounds=2", f"storage_path={tmp_path / 'runs'}"]
    run = python("-c", "from raypfl.cli import main; main()", *shlex.split(command), *few)
    assert run.returncode == 0 and "fedprox" in run.stdout, run.stderr


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    new_method("fedprox", tmp_path)
    (tmp_path / "fedprox/fedprox.py").write_text("mine")
    with pytest.raises(StorageError, match="exists already, and nothing in it was changed"):
        new_method("fedprox", tmp_path)
    assert (tmp_path / "fedprox/fedprox.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["FedProx", "fed-prox", "3fed", "class", "../fed", ""])
def test_a_name_that_cannot_be_a_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use small letters"):
        new_method(name, tmp_path)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fedavg' exists already"):
        new_method("fedavg", tmp_path)
    assert not list(tmp_path.iterdir())
