"""Run, resume and plan experiments: from a configuration to folders of results."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from raypfl.configuration import Source, expand, load, to_dict, to_yaml
from raypfl.console import Console
from raypfl.engine import planning
from raypfl.engine.planning import describe, settle
from raypfl.errors import (
    DataError,
    DivergedError,
    PartitionError,
    RaypflError,
    StorageError,
)
from raypfl.notebook import console_of_caller
from raypfl.records.files import storage_errors, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.manifest import check_same
from raypfl.records.storage import Place, place
from raypfl.result import Result
from raypfl.settings import ExperimentConfig, RunConfig
from raypfl.watch import check_installed
from raypfl.workshop import Workshop

EXPERIMENT = "experiment.yaml"
"""In the folder of several runs: the configuration of all of them."""


def run(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    console: Console | None = None,
    allow_imports: Collection[str] = (),
) -> Result:
    """Run every method with every seed of a configuration.

    Args:
        config: a YAML file, or the same as a mapping.
        overrides: `dotted.key=value`, the value in YAML.
        console: what shows the progress; by default a bar in a notebook, and nothing elsewhere.
        allow_imports: packages of which a configuration file may name models.

    Returns:
        The results: one run, or several below one folder.

    Raises:
        RaypflError: with what is wrong, where, and what to do; nothing is overwritten or lost.
    """
    settings = load(config, overrides, allow_imports=allow_imports)
    check_installed(settings.watch)
    runs = expand(settings)
    with Workshop(console or console_of_caller()) as workshop:
        # What can be known to fail fails before there is a folder.
        for one in {one.seed: one for one in runs.values()}.values():
            settle(workshop.world_of(one))
        top = RunFolder.create(settings.storage_path, settings.name or _name(settings))
        if len(runs) > 1:
            write_text(top.path / EXPERIMENT, to_yaml(settings))
        for number, (label, one) in enumerate(runs.items(), 1):
            folder = top if len(runs) == 1 else RunFolder.create(top.path, label)
            workshop.work(folder, one, label, number, len(runs))
        return workshop.finish(top)


def resume(
    path: str | Place,
    overrides: Sequence[str] = (),
    *,
    console: Console | None = None,
    allow_imports: Collection[str] = (),
) -> Result:
    """Continue a run, or all runs of an experiment, to the same bits as if nothing had happened.

    Args:
        path: the folder that the run printed, or its address on other storage.
        overrides: keys that change no number: `rounds` (to go on longer), engine, resources, checkpoints.
        console: what shows the progress; by default a bar in a notebook, and nothing elsewhere.
        allow_imports: packages of which its configuration may name models.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another configuration.
        StorageError: there is no run at `path`.
    """
    top = RunFolder(place(path))
    with storage_errors(top.path, "read"):
        several = (top.path / EXPERIMENT).is_file()
        recorded = top.path / EXPERIMENT if several else top.config
        there = recorded.is_file()
    if not there:
        raise StorageError(
            f"{top.path} is not a run: it has no config.yaml. Give the folder that the run printed."
        )
    before = load(recorded, allow_imports=allow_imports)
    settings = load(recorded, overrides, allow_imports=allow_imports)
    check_installed(settings.watch)
    runs = expand(settings)
    # One run is compared as it was saved, without the lists that several have of methods and seeds.
    then, now = (before, settings) if several else (*expand(before).values(), *runs.values())
    check_same(str(recorded), to_dict(then), to_dict(now))
    with Workshop(console or console_of_caller()) as workshop:
        for one in {one.seed: one for one in runs.values()}.values():
            settle(workshop.world_of(one))
        if several:
            write_text(recorded, to_yaml(settings))
        for number, (label, one) in enumerate(runs.items(), 1):
            folder = RunFolder(top.path / label) if several else top
            with storage_errors(folder.path, "create"):
                folder.path.mkdir(exist_ok=True)
            workshop.work(folder, one, label, number, len(runs))
        return workshop.finish(top)


def plan(config: Source, overrides: Sequence[str] = (), *, allow_imports: Collection[str] = ()) -> str:
    """What the runs of a configuration would need, checked against this machine or cluster.

    Raises:
        PlacementError: actors or memory do not fit, with the arithmetic.
    """
    workshop = Workshop(Console())
    texts = []
    for label, one in expand(load(config, overrides, allow_imports=allow_imports)).items():
        world = workshop.world_of(one)
        texts.append(f"{label}\n{describe(world, workshop.pool)}")
    return "\n\n".join(texts)


def finished(path: Path) -> bool:
    """Whether the run of `complete` in this folder has come to its end."""
    return RunFolder(place(path)).summary.is_file()


def complete(
    runs: Mapping[Path, RunConfig], *, console: Console | None = None
) -> Iterator[tuple[Path, RaypflError | None]]:
    """Begin runs, go on with those that were interrupted, and leave alone what is finished.

    Args:
        runs: each by its folder, which belongs to this configuration alone.
        console: what shows the progress; nothing does by default.

    Yields:
        Each folder when its run has ended, with the error if the data cannot be had or dealt as configured,
        or a model diverged; other errors are raised.
    """
    with Workshop(console or Console()) as workshop:
        for number, (path, config) in enumerate(runs.items(), 1):
            try:
                if not finished(path):
                    with storage_errors(path, "create"):
                        path.mkdir(parents=True, exist_ok=True)
                    workshop.work(RunFolder(place(path)), config, path.name, number, len(runs))
            except (DataError, PartitionError, DivergedError) as error:
                yield path, error
            else:
                yield path, None


def expected_seconds(configs: Iterable[RunConfig]) -> Iterator[float | None]:
    """Seconds of training that each run would take on one core of this machine, by an epoch of one client.

    None where the data cannot be had or dealt, or that epoch diverges.
    """
    workshop = Workshop(Console())
    for config in configs:
        try:
            world = workshop.world_of(config)
            yield planning.expected_seconds(world, workshop.pool)
        except (DataError, PartitionError, DivergedError):
            yield None


def _name(config: ExperimentConfig) -> str:
    """Method, data and time, as in `diversifed-fmnist-20250131-235959`."""
    methods = list(dict.fromkeys(method.name for method in config.method))
    what = "+".join(methods) if len(methods) <= 4 else f"{len(methods)}-methods"
    return f"{what}-{config.data.name}-{time.strftime('%Y%m%d-%H%M%S')}"
