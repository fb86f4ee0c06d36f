"""The library in a notebook: executed by a kernel, with its progress, tables and pictures."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from raypfl.console import Console, RunTitle
from raypfl.notebook import Bar, console_of_caller

CELLS = """
import raypfl
config = {
    "rounds": 2,
    "method": [{"name": "local"}, {"name": "diversifed"}],
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 4},
    "model": {"name": "linear"},
    "training": {"epochs": 1, "batch_size": 200, "optimizer": {"name": "sgd", "lr": 0.1}},
    "evaluation": {"diagnostics": True},
    "storage_path": STORAGE,
}
result = raypfl.run(config, ["name=tour"])
result
---
raypfl.compare(result)
---
result.plot_accuracy()[0]
---
result.plot_collaboration()
---
result.clients().groupby(["run", "round"], observed=True)["accuracy"].mean().unstack()
---
result.plot_partition()
"""


# Sockets and temporary folders of the kernel's client are its own affair.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_notebook_from_run_to_pictures(tmp_path: Path) -> None:
    sources = CELLS.replace("STORAGE", repr(str(tmp_path))).split("---\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[output.get("data", {}) for output in cell.outputs] for cell in notebook.cells]
    local, diversifed, *_, result = shown[0]
    # Each bar has moved in place to its end.
    assert '<progress max="2" value="2"' in local["text/html"]
    assert diversifed["text/plain"].startswith("[2/2] diversifed-seed0  round 2/2")
    assert "<table>" in result["text/html"] and "diversifed" in result["text/html"]
    (comparison,), (curve,), (matrices,), (frame,), (dealt,) = shown[1:]
    assert "95% interval" in comparison["text/html"]
    assert 'alt="Line chart' in curve["text/html"]
    assert "Coefficients of the server&#x27;s combination" in matrices["text/html"]
    assert "local-seed0" in frame["text/plain"]
    assert "Bubble chart of 10 classes by 4 clients" in dealt["text/html"]


def test_elsewhere_nothing_is_shown() -> None:
    assert type(console_of_caller()) is Console


def test_a_bar_says_where_a_run_is() -> None:
    bar = Bar(RunTitle("a <b>", rounds=7, done=3, figure="global, pre", number=2, runs=4))
    assert repr(bar) == "[2/4] a <b>  round 3/7"
    bar.round, bar.accuracy = 4, 0.5
    assert bar._repr_html_().startswith(
        '<progress max="7" value="4" aria-label="[2/4] a &lt;b&gt;  round 4/7'
    )
    assert "50.00% (global, pre)" in repr(bar)
