"""What a run ran on: versions, machine, threads, commit, command line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
from pydantic import JsonValue

PACKAGES = ("raypfl", "torchvision", "numpy", "pyarrow", "ray")


def environment() -> dict[str, JsonValue]:
    """Describe this process and machine, for `environment.json`.

    Versions are read from the installed packages' metadata, so nothing (Ray above all) is imported for it.
    """
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "python": platform.python_version(),
        # torch itself says for which device it was built; its package does not always.
        "packages": {"torch": str(torch.__version__), **{name: _version(name) for name in PACKAGES}},
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(source: Path) -> str | None:
    """Commit of the source tree, "-dirty" if it was changed; None for an installed package."""
    # Without this check, a virtual environment inside some other repository would report that one's commit.
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
