"""Small whole runs for tests, and what it means that two of them are the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import stumbling
import torch
import yaml

from raypfl import data
from raypfl.configuration import expand, load, to_yaml
from raypfl.console import Console
from raypfl.data import Pool
from raypfl.engine.contract import Engine
from raypfl.engine.driver import Driver
from raypfl.engine.faults import Patience, Tolerance
from raypfl.engine.host import stored_type
from raypfl.engine.world import World, make_world
from raypfl.methods import METHODS
from raypfl.records import checkpoints
from raypfl.records.files import write_text
from raypfl.records.folder import RunFolder
from raypfl.records.metrics import Metrics
from raypfl.records.storage import Place, Remote
from raypfl.result import Result

PlaceT = TypeVar("PlaceT", Path, Remote)

NUM_CLIENTS = 4
STEPS_A_ROUND = 8
"""Training steps of all clients: 4 clients with 2 batches each."""

CONFIG: Mapping[str, Any] = {
    "rounds": 6,
    "seed": 3,
    "method": {"name": "fedamp"},
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": NUM_CLIENTS,
        "alpha": 1.0,
        "train_size": 20,
        "test_size": 10,
        "when_short": "replace",
    },
    "model": {"name": "stumbling:Net", "head": "head"},
    "training": {"epochs": 1, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "topology": {"name": "full", "weights": "uniform"},
    "evaluation": {"diagnostics": True},
    "engine": {"block": 1, "width": 1},
    "checkpoint": {"every": 2},
}
"""A block a client, so that up to 4 hosts can share them."""

STOPPING = "Stopping after this round, with a checkpoint; Ctrl-C again stops at once.\n"

IN_ROUND_4 = 3 * STEPS_A_ROUND + 3
"""Training steps after which a run is in the middle of round 4, two rounds after its checkpoint."""


def small_world(*overrides: str, method: str = "fedamp") -> tuple[World, Pool]:
    """What engines are made of."""
    options = {"name": method, **METHODS[method].needed}
    if method == "criticalfl":
        # It draws whom it pulls from; the others take any graph.
        options["topology"] = {"name": "kout", "k": 2}
    (config,) = expand(load({**CONFIG, "method": options}, overrides)).values()
    pool = data.load(config.data, config.seed)
    return make_world(config, pool, data.partition(config.partition, pool, config.seed)), pool


def drive(
    world: World,
    engine: Engine,
    path: PlaceT,
    console: Console | None = None,
    *,
    away: Mapping[int, Mapping[int, str]] | None = None,
    patience: Patience | None = None,
) -> PlaceT:
    """A run from its first round to its last on an engine at hand; its folder.

    Clients that are `away` in a round, with a reason, are left out of it.
    """
    folder = RunFolder.create(path.parent, path.name)
    write_text(folder.config, to_yaml(world.config))
    name, reported = world.config.method.name, METHODS[world.config.method.name].reported
    metrics = Metrics(folder.metrics, method=name, seed=world.config.seed, reported=reported)
    Driver(
        world,
        engine,
        folder,
        metrics,
        console or Console(),
        done=0,
        reported=reported,
        tolerance=Tolerance(world.config.faults, away),
        patience=patience,
    ).run()
    return path


@contextmanager
def begun(
    tmp_path: Path, *overrides: str, after: int, folder: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """`raypfl run` in a process of its own that blocks after so many training steps; process, run, claim.

    `folder` is where processes that it does not start are asked to stumble.
    """
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(CONFIG)))
    stumbling.ask(folder or tmp_path, "block", after)
    command = [sys.executable, "-c", "from raypfl.cli import main; main()", "run", "config.yaml", "name=run"]
    process = subprocess.Popen(
        [*command, f"storage_path={tmp_path}", *overrides],
        cwd=tmp_path,
        env=os.environ | stumbling.environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, tmp_path / "run", claim_of(process, folder or tmp_path)
    finally:
        process.kill()
        process.communicate()


def claim_of(process: subprocess.Popen[str], folder: Path) -> Path:
    """The claim of whoever stumbles, waited for as long as a process runs."""
    while process.poll() is None:
        with suppress(TimeoutError):
            return stumbling.claimed(folder, seconds=1.0)
    raise AssertionError(f"it ended before anybody stumbled: {process.communicate()}")


def last_state(run: Place, method: str) -> tuple[int, dict[str, torch.Tensor]]:
    """The round of the last checkpoint, and every tensor in it by name."""
    folder = checkpoints.latest(run / "checkpoints")
    assert folder is not None
    with checkpoints.at_hand(folder, of_clients=False) as here:
        hub = checkpoints.read_hub(here, METHODS[method].hub_type, METHODS[method].columns)
    with checkpoints.at_hand(folder, of_clients=True) as here:
        stored = stored_type(METHODS[method].state_type)
        rows = checkpoints.read_rows(here, torch.arange(NUM_CLIENTS), stored)
    named = {f"hub.{name}": tensor for name, tensor in hub._asdict().items()}
    named |= {f"state.{name}": tensor for name, tensor in rows._asdict().items()}
    return checkpoints.read_manifest(folder).round, named


def assert_same_run(left: Place, right: Place, method: str = "fedamp") -> None:
    """Records (but for seconds) and final tensors, bit for bit."""
    for table in ("clients", "rounds", "traffic", "diagnostics", "pairs", "dropped"):
        frames = [getattr(Result(path), table)() for path in (left, right)]
        kept = [name for name in frames[0].columns if name != "run" and not name.endswith("_seconds")]
        pd.testing.assert_frame_equal(frames[0][kept], frames[1][kept], check_exact=True, obj=table)
    (round_left, state_left), (round_right, state_right) = last_state(left, method), last_state(right, method)
    assert round_left == round_right
    assert state_left.keys() == state_right.keys()
    for name, tensor in state_left.items():
        assert torch.equal(tensor, state_right[name]), name


def wait_until_ended(pid: int, seconds: float = 120.0) -> None:
    """Until a process is gone, or waits for a parent that may never come to read its status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise TimeoutError(f"process {pid} is still there after {seconds} s")
