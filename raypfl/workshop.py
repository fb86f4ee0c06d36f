"""What the runs of one experiment share, and how each is begun or continued."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from raypfl import data
from raypfl.configuration import to_dict, to_yaml
from raypfl.console import Both, Console, PlainConsole, RunTitle
from raypfl.data import Pool
from raypfl.data.sources.images import ImageConfig
from raypfl.engine import driver
from raypfl.engine.contract import Engine
from raypfl.engine.faults import Tolerance
from raypfl.engine.local import LocalEngine
from raypfl.engine.supervisor import Supervisor
from raypfl.engine.world import World, is_evaluated, make_world, training_device
from raypfl.errors import CheckpointError, ConfigError
from raypfl.methods import METHODS
from raypfl.records.environment import environment
from raypfl.records.files import replacing, write_json, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.log import Ownership, run_log
from raypfl.records.manifest import Manifest, check_same
from raypfl.records.metrics import Metrics
from raypfl.records.ranking import ranked_table, write_summary
from raypfl.records.storage import place
from raypfl.records.summary import summarise
from raypfl.result import Result
from raypfl.settings import RunConfig
from raypfl.watch import RunSeen, Watcher, Watchers, watchers_of

if TYPE_CHECKING:
    from raypfl.engine.ray import Crew


class Workshop:
    """What the runs of one experiment share: the data set in memory, and a connection to Ray."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stack = ExitStack()
        self._pool: tuple[str, Pool] | None = None
        self._shared: tuple[str, tuple[Any, Any]] | None = None
        self._crew: Crew | None = None

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pool(self) -> Pool:
        """The data set of the last `world_of`."""
        assert self._pool is not None
        return self._pool[1]

    def give(self, config: RunConfig, pool: Pool) -> None:
        """Hand over the data set of a configuration, so that it is not read again."""
        self._pool = pool_key(config), pool

    def world_of(self, config: RunConfig) -> World:
        """The data set, read again only when it is another one, dealt to clients that have a model."""
        which = pool_key(config)
        if self._pool is None or self._pool[0] != which:
            self._pool = which, data.load(config.data, config.seed)
        return make_world(config, self.pool, data.partition(config.partition, self.pool, config.seed))

    def work(
        self,
        folder: RunFolder,
        config: RunConfig,
        label: str,
        number: int,
        count: int,
        supervisor: Supervisor | None = None,
    ) -> None:
        """Begin or continue one run."""
        with run_log(folder) as log:
            owner = Ownership(folder)
            checkpoint, manifest = driver.last_checkpoint(folder)
            done = 0 if manifest is None else manifest.round
            if done > config.rounds:
                raise ConfigError(
                    f"{folder.path} has {done} rounds already, and rounds = {config.rounds} asks for fewer. "
                    f"Resume with rounds={done} or more."
                )
            if done == config.rounds and folder.summary.is_file():
                self._console.note(f"{label}: complete, {done} rounds")
                return
            world = self.world_of(config)
            if manifest is not None:
                _check_unchanged(folder, manifest, world)
                world = world._replace(block=manifest.block, width=manifest.width)
            self._describe(folder, world)
            method = METHODS[config.method.name]
            metrics = Metrics(
                folder.metrics,
                method=config.method.name,
                seed=config.seed,
                reported=method.reported,
                before_write=owner.check,
            )
            metrics.truncate(done, evaluated=is_evaluated(config, done))
            model, point = method.reported
            if point not in config.evaluation.points or model not in config.evaluation.models:
                self._console.note(
                    f"{label}: evaluation leaves out what papers report of this method ({model}, {point})."
                )
            figure = f"{model}, {point}" + (" of the round before" if point == "pre" else "")
            console = Both(self._console, PlainConsole(log))
            with closing(self._engine(world)) as engine:
                within = _last_parts(folder, label)
                console.begin(RunTitle(label, config.rounds, done, figure, number, count, within))
                if checkpoint is not None:
                    engine.restore(checkpoint)
                seen = RunSeen(
                    _path_below(config, folder), str(folder.path), to_dict(config), done, method.reported
                )
                with self._watched(config, seen, console) as watchers:
                    driver.Driver(
                        world,
                        engine,
                        folder,
                        metrics,
                        console,
                        done=done,
                        reported=method.reported,
                        tolerance=Tolerance(
                            config.faults, already_dropped=0 if manifest is None else manifest.dropped
                        ),
                        supervisor=supervisor,
                        watchers=watchers,
                    ).run()
            write_summary(folder.summary, summarise(folder))

    @contextmanager
    def _watched(self, config: RunConfig, seen: RunSeen, console: Console) -> Iterator[Watchers]:
        """Those who look on at one run, from its beginning to its end."""
        chosen: dict[str, Watcher] = watchers_of(config.watch)
        if config.engine.name == "ray":
            from raypfl.engine.ray_metrics import RayMetrics

            chosen["ray"] = RayMetrics()
        watchers = Watchers(chosen, console.note)
        watchers.begin(seen)
        try:
            yield watchers
        except BaseException:
            watchers.end(failed=True)
            raise
        watchers.end(failed=False)

    def finish(self, top: RunFolder) -> Result:
        """Show the ranking and say what to type next."""
        self._console.table(ranked_table([summarise(run) for run in top.runs()]))
        python, command = _typed(sys.executable), _typed("raypfl")
        self._console.note(
            f"Results are in {top.path}. Next:\n"
            f"    {python} -c \"import raypfl; print(raypfl.Result('{top.path}').rounds())\"\n"
            f"    {command} report {top.path}\n"
            f"    {command} plan configs/diversifed/fmnist_dirichlet.yaml\n"
            f"    {command} run configs/quickstart.yaml method.name=diversifed method.tau=0.9"
        )
        return Result(top.path)

    def _describe(self, folder: RunFolder, world: World) -> None:
        """Write what the run is before it starts; a resumed run adds to it where it says more."""
        write_text(folder.config, to_yaml(world.config))
        if not folder.environment.is_file():
            settled = {
                "data": self.pool.fingerprint,
                "partition": world.federation.fingerprint,
                "block": world.block,
                "width": world.width,
                "threads": world.config.engine.threads,
            }
            write_json(folder.environment, environment() | settled)
        with replacing(folder.partition) as temporary:
            world.federation.save(temporary)
        table = io.StringIO()
        rows = csv.writer(table)
        rows.writerow(
            ["client", "split", "samples", *(f"class_{label}" for label in range(self.pool.num_classes))]
        )
        for row in world.federation.table(self.pool):
            rows.writerow([row.client, row.split, row.samples, *row.per_class])
        write_text(folder.partition_table, table.getvalue())

    def _engine(self, world: World) -> Engine:
        config = world.config
        if config.engine.name == "local":
            return LocalEngine(world, self.pool)
        # Only here, so that everything else works where Ray is not installed.
        from raypfl.engine.placement import connected, nodes_alive, place
        from raypfl.engine.ray import Crew, RayEngine, share, stored

        if self._shared is None:
            self._stack.enter_context(connected(config.engine.address))
        placement = place(world, nodes_alive())
        if self._shared is None or self._shared[0] != pool_key(config):
            which = pool_key(config)
            self._shared = which, share(self.pool)
            # This process, too, reads the copy in the object store from now on.
            self._pool = which, stored(self.pool, self._shared[1])
        if self._crew is not None and self._crew.placement != placement:
            self._crew.close()
            self._crew = None
        if self._crew is None:
            self._crew = self._stack.enter_context(closing(Crew(placement)))
        return RayEngine(world, self._shared[1], self._crew)


