"""Packages as pip leaves them: modules beside a `.dist-info` folder with entry points."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]
Python = Callable[..., "subprocess.CompletedProcess[str]"]

ALL = ["raypfl.methods", "raypfl.data", "raypfl.partitions", "raypfl.models"]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Install a package: its name, its module's source, and names of things by group."""

    def install(package: str, source: str, points: Mapping[str, Mapping[str, str]]) -> None:
        (tmp_path / f"{package}.py").write_text(dedent(source))
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = []
        for group, entries in points.items():
            lines += [f"[{group}]", *(f"{name} = {package}:{thing}" for name, thing in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    return install


@pytest.fixture
def python(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Python:
    """A new process that sees the installed packages: what is found is found once a process."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{repository}")

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)

    return python
