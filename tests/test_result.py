import json
import subprocess
import sys

import pytest

from raypfl.errors import StorageError
from raypfl.records.files import write_text
from raypfl.records.folder import RunFolder
from raypfl.records.metrics import SERVER, Metrics
from raypfl.result import Result


def make_run(storage, name, *, method, seed=0, accuracy=0.5):
    folder = RunFolder.create(storage, name)
    write_text(folder.config, f"seed: {seed}\n")
    metrics = Metrics(folder.metrics, method=method, seed=seed, reported=("personalised", "post"))
    client = {"client": [0, 1], "accuracy": [accuracy, 1.0], "loss": 0.5, "samples": 10, "participant": True}
    group = {"round": 1, "point": "post", "model": "personalised", "split": "test"}
    message = {"src": 0, "dst": SERVER, "kind": "model", "values": 2, "bytes": 8}
    metrics.add_round(1, clients=[client | group], traffic=[message], participants=2, round_seconds=1.0)
    metrics.flush(force=True)
    return folder.path


def test_one_run(tmp_path):
    result = Result(make_run(tmp_path, "run", method="fedamp"))
    assert result.path == tmp_path / "run"
    assert [run.path for run in result.runs] == [result.path]
    assert result.summary["method"] == "fedamp"
    assert result.summary["figures"]["personalised/post"]["best"]["mean"] == 0.75
    assert json.loads(json.dumps(result.summary)) == result.summary

    clients = result.clients()
    assert list(clients.columns[:4]) == ["run", "method", "seed", "round"]
    assert clients["accuracy"].tolist() == [0.5, 1.0]
    assert result.rounds().query("split == 'test'")["accuracy_mean"].tolist() == [0.75]
    assert result.traffic()[["src", "dst", "kind", "bytes"]].values.tolist() == [[0, SERVER, "model", 8]]


def test_several_runs_are_told_apart(tmp_path):
    make_run(tmp_path / "group", "local", method="local", accuracy=0.2)
    make_run(tmp_path / "group", "fedamp-2", method="fedamp", accuracy=0.4)
    result = Result(tmp_path / "group")
    assert [run.path.name for run in result.runs] == ["fedamp-2", "local"]
    assert result.summary["local"]["method"] == "local"
    best = result.clients().groupby(["run", "method"], observed=True)["accuracy"].min()
    assert best.to_dict() == {("fedamp-2", "fedamp"): 0.4, ("local", "local"): 0.2}


def test_repr_is_path_and_ranking(tmp_path):
    make_run(tmp_path / "group", "a", method="local", accuracy=0.2)
    make_run(tmp_path / "group", "b", method="fedamp", accuracy=0.4)
    lines = repr(Result(tmp_path / "group")).splitlines()
    assert lines[0] == f"Result({str(tmp_path / 'group')!r})"
    assert [line.split()[0] for line in lines[3:5]] == ["fedamp", "local"]


def test_no_run_there(tmp_path):
    with pytest.raises(StorageError, match="is not a run"):
        Result(tmp_path)


def test_a_run_without_tables_says_so(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    write_text(folder.config, "{}\n")
    with pytest.raises(StorageError, match=r"cannot read .*clients\.parquet"):
        Result(folder.path).clients()


def test_neither_pandas_nor_ray_is_imported_before_it_is_needed():
    code = "import sys, raypfl.result, raypfl.console; print({'pandas', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
