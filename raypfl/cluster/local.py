"""Several Ray nodes on one machine, as separate hosts with their own addresses.

Where namespaces are allowed (root), each node has a network of its own, and a temporary folder of Ray of its
own. Elsewhere nodes are plain processes with addresses 127.0.0.2, 127.0.0.3 and so on. Everything is found
again by the state file; `stop` ends what is below each node's keeper, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from raypfl.cluster.keeper import exit_status, keep
from raypfl.cluster.networks import Network, NotAllowed, free_subnet
from raypfl.cluster.processes import Process, descendants, end
from raypfl.errors import ConfigError, PlacementError

Isolation = Literal["namespaces", "processes"]

START_SECONDS = 120.0
SLOW = "The current node timed out during startup"
"""What `ray start` says on a machine that is too busy for the half minute that it waits."""

GRACE_SECONDS = 5.0
LONGEST_SOCKET = 107
"""Bytes that the path of a Unix socket may have, and below, those that Ray puts behind its folder."""
SOCKET_TAIL = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
PORTS = range(20_000, 32_000)
"""Where nodes that share a network take theirs: beside those of workers and what the kernel gives out."""


class Node(BaseModel):
    """One host of the cluster."""

    number: int
    address: str
    cpus: int
    gpus: int
    keeper: Process | None = None
    """The process that has all others of the node below it."""
    processes: list[Process] = []
    """Those that were there when the node had started."""


class Cluster(BaseModel):
    """A cluster on this machine; what is in its state file."""

    name: str
    isolation: Isolation
    label: str
    subnet: str | None = None
    private: list[Path] = []
    gcs: str
    dashboard: str
    nodes: list[Node]

    @property
    def folder(self) -> Path:
        """State, token and logs."""
        return folder_of(self.name)

    @property
    def token(self) -> Path:
        """The file with the token that Ray asks everybody for."""
        return self.folder / "token"

    @property
    def submission_environment(self) -> dict[str, str]:
        """What a program needs to send jobs there."""
        return {
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }

    def node(self, number: int) -> Node:
        """One of the nodes; 0 is the head.

        Raises:
            ConfigError: there is no such node.
        """
        if not 0 <= number < len(self.nodes):
            raise ConfigError(f"{self.name} has nodes 0 to {len(self.nodes) - 1}; there is no node {number}.")
        return self.nodes[number]

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """`command`, as a program of a node."""
        if self.isolation == "processes":
            return list(command)
        shown = [(self.folder / f"node-{number}" / "ray", self.folder / "ray")]
        shown += [
            (self.folder / f"node-{number}" / f"private-{place}", target)
            for place, target in enumerate(self.private)
        ]
        binds = [str(path) for pair in shown for path in pair]
        script = 'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 1; shift 2; done; shift; exec "$@"'
        inside = self._network().namespace(number)
        return ["ip", "netns", "exec", inside, "sh", "-c", script, "sh", *binds, "--", *command]

    def save(self) -> None:
        """Write the state file, whole or not at all."""
        building = self.folder / "cluster.part"
        building.write_text(self.model_dump_json(indent=2))
        building.rename(self.folder / "cluster.json")

    def kill(self, number: int) -> None:
        """End a node at once, as a power cut would."""
        _end(self.node(number), grace_seconds=0)

    def stop(self) -> None:
        """End all nodes, remove their networks and the folder.

        Raises:
            PlacementError: processes are left; the state file stays, to try again.
        """
        left = [one for node in reversed(self.nodes) for one in _end(node, grace_seconds=GRACE_SECONDS)]
        if left:
            raise PlacementError(
                f"processes {[one.pid for one in left]} of {self.name} do not end. Try again later."
            )
        if self.isolation == "namespaces":
            self._network().remove()
        shutil.rmtree(self.folder)

    def alive(self) -> list[int]:
        """How many processes each node has."""
        return [0 if node.keeper is None else len(descendants(node.keeper)) for node in self.nodes]

    def _network(self) -> Network:
        assert self.subnet is not None
        return Network(self.label, self.subnet, len(self.nodes))


def folder_of(name: str) -> Path:
    """Where a cluster of that name has its state; short, since Ray's sockets are below.

    Raises:
        ConfigError: the name, or the folder for temporary files, makes it too long or is no folder's name.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,15}", name):
        raise ConfigError(f"name {name!r}: use up to 16 small letters, digits and dashes.")
    folder = Path(tempfile.gettempdir()) / f"raypfl-{name}"
    if len(str(folder / "ray") + SOCKET_TAIL) > LONGEST_SOCKET:
        raise ConfigError(
            f"{folder} is too long for Ray's sockets below it. Set TMPDIR to a shorter folder, such as /tmp."
        )
    return folder


