"""Tables of papers: what is printed, what is run, what is run only once, and what stands beside what."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from raypfl.cli import app
from raypfl.console import Console
from raypfl.errors import ConfigError, RaypflError
from raypfl.paper import definition, known, read, reproduce, toys, work
from raypfl.paper.cells import Cell, cells
from raypfl.paper.cost import cost_lines
from raypfl.paper.files import located
from raypfl.paper.measure import Ours, measure, over_seeds
from raypfl.paper.picture import draw
from raypfl.paper.published import Printed, published
from raypfl.paper.report import Line, as_csv, as_markdown, grid
from raypfl.records.grid import Grid
from raypfl.result import Result

BASE = {
    "rounds": 3,
    "seed": [0, 1],
    "method": [{"name": "fedavg"}, {"name": "fedamp", "alpha": 100.0, "sigma": 40.0}],
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "num_clients": 4, "alpha": 1.0, "train_size": 20, "test_size": 10},
    "model": {"name": "linear"},
    "training": {"epochs": 1, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.1}},
}
TOY = {
    "title": "A toy",
    "paper": "diversifed",
    "table": "1",
    "base": "base.yaml",
    "columns": {"FMNIST": {}, "CIFAR10": {"set": {"partition.alpha": 0.5}}},
    "rows": {
        "FedAvg": {"method": "fedavg"},
        "FedAMP": {"method": "fedamp"},
        "pFedMe-GM": {"method": "fedavg"},
    },
    "differences": [{"name": "FedAMP - FedAvg", "rows": ["FedAMP", "FedAvg"]}],
    "small": {
        "differs": "one seed, two rounds",
        "set": {"rounds": 2, "seed": 0},
        "leave_out": ["pFedMe-GM/C*"],
    },
}


class Notes(Console):
    """Remembers what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.tables: list[Grid] = []
        self.began: list[str] = []

    def begin(self, title) -> None:
        self.began.append(title.name)

    def note(self, text: str) -> None:
        self.said.append(text)

    def table(self, grid: Grid) -> None:
        self.tables.append(grid)


