"""`cluster/submit`: run a configuration as a job of a Ray cluster, and wait for it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypfl.cluster.messages import ended
from raypfl.configuration import load
from raypfl.errors import ConfigError, PlacementError
from raypfl.models.imported import ALLOW_IMPORTS
from raypfl.records.storage import is_remote

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
"""Where the dashboard is on a head node, and where `ray dashboard` and `kubectl port-forward` put it."""

EXCLUDED = ["/.git/", "/.venv/", "/runs/", "__pycache__/", "*.egg-info/", ".pytest_cache/", ".mypy_cache/"]
"""What does not travel, beside what .gitignore names."""

INTERRUPTED = 130
SIGNALLED = 128
"""What a shell adds to the number of the signal that ended a program."""

POLL_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a configuration here, send it, show the job's output, and return its exit status."""
    given = _parser().parse_args(arguments)
    working_dir = given.working_dir.expanduser().resolve()
    if given.resume:
        command = resuming(given.config, given.overrides)
    else:
        command = entrypoint(Path(given.config), given.overrides, working_dir)
    address = given.address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    runtime_env = {
        "working_dir": str(working_dir),
        "excludes": [*EXCLUDED, *given.exclude],
        # What is allowed here is allowed there.
        "env_vars": {name: os.environ[name] for name in (ALLOW_IMPORTS,) if name in os.environ}
        | _pairs(given.env),
        **({"pip": given.pip} if given.pip else {}),
    }
    client = connect(address)
    try:
        job = client.submit_job(
            entrypoint=command,
            runtime_env=runtime_env,
            submission_id=given.job,
            metadata={"config": given.config},
        )
    except (RuntimeError, ValueError) as error:
        raise PlacementError(f"{address} does not take the job: {_first_line(error)}") from None
    at = f"--address {shlex.quote(address)}"
    print(f"Job {job}: {command}", flush=True)
    if given.no_wait:
        print(f"Follow it with: ray job logs {at} --follow {job}")
        return 0
    try:
        return follow(client, job)
    except KeyboardInterrupt:
        print(
            f"\nThe job goes on. Follow it with: ray job logs {at} --follow {job}\n"
            f"Stop it with:   ray job stop {at} {job}",
            file=sys.stderr,
        )
        return INTERRUPTED


def entrypoint(config: Path, overrides: Sequence[str], working_dir: Path) -> str:
    """The job's command, once the configuration is known to be one that a cluster can run.

    Raises:
        ConfigError: it is wrong, is not on Ray, would be lost with the job, or does not travel.
    """
    engine = [] if any(change.startswith("engine.name=") for change in overrides) else ["engine.name=ray"]
    changes = [*overrides, *engine]
    settings = load(config, changes)
    if settings.engine.name != "ray":
        raise ConfigError("engine.name = local: would use one process of the cluster. Leave it out, or ray.")
    path = settings.storage_path
    if not is_remote(path) and not Path(path).expanduser().is_absolute():
        raise ConfigError(
            f"storage_path = {path} is relative to the job's folder, which is deleted when the job ends. "
            "Give a folder that every node sees, such as storage_path=/shared/runs."
        )
    inside = config.expanduser().resolve()
    if not inside.is_relative_to(working_dir):
        raise ConfigError(
            f"{config} lies outside of {working_dir}, which is what travels. Move it, or give --working-dir."
        )
    # In the cluster's own Python: the sources in the working directory, if it has some, come first there.
    return shlex.join(["python", "-m", "raypfl", "run", str(inside.relative_to(working_dir)), *changes])


def resuming(run: str, overrides: Sequence[str]) -> str:
    """The command of a job that goes on with a run; its folder is the cluster's, and is looked at there.

    Raises:
        ConfigError: it would be looked for in the job's own folder.
    """
    if not is_remote(run) and not Path(run).is_absolute():
        raise ConfigError(
            f"{run} is relative to the job's folder. Give the run's whole path, as it printed it."
        )
    return shlex.join(["python", "-m", "raypfl", "resume", run, *overrides])


def connect(address: str) -> Any:
    """A client of the dashboard at `address`.

    Raises:
        PlacementError: nobody answers there, or it asks for a token that is not here.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise PlacementError(
            f"{address} asks for its token: {_first_line(error)}. Set RAY_AUTH_MODE=token and "
            'RAY_AUTH_TOKEN_PATH to a file that has it; for a cluster on this machine: eval "$(cluster/local '
            'env)".'
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlacementError(
            f"no Ray dashboard answers at {address} ({_first_line(error)}). Give --address or set "
            "RAY_API_SERVER_ADDRESS; `ray dashboard CLUSTER.yaml` and `kubectl port-forward` bring one here."
        ) from None


def follow(client: Any, job: str) -> int:
    """Show what a job prints until it ends; its exit status."""
    try:
        asyncio.run(_show(client, job))
    except (ConnectionError, RuntimeError) as error:
        print(f"(Its output broke off: {_first_line(error)}. Waiting for its end.)", file=sys.stderr)
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_SECONDS)
    return exit_status(info)


def exit_status(info: Any) -> int:
    """0 for a job that succeeded, its own status for one that failed, 130 for one that was stopped."""
    status = str(info.status.value)
    print(f"Job {info.submission_id}: {status.lower()}.", file=sys.stderr)
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return INTERRUPTED
    code = info.driver_exit_code
    if code is None:
        # It never came to its command; otherwise its own output has said why.
        print(info.message, file=sys.stderr)
    elif code > SIGNALLED and code != INTERRUPTED:
        print(
            f"Its program was ended by signal {code - SIGNALLED} (9: maybe for want of memory). Go on from "
            "its last checkpoint with: cluster/submit --resume RUN, the run's whole path.",
            file=sys.stderr,
        )
    return code or 1


async def _show(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster/submit",
        description="Run a configuration as a job of a Ray cluster; exits as the job does.",
    )
    parser.add_argument("config", help="a YAML file inside the working directory")
    parser.add_argument("overrides", nargs="*", help="changes as key=value; storage_path must be absolute")
    parser.add_argument("--address", help=f"else RAY_API_SERVER_ADDRESS, else {DEFAULT_ADDRESS}")
    parser.add_argument("--working-dir", type=Path, default=Path(), help="what travels; default: this one")
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--exclude", **several, help="a pattern of what does not travel")
    parser.add_argument("--env", **several, metavar="KEY=VALUE", help="a variable of the job's processes")
    parser.add_argument("--pip", **several, help="a package to install for the job")
    parser.add_argument("--resume", action="store_true", help="go on with a run: CONFIG is its folder there")
    parser.add_argument("--job", help="the job's name; Ray makes one up by default")
    parser.add_argument("--no-wait", action="store_true", help="return when it is submitted")
    return parser


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--env {text}: write it as KEY=VALUE.")
    return dict((key, value) for key, _, value in (text.partition("=") for text in texts))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


if __name__ == "__main__":
    # What Ray has to say of packages and sockets; what matters is raised.
    logging.disable(logging.WARNING)
    sys.exit(ended(main))