def load(name: str) -> Cluster:
    """The cluster of that name.

    Raises:
        PlacementError: there is none.
    """
    try:
        return Cluster.model_validate_json((folder_of(name) / "cluster.json").read_text())
    except FileNotFoundError:
        raise PlacementError(
            f"there is no local cluster {name!r} ({folder_of(name)} has no state). "
            "Start one with: cluster/local start"
        ) from None


def start(
    name: str = "local",
    *,
    cpus: Sequence[int] = (1, 1),
    gpus: Sequence[int] = (0, 0),
    isolation: Isolation | Literal["auto"] = "auto",
    private: Sequence[Path] = (),
    note: Callable[[str], None] = print,
) -> Cluster:
    """Start one node for each entry of `cpus`, and wait until all have joined.

    Args:
        name: of the cluster on this machine.
        cpus: cores that each node says it has.
        gpus: GPUs that each node says it has; real ones only where there are some.
        isolation: how nodes are kept apart; auto: namespaces where they are allowed.
        private: folders of which each node sees one of its own, as it would a local disk; namespaces only.
        note: is told what is worth knowing on the way.

    Raises:
        ConfigError: the arguments do not fit together.
        PlacementError: it cannot start; nothing is left of it.
    """
    if not cpus or len(cpus) != len(gpus):
        raise ConfigError(f"cpus = {list(cpus)} and gpus = {list(gpus)}: give one number a node for each.")
    folder = folder_of(name)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise PlacementError(
            f"{folder} is there: a local cluster {name!r} runs, or was not stopped. Stop it with "
            f"`cluster/local stop --name {name}`, or give another --name."
        ) from None
    try:
        cluster = _prepared(name, folder, list(zip(cpus, gpus, strict=True)), isolation, private, note)
    except BaseException:
        shutil.rmtree(folder)
        raise
    try:
        for node in cluster.nodes:
            _start_node(cluster, node, note)
        _wait_for_all(cluster)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _prepared(
    name: str,
    folder: Path,
    sizes: Sequence[tuple[int, int]],
    isolation: Isolation | Literal["auto"],
    private: Sequence[Path],
    note: Callable[[str], None],
) -> Cluster:
    """Addresses, folders, token and state of a cluster of which nothing runs yet."""
    label, subnet = secrets.token_hex(4), None
    if isolation != "processes":
        try:
            subnet = free_subnet()
            Network(label, subnet, len(sizes)).make()
        except NotAllowed as reason:
            if isolation == "namespaces":
                raise PlacementError(f"no network namespaces here: {reason}.") from None
            subnet = None
            note(f"Nodes are plain processes: {reason}.")
    if subnet is None and private:
        raise ConfigError("private folders need namespaces, and nodes are plain processes here.")
    if subnet is None:
        addresses = [f"127.0.0.{number + 2}" for number in range(len(sizes))]
        gcs, dashboard = f"{addresses[0]}:{_free_port()}", f"127.0.0.1:{_free_port()}"
    else:
        addresses = Network(label, subnet, len(sizes)).addresses
        # On the bridge, which nobody outside this machine has a route to: as good as loopback.
        gcs, dashboard = f"{addresses[0]}:6379", f"{addresses[0]}:8265"
    cluster = Cluster(
        name=name,
        isolation="processes" if subnet is None else "namespaces",
        label=label,
        subnet=subnet,
        private=[path.absolute() for path in private],
        gcs=gcs,
        dashboard=f"http://{dashboard}",
        nodes=[
            Node(number=number, address=address, cpus=own[0], gpus=own[1])
            for number, (address, own) in enumerate(zip(addresses, sizes, strict=True))
        ],
    )
    cluster.save()
    (folder / "ray").mkdir()
    for node in cluster.nodes:
        for part in ("ray", *(f"private-{place}" for place in range(len(private)))):
            (folder / f"node-{node.number}" / part).mkdir(parents=True)
    for path in cluster.private:
        path.mkdir(parents=True, exist_ok=True)
    cluster.token.touch(mode=0o600)
    cluster.token.write_text(secrets.token_hex(32))
    return cluster


