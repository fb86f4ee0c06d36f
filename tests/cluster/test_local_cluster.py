"""Two nodes on this machine, apart where that is allowed: jobs, faults, places, storage, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import stumbling
import yaml
from small_runs import CONFIG, assert_same_run, claim_of, wait_until_ended

import raypfl
from raypfl.cluster import local
from raypfl.cluster.processes import Process, descendants
from raypfl.errors import PlacementError

pytestmark = [
    pytest.mark.slow,
    # Ray's client of jobs, in how it follows a log.
    pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning"),
]

METHOD = "fedamp"
PLACES = ("engine.num_actors=2", "resources.hosts=spread", "resources.server=beside")


@pytest.fixture(scope="module")
def stumble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which processes of the cluster are asked to stumble."""
    return tmp_path_factory.mktemp("stumble")


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory, stumble: Path) -> Iterator[local.Cluster]:
    """One CPU each; the head has a GPU, by name only; each sees one folder of its own."""
    name = f"test-{os.getpid()}"
    own_disk = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(raypfl.__file__).parent.parent), prepend=os.pathsep)
        for variable, value in stumbling.environment(stumble).items():
            patch.setenv(variable, value)
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
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "name": "run"}))
    return folder / "config.yaml"


def sending(cluster: local.Cluster, project: Path, *arguments: str) -> subprocess.Popen[str]:
    """As a person does, in a process of its own: Ray reads its token once a process."""
    command = [sys.executable, "-m", "raypfl.cluster.submit", "--working-dir", str(project), *arguments]
    # It looks at the model, too.
    environment = {**os.environ, **stumbling.environment(project), **cluster.submission_environment}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def send(cluster: local.Cluster, project: Path, *arguments: str) -> tuple[int, str]:
    """Its status, and all that it printed."""
    with sending(cluster, project, *arguments) as sent:
        said, _ = sent.communicate(timeout=300)
        return sent.returncode, said


def driver_of(cluster: local.Cluster) -> int:
    """The process of the one job that runs."""
    (head, *_) = cluster.nodes
    assert head.keeper is not None
    found = []
    for one in descendants(head.keeper):
        # Others may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"raypfl\0run\0" in Path(f"/proc/{one.pid}/cmdline").read_bytes():
                found.append(one.pid)
    assert len(found) == 1, found
    return found[0]


class Gauges:
    """A run's gauges on the Prometheus endpoints of all nodes, as a scraper reads them."""

    def __init__(self, cluster: local.Cluster) -> None:
        self.direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        token = {"Authorization": f"Bearer {cluster.token.read_text()}"}
        asking = urllib.request.Request(f"{cluster.dashboard}/api/prometheus/sd", headers=token)
        with self.direct.open(asking, timeout=30) as answer:
            self.targets = [target for group in json.load(answer) for target in group["targets"]]

    def of_round(self, round: int, seconds: float = 240.0) -> dict[str, float]:
        """Once they are there; Ray sends them every few seconds."""
        end, found = time.monotonic() + seconds, dict[str, float]()
        while found.get("ray_raypfl_round") != round:
            assert time.monotonic() < end, found
            time.sleep(0.3)
            found = {name: value for target in self.targets for name, value in self.read(target)}
        return found

    def read(self, target: str) -> Iterator[tuple[str, float]]:
        try:
            with self.direct.open(f"http://{target}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return
        for line in lines:
            if line.startswith("ray_raypfl_"):
                yield line.partition("{")[0], float(line.rpartition(" ")[2])


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


def test_a_job_on_two_nodes_gives_the_bits_of_one_process(two_nodes: local.Cluster, tmp_path: Path) -> None:
    config = project(tmp_path / "project")
    status, said = send(
        two_nodes, config.parent, str(config), f"storage_path={tmp_path}/there", "rounds=3", *PLACES
    )
    assert status == 0, said
    assert "round 3/3  accuracy" in said, "the job's output is followed"
    here = raypfl.run(config, [f"storage_path={tmp_path}/here", "rounds=3"])
    assert_same_run(tmp_path / "there" / "run", here.path, METHOD)


def test_a_job_whose_driver_is_killed_goes_on_as_another_job(
    two_nodes: local.Cluster, stumble: Path, tmp_path: Path
) -> None:
    config = project(tmp_path / "project")
    here = raypfl.run(config, [f"storage_path={tmp_path}/here"])
    there = tmp_path / "there" / "run"
    # A host has two clients with two batches each.
    stumbling.ask(stumble, "block", after=3 * 4 + 1)
    with sending(two_nodes, config.parent, str(config), f"storage_path={there.parent}", *PLACES) as sent:
        claim = claim_of(sent, stumble)
        try:
            gauges = Gauges(two_nodes).of_round(3)
            os.kill(driver_of(two_nodes), signal.SIGKILL)
            said, _ = sent.communicate(timeout=300)
            wait_until_ended(stumbling.pid_of(claim))
        finally:
            claim.unlink()
            sent.kill()
    assert sent.returncode == 137 and "cluster/submit --resume" in said, said
    assert "round 3/6" in said and "round 4/6" not in said
    last = here.rounds().query("round == 3 and split == 'train'").iloc[0]
    assert gauges["ray_raypfl_upload_bytes"] == last.upload_bytes
    assert gauges["ray_raypfl_download_bytes"] == last.download_bytes
    assert 0 < gauges["ray_raypfl_accuracy"] <= 1 and gauges["ray_raypfl_clients_per_second"] > 0

    status, said = send(two_nodes, config.parent, "--resume", str(there))
    assert status == 0, said
    assert "6 rounds, resumed after round 2" in said
    assert_same_run(there, here.path, METHOD)


def test_a_failing_job_gives_its_status_and_says_which_node_does_not_see_the_storage(
    two_nodes: local.Cluster,
    tmp_path: Path,
) -> None:
    if two_nodes.isolation != "namespaces":
        pytest.skip("needs network namespaces, for nodes with disks of their own")
    (own_disk,) = two_nodes.private
    config = project(tmp_path / "project")
    status, said = send(two_nodes, config.parent, str(config), f"storage_path={own_disk}/runs")
    assert status == 2
    head, other = (node.address for node in two_nodes.nodes)
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
        env=env
        | dict(stumbling.environment(tmp_path))
        | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"},
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
    # The trial itself takes a quarter of its bundle; what it starts stays in the group, whatever it asks for.
    assert told["trial"] == [[0.25, 0.25, 0.25], False, [True, True, True]]


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


def test_a_node_that_was_too_slow_to_start_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = f"if mkdir {tmp_path}/first; then echo {local.SLOW!r}.; else echo no room; fi; exit 1"
    monkeypatch.setattr(local, "_ray_start", lambda *_: ["sh", "-c", script])
    name, notes = f"slow-{os.getpid()}", list[str]()
    with pytest.raises(PlacementError, match=r"node 0 of slow-.*\n.*\nno room"):
        local.start(name, note=notes.append)
    assert notes[-1] == "Node 0 was too slow for `ray start`; once more."
    assert not local.folder_of(name).exists()
