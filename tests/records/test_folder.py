import json
import os
import subprocess
import sys

import pytest

from raypfl.errors import StorageError
from raypfl.records.environment import environment
from raypfl.records.files import replacing, write_json, write_text
from raypfl.records.folder import RunFolder


def test_create_makes_the_folder_and_its_parents(tmp_path):
    folder = RunFolder.create(tmp_path / "deep" / "storage", "run")
    assert folder.path == tmp_path / "deep" / "storage" / "run"
    assert folder.path.is_dir()
    assert list(folder.path.iterdir()) == []


def test_a_run_is_never_overwritten(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    write_text(folder.summary, "precious")
    with pytest.raises(StorageError) as caught:
        RunFolder.create(tmp_path, "run")
    assert f"raypfl resume {folder.path}" in str(caught.value)
    assert "name=" in str(caught.value)
    assert folder.summary.read_text() == "precious"


def test_a_file_of_that_name_is_not_overwritten_either(tmp_path):
    (tmp_path / "run").write_text("precious")
    with pytest.raises(StorageError, match="exists already"):
        RunFolder.create(tmp_path, "run")
    assert (tmp_path / "run").read_text() == "precious"


@pytest.mark.parametrize("below", ["file", "file/storage"])
def test_unwritable_storage_names_path_and_reason(tmp_path, below):
    # Root writes anywhere, so permissions prove nothing: nobody can make a folder below a regular file.
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        RunFolder.create(tmp_path / below, "run")
    assert str(tmp_path / below / "run") in str(caught.value)
    assert os.strerror(20) in str(caught.value) or os.strerror(17) in str(caught.value)
    assert "storage_path" in str(caught.value)


def test_open_refuses_a_folder_without_a_run(tmp_path):
    with pytest.raises(StorageError, match=r"no config\.yaml"):
        RunFolder.open(tmp_path)
    RunFolder(tmp_path).config.write_text("seed: 1\n")
    assert RunFolder.open(tmp_path).is_run


def test_a_folder_of_several_runs_lists_them_by_name(tmp_path):
    group = RunFolder.create(tmp_path, "group")
    for name in ("local", "fedavg"):
        write_text(RunFolder.create(group.path, name).config, "seed: 0\n")
    found = RunFolder.open(group.path)
    assert [run.path.name for run in found.runs()] == ["fedavg", "local"]
    assert not found.is_run
    assert found.runs()[0].is_run


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_reads_back(tmp_path):
    value = {"z": 1, "a": [1.5, None, "é"]}
    write_json(tmp_path / "value.json", value)
    assert json.loads((tmp_path / "value.json").read_text()) == value


def test_environment_names_versions_and_is_json():
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["torch"] == __import__("torch").__version__
    assert found["cpus"] >= 1
    assert found["started"].endswith("+00:00")


def test_environment_does_not_import_ray():
    code = "import sys, raypfl.records.environment as e; e.environment(); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