@pytest.fixture
def define(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a table called `toy`, and its base."""
    folder = tmp_path / "configs"
    (folder / "paper").mkdir(parents=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE, sort_keys=False))
    monkeypatch.setattr(definition, "configs", lambda: folder)
    monkeypatch.setattr("raypfl.paper.cells.configs", lambda: folder)
    from raypfl.paper.cells import _yaml

    _yaml.cache_clear()

    def define(**changes: object) -> None:
        (folder / "paper" / "toy.yaml").write_text(yaml.safe_dump({**TOY, **changes}, sort_keys=False))

    define()
    yield define
    _yaml.cache_clear()


# What comes with the project


def test_every_printed_number_has_a_cell() -> None:
    found = set()
    for table in known().values():
        rows = {(row, column) for row in table.rows for column in table.columns}
        rows |= {(difference.name, difference.column) for difference in table.differences}
        found |= {(table.paper, table.table, *place) for place in rows}
    assert set(published()) <= found


@pytest.mark.parametrize("name", [name for name, table in known().items() if not table.absent])
@pytest.mark.parametrize("profile", ["full", "small"])
def test_every_cell_is_a_configuration(name: str, profile: str) -> None:
    table = read(name)
    found = cells(table, profile)
    assert len(found) == len(table.rows) * len(table.columns)
    for cell in found:
        if not cell.runs:
            assert "not in the small profile: too slow for it" in cell.remarks
        if cell.printed is None:
            assert "no number is known from the paper" in cell.remarks
    small = {run.rounds for cell in found for run in cell.runs.values()}
    assert profile == "full" or table.kind != "runs" or max(small) <= 200


def test_the_numbers_are_those_of_the_papers() -> None:
    assert published()["diversifed", "1", "DiversiFed", "CIFAR10"] == Printed(88.04, 0.72, "printed")
    assert published()["ua_pdfl", "2", "VGG11, SVHN", "UA-PDFL"] == Printed(93.52, 0.0, "printed")
    assert published()["pfml", "4", "K = 3", "PM, DNN, 5 a round"] == Printed(99.07, None, "printed")
    assert {value.source for key, value in published().items() if key[:2] == ("diversifed", "5")} == {
        "printed; tau of this row inferred from the text"
    }
    assert len(published()) == 466


def test_rows_that_are_of_one_run_share_it() -> None:
    by_name = {cell.name: cell for cell in cells(read("pfml-1"), "small", only=["PFML-*/MNIST MLR"])}
    one, other = by_name["PFML-GM/MNIST MLR"], by_name["PFML-PM/MNIST MLR"]
    assert one.runs.keys() == other.runs.keys() and one.view != other.view
    perceptron = cells(read("pfml-1"), "small", only=["pFedMe-PM/MNIST DNN"])[0]
    (run,) = perceptron.runs.values()
    assert (run.method.lam, run.method.inner_rate, run.model.hidden) == (30, 0.05, (100,))


def test_tables_share_runs() -> None:
    of_figure = {key for cell in cells(read("ua_pdfl-fig11"), "full") for key in cell.runs}
    of_table = {
        key for cell in cells(read("ua_pdfl-1"), "full", only=["CNN, CIFAR10/*"]) for key in cell.runs
    }
    assert len(of_figure & of_table) == 18


def test_costs_are_counted_from_the_models() -> None:
    lines = {(line.row, line.column): line for line in cost_lines(read("diversifed-8"))}
    assert lines["FMNIST, 40 clients", "parameters"].ours == Ours(50_890, None, 1)
    assert lines["FMNIST, 40 clients", "server flops"].ours == Ours(1.5 * 1600 * 50_890, None, 1)
    # Three forwards of 784 x 64 and 64 x 10 multiply-adds for each of 500 samples and 10 epochs.
    assert lines["FMNIST, 100 clients", "client flops"].ours == Ours(3 * 2 * 50_816 * 5_000, None, 1)
    for line in lines.values():
        assert line.printed is not None and line.ours is not None
        close = line.ours.mean == pytest.approx(line.printed.value, rel=0.01)
        assert close or (line.row.startswith("CIFAR10,") and line.column in ("client flops", "ratio %"))


# What is run


def test_a_table_is_run_once_and_shown_beside_the_papers(define, tmp_path: Path) -> None:
    first = Notes()
    some = reproduce("toy", "small", only=["FedAvg/FMNIST"], out=tmp_path / "out", console=first)
    assert len(first.began) == 1 and "1 cells from 1 runs, 0 of them finished." in first.said
    assert any(note.startswith("Training takes at most about 0:0") for note in first.said)
    (run,) = (tmp_path / "out/runs").iterdir()
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    second = Notes()
    page = reproduce("toy", "small", out=tmp_path / "out", console=second)
    assert "6 cells from 4 runs, 1 of them finished." in second.said and len(second.began) == 3
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    assert some is not None and page is not None

    by_name = {f"{line.row}/{line.column}": line for line in page.lines}
    tests = Result(run).rounds().query("model == 'global' and point == 'pre' and split == 'test'")
    assert by_name["FedAvg/FMNIST"].ours == Ours(100 * tests.accuracy_mean.max(), None, 1)
    assert by_name["FedAvg/FMNIST"].printed == Printed(83.55, 1.16, "printed")
    assert by_name["pFedMe-GM/FMNIST"].ours == by_name["FedAvg/FMNIST"].ours
    assert by_name["pFedMe-GM/CIFAR10"].remarks[-1] == "not in the small profile: too slow for it"
    gaps = [
        by_name[f"FedAMP/{name}"].ours.mean - by_name[f"FedAvg/{name}"].ours.mean for name in TOY["columns"]
    ]
    assert by_name["FedAMP - FedAvg/largest"].ours == Ours(max(gaps), None, 1)

    third = Notes()
    again = reproduce("toy", "small", out=tmp_path / "out", console=third)
    assert again == page and not third.began
    assert page.markdown.read_text().startswith(
        "# toy, profile small\n\nA toy\n\n| row | column | paper | ours |"
    )
    rows = list(csv.DictReader(page.csv.read_text().splitlines()))
    assert [row["row"] for row in rows] == [line.row for line in page.lines]
    assert float(rows[0]["ours"]) == by_name["FedAvg/FMNIST"].ours.mean


def test_a_finished_run_of_other_defaults_is_refused(define, tmp_path: Path) -> None:
    reproduce("toy", "small", only=["FedAMP/FMNIST"], out=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    saved = run / "config.yaml"
    # As if the option had been 0.5 when nobody set it; and one that did not exist then is no difference.
    text = "".join(line for line in saved.read_text().splitlines(True) if "  max_pull:" not in line)
    saved.write_text(text.replace("  lam: 1.0\n", "  lam: 0.5\n"))
    assert "lam: 0.5" in saved.read_text()
    with pytest.raises(ConfigError, match="other defaults") as error:
        reproduce("toy", "small", only=["FedAMP/FMNIST"], out=tmp_path)
    assert "method.lam: 0.5 -> 1.0" in str(error.value) and "max_pull" not in str(error.value)
    assert str(error.value).endswith("Move that folder away to run it again.")


def test_seeds_are_averaged(define, tmp_path: Path) -> None:
    page = reproduce("toy", only=["FedAMP/FMNIST"], out=tmp_path)
    (line,) = page.lines
    # The page has all cells, whichever were asked for.
    assert len(page.csv.read_text().splitlines()) == 1 + 6 + 1
    values = [
        100
        * frame.query("model == 'personalised' and point == 'post' and split == 'test'").accuracy_mean.max()
        for run in sorted((tmp_path / "runs").iterdir())
        for frame in [Result(run).rounds()]
    ]
    assert line.ours == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)), 2)


def test_an_interrupted_table_goes_on_where_it_was(define, tmp_path: Path) -> None:
    class Impatient(Notes):
        def round(self, round: int, **_: object) -> None:
            if round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce("toy", only=["FedAvg/FMNIST"], out=tmp_path, console=Impatient())
    stopped = (tmp_path / "toy-full.md").read_text()
    assert "not run yet" in stopped
    console = Notes()
    page = reproduce("toy", only=["FedAvg/FMNIST"], out=tmp_path, console=console)
    assert page.lines[0].ours.seeds == 2
    undisturbed = reproduce("toy", only=["FedAvg/FMNIST"], out=tmp_path / "other")
    assert undisturbed.lines[0].ours == page.lines[0].ours


def test_only_saying_what_would_be_run_runs_nothing(define, tmp_path: Path) -> None:
    console = Notes()
    assert reproduce("toy", dry=True, out=tmp_path / "out", console=console) is None
    assert not (tmp_path / "out").exists() and not console.began
    assert "6 cells from 8 runs, 0 of them finished." in console.said


def test_a_run_that_fails_is_a_remark_and_the_others_go_on(define, tmp_path: Path) -> None:
    many = {"set": {"partition.train_size": 2000}}
    wild = {"set": {"training.optimizer": {"name": "sgd", "lr": 1e38}}}
    columns = {"FMNIST": {}, "many": many, "wild": wild}
    define(columns=columns, rows={"FedAvg": {"method": "fedavg"}}, differences=[])
    page = reproduce("toy", "small", out=tmp_path)
    by_column = {line.column: line for line in page.lines}
    assert by_column["FMNIST"].ours is not None
    assert by_column["many"].ours is None and by_column["many"].remarks[-1].startswith("PartitionError: ")
    assert by_column["wild"].ours is None and by_column["wild"].remarks[-1].startswith("DivergedError: ")


def test_data_that_are_not_there_are_a_remark(define, tmp_path: Path) -> None:
    define(
        columns={"FMNIST": {"set": {"data": {"name": "svhn"}}}},
        rows={"FedAvg": {"method": "fedavg"}},
        differences=[],
    )
    console = Notes()
    page = reproduce("toy", folder=tmp_path, out=tmp_path / "out", console=console)
    assert page.lines == [
        Line(
            "FedAvg",
            "FMNIST",
            Printed(83.55, 1.16, "printed"),
            None,
            ("no data: svhn is not in the given folder",),
        )
    ]
    assert not console.began


def test_nothing_is_run_where_nothing_is_known(tmp_path: Path) -> None:
    console = Notes()
    assert reproduce("pfml-6", out=tmp_path, console=console) is None
    assert console.said[-1].startswith("Nothing to run: neither its numbers")


# Data, figures, pages


def test_official_files_go_before_a_part_and_a_part_is_named(tmp_path: Path) -> None:
    cifar = {"name": "cifar10", "normalise": "published"}
    assert located(cifar, None) == (cifar, "")
    assert located({"name": "digits"}, tmp_path) == ({"name": "digits"}, "")
    assert located(cifar, tmp_path) == (None, "no data: cifar10 is not in the given folder")
    part = tmp_path / "cifar10" / "part.npz"
    part.parent.mkdir()
    np.savez(part, train_labels=np.zeros(1_200, int), test_labels=np.zeros(300, int))
    remark = "data: not the official cifar10 but 1,200 training and 300 test images of part.npz"
    assert located(cifar, tmp_path) == ({"name": "npz", "file": str(part)}, remark)
    half = located({"name": "cifar10", "normalise": "half"}, tmp_path)
    assert half == ({"name": "npz", "file": str(part), "normalise": "half"}, remark)
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/data_batch_1").touch()
    assert located(cifar, tmp_path) == ({**cifar, "root": str(tmp_path), "download": False}, "")


def test_statistics_of_a_run(define, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce("toy", "small", only=["FedAvg/FMNIST"], out=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    result = Result(run)
    tests = (
        result.rounds().query("model == 'global' and point == 'pre' and split == 'test'").sort_values("round")
    )
    view = "global/pre"
    assert measure(run, view, "last") == 100 * tests.accuracy_mean.iloc[-1]
    assert measure(run, view, "last ten") == pytest.approx(100 * tests.accuracy_mean.mean())
    assert measure(run, view, "best weighted") == 100 * tests.accuracy_weighted.max()
    best = tests.loc[tests.accuracy_mean.idxmax()]
    assert measure(run, view, "best sd") == 100 * best.accuracy_sd
    mine = result.clients().query("model == 'global' and point == 'pre' and split == 'test'")
    mine = mine[mine["round"] == best["round"]].accuracy
    assert measure(run, view, "best range") == pytest.approx(100 * (mine.max() - mine.min()))
    # 650 parameters each way, 4 clients, 2 rounds.
    assert measure(run, view, "gigabytes") == pytest.approx(650 * 4 * 2 * 4 * 2 / 1e9)
    assert measure(run, "alternative/pre", "best") is None
    assert measure(run, view, "diagnostics/anything") is None
    # As the distance of pushed pairs where none is pushed any more.
    for values, expected in (([3.0, math.nan], None), ([math.nan, 3.0], 3.0)):
        frame = pd.DataFrame({"name": "anything", "round": [1, 2], "value": values})
        monkeypatch.setattr(Result, "diagnostics", lambda _, frame=frame: frame)
        assert measure(run, view, "diagnostics/anything") == expected


def test_seeds_have_a_mean_and_a_deviation() -> None:
    assert over_seeds([]) is None
    assert over_seeds([3.0]) == Ours(3.0, None, 1)
    assert over_seeds([1.0, 3.0]) == Ours(2.0, pytest.approx(2**0.5), 2)


def test_a_page_says_what_is_open() -> None:
    table = read("diversifed-5")
    lines = [
        Line("tau 0.5", "a1", Printed(95.36, 0.78, "printed"), Ours(96.0, 0.5, 3), ("first", "second")),
        Line("tau 0.6", "a1", None, None, ("second",)),
        Line("flops", "a1", Printed(2e6, None, "printed"), Ours(1e6, None, 1)),
    ]
    shown = grid(table, "small", lines)
    assert shown.rows == (
        ("tau 0.5", "a1", "95.36 ± 0.78", "96.00 ± 0.50", "+0.64", "3", "a b"),
        ("tau 0.6", "a1", "-", "-", "-", "-", "b"),
        ("flops", "a1", "2,000,000", "1,000,000", "-50.0 %", "1", ""),
    )
    notes = shown.note.splitlines()
    assert notes[0].startswith("Of the whole table: the formulas are lost")
    assert notes[1:3] == ["a: first.", "b: second."]
    assert notes[3].startswith("The small profile differs: one seed")
    assert "small profile" not in as_markdown("x", table, "full", lines)
    assert as_csv(lines).splitlines()[1] == "tau 0.5,a1,95.36,0.78,printed,96.0,0.5,3,first; second"


# Toys


def test_answers_of_clients_with_the_same_labels_are_close(tmp_path: Path, monkeypatch) -> None:
    small = read("ua_pdfl-fig4").model_copy(
        update={"set": {**read("ua_pdfl-fig4").set, "rounds": 3, "seed": 0}}
    )
    lines, traces = toys.toy_lines(small, "small", (), None, tmp_path, Console())
    near, *far = (line.ours.mean for line in lines)
    assert near < 0.2 * min(far)
    monkeypatch.setattr(toys, "trace", lambda *_: pytest.fail("the trace is there"))
    assert toys.toy_lines(small, "small", (), None, tmp_path, Console()) == (lines, traces)
    assert [len(trace.rounds) for trace in traces] == [3]
    draw(tmp_path / "toy.png", "A toy", traces, {"D(1,2)": 0.02})
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    (kept,) = (tmp_path / "traces").iterdir()
    assert kept.read_text().startswith('round,accuracy,"D(1,2)","D(1,3)","D(2,3)"\n1,')


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diversifed-9"], "no table or figure is called 'diversifed-9'. Did you mean diversifed-"),
        (
            ["diversifed-1", "--only", "FedAvg"],
            "no cell matches. Cells are called row/column, such as 'FedAvg/FMNIST'",
        ),
        (["diversifed-1", "--data", "no/such/folder"], "no/such/folder is no folder"),
    ],
)
def test_a_mistake_says_what_to_do(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["paper", *arguments])
    assert result.exit_code == 2 and words in result.stderr


def test_without_a_name_all_are_listed() -> None:
    lines = CliRunner().invoke(app, ["paper"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(known())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"statistic": "median"}, "statistic"),
        ({"rowz": {}}, "rowz: unknown key. Did you mean rows?"),
        ({"differences": [{"name": "x", "rows": ["FedAvg", "FedAmp"]}]}, "FedAmp is no row or column"),
    ],
)
def test_a_wrong_definition_is_explained(define, change, words: str) -> None:
    define(**change)
    with pytest.raises(ConfigError, match="toy.yaml") as error:
        read("toy")
    assert words in str(error.value)


def test_an_unexpected_error_is_not_swallowed(define, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RaypflError("the disk is full")

    monkeypatch.setattr(work, "complete", fail)
    with pytest.raises(RaypflError, match="disk"):
        reproduce("toy", only=["FedAvg/FMNIST"], out=tmp_path)
    assert (tmp_path / "toy-full.md").is_file()


def test_a_cell_is_called_by_row_and_column() -> None:
    assert Cell("a", "b", None, {}, "global/pre", "best", ()).name == "a/b"
