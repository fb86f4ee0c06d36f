"""Two nodes on this machine, apart where that is allowed: jobs, places, storage, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from small_runs import CONFIG, assert_same_run

import raypfl
from raypfl.cluster import local
from raypfl.cluster.processes import Process
from raypfl.errors import PlacementError

pytestmark = [
    pytest.mark.slow,
    # Ray's client of jobs, in how it follows a log.
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning"),
]

METHOD = "fedamp"


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local.Cluster]:
    """One CPU each; the head has a GPU, by name only; each sees one folder of its own."""
    name = f"test-{os.getpid()}"
    own_disk = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(raypfl.__file__).parent.parent))
        try:
            cluster = local.start(
                name,
                cpus=[1, 1],
                gpus=[1, 0],
                isolation="namespaces",
                private=[own_disk],
                note=lambda _: None,
            )
        except PlacementError as refused:
            if "no network namespaces here" not in str(refused):
                raise
            cluster = local.start(name, cpus=[1, 1], gpus=[1, 0], isolation="processes", note=lambda _: None)
    yield cluster
    if cluster.folder.exists():
        cluster.stop()


def project(folder: Path) -> Path:
    """What travels with a job: a configuration, and nothing else."""
    folder.mkdir()
    settings = {**CONFIG, "model": {"name": "mlp", "hidden": [8]}, "name": "run", "rounds": 3}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


def send(cluster: local.Cluster, config: Path, *overrides: str) -> int:
    """As a person does, in a process of its own: Ray reads its token once a process."""
    command = [
        sys.executable,
        "-m",
        "raypfl.cluster.submit",
        "--working-dir",
        str(config.parent),
        str(config),
    ]
    environment = {**os.environ, **cluster.submission_environment}
    return subprocess.run([*command, *overrides], env=environment, timeout=300).returncode


class Gauges(threading.Thread):
    """Reads a run's gauges from the Prometheus endpoints of all nodes until told to stop, as a scraper does.

    Ray forgets those of a program soon after its end.
    """

    def __init__(self, cluster: local.Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster, self.last, self.done = cluster, dict[str, float](), threading.Event()
        self.direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        token = {"Authorization": f"Bearer {cluster.token.read_text()}"}
        asking = urllib.request.Request(f"{cluster.dashboard}/api/prometheus/sd", headers=token)
        with self.direct.open(asking, timeout=30) as answer:
            self.targets = [target for group in json.load(answer) for target in group["targets"]]

    def run(self) -> None:
        while not self.done.is_set():
            for target in self.targets:
                self.read(target)
            self.done.wait(0.3)

    def read(self, target: str) -> None:
        try:
            with self.direct.open(f"http://{target}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return
        for line in lines:
            if line.startswith("ray_raypfl_"):
                self.last[line.partition("{")[0]] = float(line.rpartition(" ")[2])

    def wait_for_round(self, round: int) -> dict[str, float]:
        end = time.monotonic() + 30
        while self.last.get("ray_raypfl_round") != round and time.monotonic() < end:
            time.sleep(0.3)
        self.done.set()
        self.join()
        return self.last


def on_head(cluster: local.Cluster, *arguments: str) -> str:
    """What a Python on the head prints last."""
    done = subprocess.run(
        cluster.command(0, [sys.executable, *arguments]),
        env=local.job_environment(cluster),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_job_on_two_nodes_gives_the_bits_of_one_process(
    two_nodes: local.Cluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = project(tmp_path / "project")
    gauges = Gauges(two_nodes)
    gauges.start()
    places = ["engine.num_actors=2", "resources.hosts=spread", "resources.server=beside"]
    code = send(two_nodes, config, f"storage_path={tmp_path}/there", *places)
    shown = capfd.readouterr()
    assert code == 0, shown
    assert "fedamp-seed3  round 3/3  accuracy" in shown.out, "the job's output is followed"
    here = raypfl.run(config, [f"storage_path={tmp_path}/here"])
    assert_same_run(tmp_path / "there" / "run", here.path, METHOD)
    found = gauges.wait_for_round(3)
    last = here.rounds().query("round == 3 and split == 'train'").iloc[0]
    assert found["ray_raypfl_round"] == 3
    assert found["ray_raypfl_upload_bytes"] == last.upload_bytes
    assert found["ray_raypfl_download_bytes"] == last.download_bytes
    assert 0 < found["ray_raypfl_accuracy"] <= 1 and found["ray_raypfl_clients_per_second"] > 0


def test_a_failing_job_gives_its_status_and_says_which_node_does_not_see_the_storage(
    two_nodes: local.Cluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if two_nodes.isolation != "namespaces":
        pytest.skip("needs network namespaces, for nodes with disks of their own")
    (own_disk,) = two_nodes.private
    config = project(tmp_path / "project")
    assert send(two_nodes, config, f"storage_path={own_disk}/runs") == 2
    head, other = (node.address for node in two_nodes.nodes)
    said = capfd.readouterr().out
    assert (
        f"StorageError: storage_path = {own_disk}/runs: what {head} writes there is not seen on {other}"
        in said
    )
    assert not list(tmp_path.glob("*/run")), "nothing was begun"


def test_who_has_no_token_is_told_so(two_nodes: local.Cluster, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "raypfl.cluster.submit", "--address", two_nodes.dashboard]
        + [str(project(tmp_path / "project")), "storage_path=/shared"],
        cwd=tmp_path,
        env=env | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"PlacementError: {two_nodes.dashboard} asks for its token" in done.stderr
    assert "Traceback" not in done.stderr


def test_actors_go_where_they_are_asked_to(two_nodes: local.Cluster) -> None:
    told = json.loads(on_head(two_nodes, str(Path(__file__).with_name("places.py"))))
    (_, *hosts), _ = told["packed"]
    assert len(set(hosts)) == 1
    (_, *hosts), _ = told["spread"]
    assert set(hosts) == {0, 1}
    (server, *hosts), _ = told["apart"]
    assert server not in hosts
    (server, *hosts), _ = told["beside and spread"]
    assert server == hosts[0] and set(hosts) == {0, 1}
    # Only the head has a GPU, so hosts that want a half of it are there, whatever else is asked for.
    assert told["halves of a GPU"] == [[1, 0, 0], ["", "0", "0"]]
    assert "the places of this run were not free within 1 s. It asks for 9 client hosts" in told["too many"]
    assert told["copies"] == 2, "four readers on two nodes share two copies of the data"
    # The trial itself takes a quarter of its bundle; what it starts stays in the group.
    assert told["trial"] == [[0.25, 0.5, 0.5], False, 2]


def test_a_node_is_killed_and_the_rest_is_stopped_and_nobody_else(two_nodes: local.Cluster) -> None:
    recorded = [one for node in two_nodes.nodes for one in (node.keeper, *node.processes)]
    loaded = local.load(two_nodes.name)
    assert loaded == two_nodes
    with subprocess.Popen(["sleep", "300"]) as bystander:
        loaded.kill(1)
        assert loaded.alive()[0] > 0 and loaded.alive()[1] == 0
        loaded.stop()
        assert bystander.poll() is None
        bystander.kill()
    assert len(recorded) > 10 and not any(isinstance(one, Process) and one.alive for one in recorded)
    assert not loaded.folder.exists()
    if loaded.isolation == "namespaces":
        names = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
        names += subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        assert loaded.label not in names
    with pytest.raises(PlacementError, match="there is no local cluster 'test-"):
        local.load(two_nodes.name)


def test_plain_processes_where_namespaces_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    notes: list[str] = []
    cluster = local.start(f"plain-{os.getpid()}", cpus=[1, 1], gpus=[0, 0], note=notes.append)
    try:
        assert notes == ["Nodes are plain processes: network namespaces are for root."]
        assert [node.address for node in cluster.nodes] == ["127.0.0.2", "127.0.0.3"]
        assert all(count > 0 for count in cluster.alive())
        with pytest.raises(PlacementError, match="runs, or was not stopped"):
            local.start(cluster.name)
    finally:
        cluster.stop()
    assert not any(one.alive for node in cluster.nodes for one in node.processes)


def test_a_cluster_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_ray_start", lambda *_: ["sh", "-c", "echo no room; sleep 300 & exit 1"])
    name = f"fails-{os.getpid()}"
    with pytest.raises(PlacementError, match=r"node 0 of fails-.*\nno room"):
        local.start(name, note=lambda _: None)
    assert not local.folder_of(name).exists()