def pool_key(config: RunConfig) -> str:
    """What two configurations have in common that read the same data set."""
    # Images are the same for every seed; what is generated may not be.
    seed = "" if isinstance(config.data, ImageConfig) else config.seed
    return f"{config.data.model_dump_json()}/{seed}"


def _check_unchanged(folder: RunFolder, manifest: Manifest, world: World) -> None:
    """Refuse to continue with other settings, data or kind of device than the checkpoint was made with."""
    before = _completed(manifest.config)
    check_same(f"the checkpoint of round {manifest.round}", before, to_dict(world.config))
    device = training_device(world.config).type
    for what, then, now in (
        ("data", manifest.data, world.data),
        ("partition", manifest.partition, world.federation.fingerprint),
        ("device", manifest.device, device),
    ):
        if then != now:
            raise CheckpointError(
                f"{folder.path}: the {what} of its checkpoint is {then}, and is now {now}. Continue with "
                "what the run began with, or start a new run under another `name=`."
            )


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier version saved, with the defaults of options that came since."""
    try:
        return to_dict(RunConfig.model_validate(config))
    except ValidationError:
        # It has what is no option any more; the comparison says which.
        return config


def _typed(program: str) -> str:
    """What a person types to start a program of this environment, which may not be on the PATH."""
    name, here = Path(program).name, Path(sys.executable).parent
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent == here:
        return name
    try:
        return str((here / name).relative_to(Path.cwd()))
    except ValueError:
        return str(here / name)


def _path_below(config: RunConfig, folder: RunFolder) -> str:
    """A run's folder as it stands below the storage path, as in `quickstart/fedavg-seed0`."""
    return str(folder.path).removeprefix(f"{place(config.storage_path)}/")


def _last_parts(folder: RunFolder, label: str) -> str:
    """A run's folder, with that of several runs if it is one of them."""
    path = folder.path
    return f"{path.parent.name}/{path.name}" if path.name == label else path.name
