"""The layers of the design, held by parsing imports, and what must never be imported or named."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("raypfl/**/*.py"))

BASE = {"raypfl.config", "raypfl.errors", "raypfl.rng"}
PURE = {"__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"}

MAY_IMPORT = {
    "algebra": BASE | {"raypfl.algebra"},
    "models": BASE | {"raypfl.models", "raypfl.explain"},
    "data": BASE | {"raypfl.data", "raypfl.explain"},
    "topology": BASE | {"raypfl.topology"},
    "clock": BASE | {"raypfl.clock"},
    # Marks of what time goes into, and nothing that computes.
    "training": BASE | {"raypfl.training", "raypfl.models", "raypfl.algebra.phases"},
    "methods": BASE | {"raypfl.methods", "raypfl.training", "raypfl.algebra", "raypfl.topology"},
}
"""Which other parts of raypfl a part stands on."""

OUTSIDE = {
    "algebra": PURE | {"torch", "contextlib", "contextvars"},
    "methods": PURE | {"torch", "pydantic"},
    "clock": PURE | {"numpy", "pydantic"},
}
"""Which packages, of the standard library too, a part may use: no files, clocks, logging or randomness."""

RAY_IS_AT_HOME = (
    "raypfl/cluster/",
    "raypfl/engine/placement.py",
    "raypfl/engine/ray.py",
    "raypfl/engine/ray_mail.py",
    "raypfl/engine/ray_metrics.py",
    "raypfl/engine/seats.py",
    "raypfl/engine/shared_storage.py",
    "raypfl/sweep/",
)


def imported(source: str) -> Iterator[str]:
    """Every module that a source imports, wherever in it; `from a.b import c` gives a.b.c and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def breaches(part: str, source: str) -> list[str]:
    """The imports of a source in `raypfl/<part>` that its floor does not carry."""
    modules = list(imported(source))
    ours = {module for module in modules if module.startswith("raypfl.")}
    below = MAY_IMPORT.get(part)
    wrong = {module for module in ours if below is not None and not within(module, below)}
    if part in OUTSIDE:
        others = {module.partition(".")[0] for module in modules} - {"raypfl"}
        wrong |= others - OUTSIDE[part]
    return sorted(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_on_their_floor(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    source = path.read_text()
    assert breaches(path.relative_to(ROOT / "raypfl").parts[0], source) == []
    if not relative.startswith(RAY_IS_AT_HOME):
        assert not [module for module in imported(source) if within(module, {"ray"})]
    if not relative.startswith("raypfl/sweep/"):
        assert not [module for module in imported(source) if within(module, {"ray.tune"})]


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("algebra", "import numpy as np", ["numpy"]),
        ("methods", "def f():\n    import time", ["time"]),
        ("clock", "from time import perf_counter", ["time"]),
        ("methods", "from raypfl.engine import host", ["raypfl.engine", "raypfl.engine.host"]),
        ("methods", "from raypfl.training.cohort import Cohort\nfrom torch import nn", []),
        ("training", "import raypfl.methods.fedavg", ["raypfl.methods.fedavg"]),
    ],
)
def test_a_breach_is_seen(part: str, source: str, wrong: list[str]) -> None:
    assert breaches(part, source) == wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_randomness_has_one_source(path: Path) -> None:
    """Global generators are out of bounds; a published data set may need NumPy's legacy one, seeded."""
    if path.name == "rng.py":
        return
    source = path.read_text()
    assert "random" not in set(imported(source))
    assert not re.search(r"manual_seed|default_rng|np\.random\.(?!Generator|RandomState)", source)


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_raypfl_is_light() -> None:
    code = "import sys, raypfl; print({'ray', 'torch', 'pandas'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_a_local_run_needs_no_ray(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["ray"] = None  # as if it were not installed: importing it raises ImportError
import raypfl
result = raypfl.run("configs/quickstart.yaml", [
    "name=light", "storage_path={tmp_path}", "engine.name=local", "method.name=fedavg", "rounds=1",
])
print(result.path)
"""
    assert str(tmp_path) in run_python(code)


def test_no_file_names_a_machine() -> None:
    # In Ray's images the user is called ray, on every machine.
    homes = r"/(?:home|Users|root)/(?!ray\b)\w+"
    here = {ROOT, ROOT.parent} - {Path(ROOT.anchor), Path(tempfile.gettempdir())}
    pattern = re.compile("|".join([homes, *(re.escape(f"{folder}/") for folder in here)]))
    ours = ("raypfl", "tests", "configs", "cluster", ".ci")
    files = [path for folder in ours for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    named = {
        str(path.relative_to(ROOT)): pattern.findall(text)
        for path in files
        if "__pycache__" not in path.parts and pattern.search(text := path.read_text(errors="ignore"))
    }
    assert named == {}
