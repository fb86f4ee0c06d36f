"""The command line: reads arguments, calls the library, turns errors into a message and an exit status."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from raypfl.engine.heap import keep_freed_memory
from raypfl.errors import RaypflError

USER_ERROR = 2
INTERRUPTED = 130


class _Commands(TyperGroup):
    """Commands whose expected errors end in a message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RaypflError as error:
            if ctx.params["traceback"]:
                raise
            _stop(f"{type(error).__name__}: {error}", USER_ERROR)
        except KeyboardInterrupt:
            if ctx.params["traceback"]:
                raise
            _stop("Interrupted.", INTERRUPTED)


class _Bench(TyperGroup):
    """`raypfl bench mlp` is `raypfl bench rounds mlp`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["rounds", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(cls=_Bench)
app.add_typer(
    bench_app, name="bench", help="Time rounds beside a plain PyTorch loop, or methods beside FedAvg."
)

Config = Annotated[str, typer.Argument(help="A YAML file, such as configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Changes as key=value: partition.alpha=0.1 method.name=fedavg seed=[1,2,3]"),
]
AllowImports = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE",
        help="A package of which the configuration may name models; also RAYPFL_ALLOW_IMPORTS=one,two.",
    ),
]


Runs = Annotated[list[str], typer.Argument(help="Folders that runs printed, such as runs/NAME.")]


class At(str, Enum):
    """Which round `raypfl compare` takes."""

    best = "best"
    last = "last"


class Topic(str, Enum):
    """What `raypfl list` can list."""

    methods = "methods"
    datasets = "datasets"
    partitions = "partitions"
    topologies = "topologies"
    models = "models"


class Profile(str, Enum):
    """How `raypfl paper` runs a table."""

    full = "full"
    small = "small"


@app.callback()
def _raypfl(
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar="RAYPFL_TRACEBACK", help="Show where an error came from.")
    ] = False,
) -> None:
    """Personalised federated learning, simulated on a laptop or a Ray cluster."""


@app.command()
def run(config: Config, overrides: Overrides = None, allow_imports: AllowImports = None) -> None:
    """Run every method with every seed of a configuration."""
    from raypfl import experiment
    from raypfl.console import console_for

    with console_for() as console:
        experiment.run(config, overrides or [], console=console, allow_imports=allow_imports or [])


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The folder or address of a run, or of an experiment.")],
    overrides: Overrides = None,
    allow_imports: AllowImports = None,
) -> None:
    """Go on with an interrupted run from its last checkpoint."""
    from raypfl import experiment
    from raypfl.console import console_for

    with console_for() as console:
        experiment.resume(run, overrides or [], console=console, allow_imports=allow_imports or [])


@app.command()
def sweep(
    config: Annotated[
        Path, typer.Argument(help="A sweep, such as configs/sweeps/fedpac_lambda.yaml, or its folder.")
    ],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with trials that have not ended.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: run failed trials again.")
    ] = False,
    allow_imports: AllowImports = None,
) -> None:
    """Run every trial of a space of configurations, several at once, and choose the best."""
    from raypfl.console import console_for
    from raypfl.sweep import session

    with console_for() as console:
        session.run(
            config,
            overrides or [],
            resume=resume,
            retry_failed=retry_failed,
            allow_imports=allow_imports or [],
            console=console,
        )


@app.command()
def plan(config: Config, overrides: Overrides = None, allow_imports: AllowImports = None) -> None:
    """Print and check what a run, or a sweep, would need: actors, GPU shares, memory, bytes and time."""
    from raypfl import experiment
    from raypfl.sweep.reading import is_sweep

    if is_sweep(config):
        from raypfl.sweep import planning

        typer.echo(planning.plan(config, overrides or [], allow_imports=allow_imports or []))
    else:
        typer.echo(experiment.plan(config, overrides or [], allow_imports=allow_imports or []))


@app.command()
def scale(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in the folder that is there; measure what is missing.")
    ] = False,
) -> None:
    """Measure rounds as clients, hosts, cohorts and models grow: a file with a section `scale`."""
    from raypfl import scaling
    from raypfl.console import console_for

    with console_for() as console:
        scaling.run(config, overrides or [], resume=resume, console=console)


@app.command()
def compare(
    runs: Runs,
    reference: Annotated[
        str | None, typer.Option(help="Method or row that differences are taken to; the best if none.")
    ] = None,
    at: Annotated[At, typer.Option(help="Which round: the best, or the last evaluated.")] = At.best,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also other data or partitions, without differences then.")
    ] = False,
) -> None:
    """Rank runs, with differences that are paired by client and seed."""
    from raypfl.console import console_for
    from raypfl.report.comparison import compare

    found = compare(*runs, reference=reference, at=at.value, anyway=anyway)
    with console_for() as console:
        console.table(found.grid)
        for note in found.notes:
            console.note(f"Note: {note}")


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="Folder; RUN/report if none, of the first run.")] = None,
) -> None:
    """Write a page with all pictures and tables, index.html, and each picture as a PNG."""
    from raypfl.report.page import write

    page = write(runs, out)
    typer.echo(f"{page.path}: {len(page.pictures)} pictures, each also as PNG beside it.")
    for remark in page.missing:
        typer.echo(f"Not in it: {remark}")


@app.command()
def paper(
    name: Annotated[str | None, typer.Argument(help="A table or figure; without one all are listed.")] = None,
    profile: Annotated[
        Profile, typer.Option(help="The paper's setting, or one for two cores.")
    ] = Profile.full,
    only: Annotated[list[str] | None, typer.Option(help="Cells, as 'ROW/COLUMN' or 'ROW/*'.")] = None,
    data: Annotated[Path | None, typer.Option(envvar="RAYPFL_DATA", help="Folder of the data files.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the tables.")] = Path("runs/paper"),
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run, and how long.")] = False,
) -> None:
    """Run a table or figure of a paper, as far as it was not run yet, and show it beside the printed one."""
    from raypfl import paper as papers
    from raypfl.console import console_for

    if name is None:
        tables = papers.known()
        for key, table in tables.items():
            typer.echo(f"{key:<{max(map(len, tables))}}  {table.title}")
        return
    with console_for() as console:
        chosen: papers.Profile = "small" if profile is Profile.small else "full"
        papers.reproduce(name, chosen, only=only or (), folder=data, out=out, dry=plan, console=console)


@app.command("new-method")
def new_method(
    name: Annotated[str, typer.Argument(help="What configurations call it, such as fedprox.")],
    folder: Annotated[Path, typer.Option(help="Where its package is written.")] = Path("."),
) -> None:
    """Write a package with a method of your own: FedAvg to begin with, held to every method's contract."""
    from raypfl.scaffold import new_method

    for path in new_method(name, folder):
        typer.echo(path)
    typer.echo(f"Next: pip install -e {folder / name}, then pytest {folder / name}")


