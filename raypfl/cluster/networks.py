"""A network of its own for each node: Linux network namespaces, joined by a bridge."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import sys

SUBNETS = ipaddress.ip_network("10.77.0.0/16")
"""A cluster takes the first /24 in here that the machine has no route to."""

PROBE_PORT = 6379


class NotAllowed(Exception):
    """This process may not make namespaces or links here; says why."""


class Network:
    """One bridge on this machine, and one namespace a node behind it.

    Args:
        label: up to 8 characters that no other cluster has; part of every name.
        subnet: the addresses; the machine has the first, nodes the next ones.
        count: number of nodes.
    """

    def __init__(self, label: str, subnet: str, count: int) -> None:
        self.label, self.subnet, self.count = label, subnet, count
        self.bridge = f"rp{label}"

    @property
    def addresses(self) -> list[str]:
        """Of the nodes."""
        hosts = list(ipaddress.ip_network(self.subnet).hosts())
        return [str(host) for host in hosts[1 : self.count + 1]]

    def namespace(self, number: int) -> str:
        """The name of a node's namespace."""
        return f"raypfl-{self.label}-{number}"

    def make(self) -> None:
        """Make all of it, and try whether nodes reach each other.

        Raises:
            NotAllowed: what was made is removed again.
        """
        try:
            self._make()
        except NotAllowed:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove what is there of it; nobody may be left inside."""
        for number in range(self.count):
            _try("link", "del", self._link(number))
            _try("netns", "del", self.namespace(number))
        _try("link", "del", self.bridge)

    def _make(self) -> None:
        network = ipaddress.ip_network(self.subnet)
        machine = str(next(network.hosts()))
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("address", "add", f"{machine}/{network.prefixlen}", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for number, address in enumerate(self.addresses):
            inside = self.namespace(number)
            _ip("netns", "add", inside)
            _ip("link", "add", self._link(number), "type", "veth", "peer", "name", "eth0", "netns", inside)
            _ip("link", "set", self._link(number), "master", self.bridge, "up")
            _ip("-n", inside, "address", "add", f"{address}/{network.prefixlen}", "dev", "eth0")
            _ip("-n", inside, "link", "set", "eth0", "up")
            _ip("-n", inside, "link", "set", "lo", "up")
            # Nothing is forwarded there; it is how a program finds which address is its own.
            _ip("-n", inside, "route", "add", "default", "via", machine)
        # A firewall for bridges would swallow this; who is reached refuses it at once.
        probe = (
            "import socket\ntry: socket.create_connection(({!r}, {}), 5)\nexcept ConnectionRefusedError: pass"
        )
        code = probe.format(self.addresses[0], PROBE_PORT)
        _ip("netns", "exec", self.namespace(self.count - 1), sys.executable, "-S", "-c", code)

    def _link(self, number: int) -> str:
        return f"rp{self.label}-{number}"


def free_subnet() -> str:
    """A network that this machine has no route to.

    Raises:
        NotAllowed: there is no `ip` command, or all are taken.
    """
    routes = _ip("-4", "route", "show", "table", "all")
    taken = [
        ipaddress.ip_network(found, strict=False)
        for found in re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?", routes)
    ]
    for subnet in SUBNETS.subnets(new_prefix=24):
        if not any(subnet.overlaps(other) for other in taken):
            return str(subnet)
    raise NotAllowed(f"every network in {SUBNETS} is taken")


def _ip(*arguments: str) -> str:
    if shutil.which("ip") is None:
        raise NotAllowed("there is no `ip` command (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise NotAllowed("network namespaces are for root")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NotAllowed(f"ip {' '.join(arguments[:3])}: {said[-1]}")
    return done.stdout


def _try(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=False)
