"""The files in cluster/ are what their tools expect, and keep Ray's token and loopback defaults."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from raypfl.configuration import load

HERE = Path(__file__).parent
CLUSTER = HERE.parent.parent / "cluster"
LAUNCHER = ["aws", "gcp", "on_premise"]
KUBERAY = ["raycluster", "rayjob"]


def launcher(name: str) -> Any:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def manifest(name: str) -> Any:
    return yaml.safe_load((CLUSTER / "kuberay" / f"{name}.yaml").read_text())


def ray_schema() -> Any:
    return json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


def kuberay_schema() -> Any:
    return json.loads((HERE / "kuberay.schema.json").read_text())


@pytest.mark.parametrize("name", LAUNCHER)
def test_launcher_files_are_valid(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = launcher(name)
    jsonschema.validate(config, ray_schema())
    # As `ray up` does before it asks the provider for anything.
    validate_config(prepare_config(config))


@pytest.mark.parametrize("name", LAUNCHER)
def test_launched_clusters_ask_for_a_token_and_show_the_dashboard_to_the_head_alone(name: str) -> None:
    config = launcher(name)
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starting = [command for command in commands if "ray start" in command]
    assert len(starting) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starting)
    assert "--dashboard-host=127.0.0.1" in starting[0]
    assert any(local.endswith(".ray/auth_token") for local in config["file_mounts"].values())


@pytest.mark.parametrize("name", KUBERAY)
def test_manifests_are_valid_and_have_a_gpu_group(name: str) -> None:
    found = manifest(name)
    jsonschema.validate(found, kuberay_schema())
    spec = found["spec"]["rayClusterSpec"] if name == "rayjob" else found["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    (gpu,) = [group for group in spec["workerGroupSpecs"] if group["groupName"] == "gpu"]
    (container,) = gpu["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # What a pod mounts, it also has.
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    "wrong", [{"rayVersion": 2.6}, {"authOption": {"mode": "token"}}, {"authOptions": {"mode": "none"}}]
)
def test_a_wrong_manifest_is_seen(wrong: dict[str, Any]) -> None:
    found = copy.deepcopy(manifest("raycluster"))
    found["spec"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, kuberay_schema())


def test_the_job_of_the_manifest_is_a_run_that_is_accepted(repository: Path) -> None:
    program, command, config, *overrides = shlex.split(manifest("rayjob")["spec"]["entrypoint"])
    assert (program, command) == ("raypfl", "run")
    settings = load(repository / config, overrides)
    assert settings.engine.name == "ray" and settings.storage_path == "/shared/runs"


def test_image_and_manifests_have_one_ray(repository: Path) -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG RAY=(\S+)$", text, re.MULTILINE)
    job, cluster = manifest("rayjob")["spec"]["rayClusterSpec"], manifest("raycluster")["spec"]
    assert {job["rayVersion"], cluster["rayVersion"]} == {version}
    copied = [line.split()[2:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert copied and all((repository / source).exists() for sources in copied for source in sources)


def test_the_slurm_script_starts_one_cluster_with_a_token_of_its_own(tmp_path: Path) -> None:
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\n")
    stubs = {
        "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "node1\\nnode2\\n"',
        "srun": 'file=$RAY_AUTH_TOKEN_PATH; stat -c %a $file; wc -c <$file; printf "%s\\n" "$@"; exit 3',
    }
    for name, body in stubs.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "16",
    }
    done = subprocess.run(
        ["bash", CLUSTER / "slurm.sh", "run", "a config.yaml", "rounds=5"],
        cwd=tmp_path,
        env=os.environ | job,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, f"the run's own status; {done.stderr}"
    mode, length, *arguments = done.stdout.split("\n")[:-1]
    assert (mode, length) == ("600", "64")
    assert arguments == [
        *("--kill-on-bad-exit=1", "ray", "symmetric-run", "--address", "node1:23456", "--min-nodes", "2"),
        *("--num-cpus", "16", "--", "raypfl", "run", "a config.yaml", "rounds=5"),
        *("engine.name=ray", "engine.address=node1:23456"),
    ]
    assert not list(tmp_path.glob(".ray-token*"))


@pytest.mark.parametrize("name", ["local", "submit"])
def test_programs_can_be_started(name: str) -> None:
    assert (CLUSTER / name).stat().st_mode & stat.S_IXUSR
    assert subprocess.run(["sh", "-n", CLUSTER / name], check=False).returncode == 0