@bench_app.command("rounds")
def bench_rounds(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="mlp, mlp-10, lenet5, lenet5-10, resnet8, resnet18; all if none."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each contender.")] = 7,
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs instead of the workload's.")] = None,
    clients: Annotated[int | None, typer.Option(min=2, help="Clients instead of the workload's.")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Without Ray, in processor time: ratios hold on a busy machine.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few clients, one epoch: does it run?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.parquet, .json and .png.")] = None,
) -> None:
    """Time a round in turn with a plain PyTorch loop on all cores of this machine (what no name means)."""
    from raypfl import bench
    from raypfl.console import console_for

    workloads = bench.chosen(names or [], epochs=epochs, clients=clients, quick=quick)
    with console_for() as console:
        bench.run(workloads, rounds, console=console, local=local, out=out)


@bench_app.command("methods")
def bench_methods(
    workload: Annotated[str, typer.Option(help="What they train on: mlp or lenet5.")] = "mlp",
    methods: Annotated[str, typer.Option(help="Names, with commas between them; all if none.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each method.")] = 7,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Few clients, one epoch: does it run?")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.parquet and bench.json.")] = None,
) -> None:
    """Time every method's local update, server and evaluation, each beside a round of FedAvg."""
    from raypfl import bench
    from raypfl.bench.methods import entries
    from raypfl.console import console_for

    (setting,) = bench.chosen([workload], epochs=None if quick else epochs, quick=quick)
    wanted = entries(name.strip() for name in methods.split(",") if name.strip())
    with console_for() as console:
        bench.run_methods(setting, wanted, rounds, console=console, out=out)


@bench_app.command("sweep")
def bench_sweep(
    config: Annotated[Path, typer.Argument(help="A sweep; its trials are run twice a turn.")],
    overrides: Overrides = None,
    turns: Annotated[int, typer.Option(min=1, help="How often each is timed.")] = 1,
) -> None:
    """Time a sweep beside the same trials one after another in one process."""
    from raypfl.console import console_for
    from raypfl.sweep import bench as sweep_bench

    with console_for() as console:
        sweep_bench.run(config, overrides or [], turns, console)


@app.command("list")
def list_(topic: Annotated[Topic, typer.Argument(help="What to list.")]) -> None:
    """List what can stand under a `name` key, with one line on each."""
    descriptions = _descriptions(topic)
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        typer.echo(f"{name:<{width}}  {description}")


def main() -> None:
    """The `raypfl` command."""
    keep_freed_memory()
    app()


def _descriptions(topic: Topic) -> dict[str, str]:
    from raypfl import plugins
    from raypfl.data import PARTITIONS, SOURCES
    from raypfl.methods import METHODS
    from raypfl.models import MODELS
    from raypfl.topology import TOPOLOGIES

    added = plugins.install()
    tables = {
        Topic.datasets: SOURCES,
        Topic.partitions: PARTITIONS,
        Topic.models: MODELS,
        Topic.topologies: TOPOLOGIES,
    }
    broken = added[plugins.GROUP_OF[topic.value]].broken if topic.value in plugins.GROUP_OF else {}
    if topic is Topic.methods:
        return {name: method.summary for name, method in METHODS.items()} | broken
    return {**tables[topic], **broken}


def _stop(message: str, status: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(status)
