"""Every command in the README and beside the results is executed, here or elsewhere, or at least read."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raypfl.cli import app
from raypfl.configuration import expand, load

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "configs/RESULTS.md")
STARTS = ("raypfl ", "make ", "pip ", "pytest ", "python ", "git ", "cd ", "docker ", "kubectl ", "ray ")

WALKED = {"raypfl new-method fedprox", "pip install -e fedprox", "pytest fedprox"}
"""Executed by tests/plugins/test_new_method.py as the README has them, with the run of that method."""
WITHOUT_FILES = ("digits", "synthetic")
"""Data that a run can be planned with on any machine."""


def commands(text: str) -> list[str]:
    """The lines of indented and of shell blocks, and inline code, that begin like a command."""
    joined = re.sub(r"\\\n\s*", " ", text)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", joined, re.DOTALL | re.MULTILINE)
    lines = [
        line for kind, block in blocks if kind in ("", "sh", "bash", "console") for line in block.splitlines()
    ]
    outside = re.sub(r"^```.*?^```", "", joined, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"^ {4}(\S.*)$", outside, re.MULTILINE)
    # Within a sentence `raypfl plan` may be the name of a command, without what it needs.
    names = {f"raypfl {name}" for name in typer.main.get_command(app).commands}
    lines += [code for code in re.findall(r"`([^`\n]+)`", outside) if code not in names]
    found = [
        " ".join(shlex.split(line, comments=True, posix=False)) for line in lines if line.startswith(STARTS)
    ]
    return list(dict.fromkeys(found))


COMMANDS = list(dict.fromkeys(line for page in PAGES for line in commands(page.read_text())))


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of a `raypfl` command and its parameters; SystemExit where there is no such thing."""
    called: list[tuple[str, dict[str, Any]]] = []

    def note(group: Any, above: tuple[str, ...] = ()) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                note(command, (*above, name))
            else:
                own = " ".join((*above, name))
                command.callback = lambda own=own, **given: called.append((own, given))

    program: Any = typer.main.get_command(app)
    note(program)
    try:
        program.main(arguments, prog_name="raypfl")
    except SystemExit as end:
        if end.code:
            raise
    (found,) = called
    return found


def anchors(text: str) -> set[str]:
    """What a link to a heading of the page may end with."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        aimed = page if not path else page.parent / path
        assert aimed.exists(), f"{page.name}: nothing at {target}"
        assert not anchor or anchor in anchors(aimed.read_text()), f"{page.name}: no heading for {target}"


def test_the_readme_has_commands() -> None:
    assert {"make run", "make test", "raypfl list methods"} <= set(COMMANDS)
    assert any(line.startswith("raypfl run ") and "engine.num_actors=2" in line for line in COMMANDS)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("raypfl ")])
def test_a_command_of_raypfl_is_read_as_it_stands(line: str) -> None:
    name, parameters = parsed(shlex.split(line)[1:])
    config = parameters.get("config")
    if name in ("run", "plan") and config is not None and not re.search(r"\.\.\.|fedprox", line):
        settings = load(ROOT / config, parameters["overrides"] or [])
        assert expand(settings)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_a_target_of_make_is_there(line: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def harmless(line: str) -> bool:
    """Whether it takes seconds, needs no files of data, and leaves nothing behind."""
    if line.startswith("raypfl plan "):
        config = next(word for word in shlex.split(line) if word.endswith(".yaml"))
        return load(ROOT / config).data.name in WITHOUT_FILES
    return line.startswith("raypfl list ") or line == "raypfl paper"


@pytest.mark.parametrize("line", [line for line in COMMANDS if harmless(line)])
def test_a_command_that_needs_nothing_is_executed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_every_other_command_is_executed_elsewhere() -> None:
    others = {line for line in COMMANDS if not line.startswith(("raypfl ", "make "))}
    assert others <= WALKED, "tell this test how a new kind of command is checked"
    assert set(COMMANDS) >= WALKED


@pytest.mark.parametrize(
    "line",
    ["raypfl rnu configs/quickstart.yaml", "raypfl bench methods --quickly", "raypfl list method"],
)
def test_a_wrong_command_would_be_seen(line: str) -> None:
    with pytest.raises(SystemExit):
        parsed(shlex.split(line)[1:])


def test_blocks_lines_and_inline_code_are_found() -> None:
    text = "Run `make x` or\n\n    raypfl run a.yaml \\\n        rounds=1   # a note\n    not this\n\n"
    text += "```sh\nraypfl list\n```\nand `raypfl plan`, `raypfl plane`\n"
    assert commands(text) == ["raypfl list", "raypfl run a.yaml rounds=1", "make x", "raypfl plane"]