def _start_node(cluster: Cluster, node: Node, note: Callable[[str], None]) -> None:
    said = _try_to_start(cluster, node)
    if SLOW in said:
        note(f"Node {node.number} was too slow for `ray start`; once more.")
        _end(node, grace_seconds=0)
        said = _try_to_start(cluster, node)
    if said:
        raise PlacementError(
            f"node {node.number} of {cluster.name} did not start. `ray start` said:\n"
            + "\n".join(said.splitlines()[-8:])
        )
    assert node.keeper is not None
    node.processes = descendants(node.keeper)
    cluster.save()


def _try_to_start(cluster: Cluster, node: Node) -> str:
    """Run `ray start` for a node; returns nothing, or what it said if it failed."""
    folder = cluster.folder / f"node-{node.number}"
    (folder / "keeper.status").unlink(missing_ok=True)
    log = folder / "ray_start.log"
    command = cluster.command(node.number, _ray_start(cluster, node))
    with log.open("wb") as out:
        node.keeper = keep(command, folder, env=_node_environment(cluster, os.environ), log=out)
    cluster.save()
    status = exit_status(folder, node.keeper, START_SECONDS)
    if status == 0:
        return ""
    return log.read_text(errors="replace").strip() or f"nothing, and ended with status {status}."


def _ray_start(cluster: Cluster, node: Node) -> list[str]:
    head = node.number == 0
    apart = cluster.isolation == "namespaces"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(cluster.nodes)
    where = cluster.dashboard.removeprefix("http://").split(":")
    options = {
        "node-ip-address": node.address,
        "num-cpus": node.cpus,
        "num-gpus": node.gpus,
        # Each would take these shares of the machine, as if it were alone there.
        "memory": int(0.6 * machine),
        "object-store-memory": int(0.2 * machine),
    }
    if head:
        options |= {"port": cluster.gcs.split(":")[1], "dashboard-host": where[0], "dashboard-port": where[1]}
    else:
        options |= {"address": cluster.gcs}
    if head or apart:
        options |= {"temp-dir": cluster.folder / "ray"}
    if not apart:
        options |= {"dashboard-agent-listen-port": _free_port()}
        options |= {"ray-client-server-port": _free_port()} if head else {}
    given = [f"--{key}={value}" for key, value in options.items()]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", *(["--head"] if head else [])),
        *given,
        "--disable-usage-stats",
    ]


def _node_environment(cluster: Cluster, outer: Mapping[str, str]) -> dict[str, str]:
    """The caller's, without another cluster's addresses, and with this Python's programs first."""
    inherited = {key: value for key, value in outer.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    here = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((here, outer.get("PATH", os.defpath))),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(cluster.token),
    }


def job_environment(cluster: Cluster) -> dict[str, str]:
    """The environment of a program of the cluster that is not a job: it joins, and starts nothing."""
    joined = {"RAY_ADDRESS": cluster.gcs} | cluster.submission_environment
    return _node_environment(cluster, os.environ) | joined


def _wait_for_all(cluster: Cluster) -> None:
    """Until the dashboard counts every node."""
    patience = time.monotonic() + START_SECONDS
    alive = 0
    while time.monotonic() < patience:
        try:
            alive = _count_nodes(cluster)
        except (urllib.error.URLError, OSError, KeyError, json.JSONDecodeError):
            alive = 0
        if alive == len(cluster.nodes):
            return
        time.sleep(0.5)
    raise PlacementError(f"{alive} of {len(cluster.nodes)} nodes of {cluster.name} joined within time.")


def _count_nodes(cluster: Cluster) -> int:
    asking = urllib.request.Request(
        f"{cluster.dashboard}/nodes?view=summary",
        headers={"Authorization": f"Bearer {cluster.token.read_text()}"},
    )
    # A proxy is for addresses elsewhere.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(asking, timeout=5) as answer:
        found = json.load(answer)["data"]["summary"]
    return sum(node["raylet"].get("state") == "ALIVE" for node in found)


def _end(node: Node, *, grace_seconds: float) -> list[Process]:
    if node.keeper is None:
        return []
    return end(node.keeper, node.processes, grace_seconds=grace_seconds)


def _free_port() -> int:
    """A port that nobody listens at."""
    for _ in range(100):
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise PlacementError(f"no free port between {PORTS.start} and {PORTS.stop}.")
