"""`cluster/local`: start, watch and stop several Ray nodes on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from raypfl.cluster import local
from raypfl.cluster.messages import ended
from raypfl.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Several Ray nodes on this machine, as separate hosts.",
)

Name = Annotated[str, typer.Option(help="Tells apart several clusters on one machine.")]


class Isolation(str, Enum):
    """How nodes are kept apart."""

    auto = "auto"
    namespaces = "namespaces"
    processes = "processes"


@app.command()
def start(
    nodes: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    cpus: Annotated[str, typer.Option(help="Cores of each node, or of one after another: 2,1")] = "1",
    gpus: Annotated[str, typer.Option(help="GPUs that nodes say they have, likewise.")] = "0",
    isolation: Annotated[
        Isolation, typer.Option(help="Own networks (for root), or plain processes with own addresses.")
    ] = Isolation.auto,
    private: Annotated[
        list[Path] | None, typer.Option(help="A folder of which each node sees one of its own.")
    ] = None,
    name: Name = "local",
) -> None:
    """Start the nodes; token authentication is on, the dashboard answers on this machine only."""
    cluster = local.start(
        name,
        cpus=_each(cpus, nodes, "--cpus"),
        gpus=_each(gpus, nodes, "--gpus"),
        isolation=isolation.value,
        private=private or [],
        note=typer.echo,
    )
    _show(cluster)
    typer.echo(
        f'Send it jobs:  eval "$(cluster/local env{_named(name)})"; cluster/submit configs/quickstart.yaml '
        f"storage_path=/tmp/runs\nEnd it:        cluster/local stop{_named(name)}"
    )


@app.command()
def stop(name: Name = "local") -> None:
    """End every process of the cluster and nothing else; remove its networks and files."""
    cluster = local.load(name)
    count = sum(cluster.alive())
    cluster.stop()
    typer.echo(f"Stopped {name}: {count} processes on {len(cluster.nodes)} nodes.")


@app.command()
def status(name: Name = "local") -> None:
    """Show addresses and processes."""
    _show(local.load(name))


@app.command()
def env(name: Name = "local") -> None:
    """Print the variables that programs need to send jobs: eval "$(cluster/local env)"."""
    for key, value in local.load(name).submission_environment.items():
        typer.echo(f"export {key}={shlex.quote(value)}")


@app.command()
def kill(
    node: Annotated[int, typer.Argument(help="Its number; 0 is the head.")], name: Name = "local"
) -> None:
    """End a node at once, as a power cut would."""
    local.load(name).kill(node)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_(
    command: Annotated[list[str], typer.Argument(help="Program and arguments, after --.")],
    node: Annotated[int, typer.Option(help="On which node; 0 is the head.")] = 0,
    name: Name = "local",
) -> None:
    """Run a program on a node, joined to the cluster, as in `exec -- raypfl run CONFIG engine.name=ray`."""
    cluster = local.load(name)
    cluster.node(node)
    program = cluster.command(node, command)
    os.execvpe(program[0], program, local.job_environment(cluster))


def _show(cluster: local.Cluster) -> None:
    apart = f"networks {cluster.subnet}" if cluster.isolation == "namespaces" else "plain processes"
    typer.echo(f"{cluster.name}: {len(cluster.nodes)} nodes, {apart}, state in {cluster.folder}")
    for node, alive in zip(cluster.nodes, cluster.alive(), strict=True):
        what = f"{node.cpus} CPU" + (f" and {node.gpus} GPU" if node.gpus else "")
        pids = "gone" if not alive else f"{alive} processes below {node.keeper.pid if node.keeper else '?'}"
        typer.echo(f"  node {node.number}  {node.address}  {what}  {pids}")
    typer.echo(f"  dashboard {cluster.dashboard}, cluster {cluster.gcs}, token in {cluster.token}")


def _each(text: str, nodes: int, option: str) -> list[int]:
    """One number a node."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{option} {text}: give a whole number, or one a node with commas between them.")
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        return numbers * nodes
    if len(numbers) != nodes:
        raise ConfigError(f"{option} {text}: gives {len(numbers)} numbers for {nodes} nodes.")
    return numbers


def _named(name: str) -> str:
    return "" if name == "local" else f" --name {name}"


if __name__ == "__main__":
    sys.exit(ended(lambda: app() or 0))
