"""UA-PDFL's toys: how far apart a few models' answers to one constant input are, round by round."""

# N clients, P columns, E pairs.

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from raypfl import data
from raypfl.algebra import jensen_shannon
from raypfl.console import Console
from raypfl.engine.local import LocalEngine
from raypfl.engine.world import make_world
from raypfl.errors import RaypflError
from raypfl.methods.ua_pdfl_answers import answers
from raypfl.paper.cells import Cell, cells
from raypfl.paper.definition import Definition, Profile
from raypfl.paper.measure import over_seeds
from raypfl.paper.report import Line
from raypfl.records.files import replacing
from raypfl.settings import RunConfig

ACCURACY = "accuracy"
"""Column of the smallest test accuracy of all clients."""
ONES = 1.0
"""X_u, the unit input."""


class Trace(NamedTuple):
    """One run: pairs as `D(1,2)`, clients counted from 1 as in the paper, and a row a round."""

    columns: tuple[str, ...]
    rounds: list[tuple[float, ...]]

    def last(self, column: str) -> float:
        """The value after the last round."""
        return self.rounds[-1][self.columns.index(column)]


def trace(config: RunConfig, console: Console) -> Trace:
    """Train, and after every round compare the clients' answers to the unit input.

    Args:
        config: the run; its method keeps a model `w` of each client.
        console: told of every round.
    """
    pool = data.load(config.data, config.seed)
    world = make_world(config, pool, data.partition(config.partition, pool, config.seed))
    pairs = list(combinations(range(world.num_clients), 2))
    receivers_E, sources_E = torch.tensor(pairs).T
    rounds: list[tuple[float, ...]] = []
    with closing(LocalEngine(world, pool)) as engine:
        (host,) = engine.hosts
        for round in range(1, config.rounds + 1):
            report = engine.round(round, evaluate_pre=False, evaluate_post=True)
            tests = [block for block in report.clients if block["split"] == "test"]
            accuracy = min(float(min(block["accuracy"])) for block in tests)
            w_NP = torch.cat([state.w for _, state in sorted(host.state.items())])
            log_u_NO = answers(host.net, w_NP, ONES).u.double()
            divergence_E = jensen_shannon(log_u_NO, receivers_E, sources_E)
            rounds.append((accuracy, *divergence_E.tolist()))
            shown = " ".join(f"{value:.2f}" for value in divergence_E.tolist())
            console.note(f"round {round}: smallest accuracy {accuracy:.2%}, divergences {shown}")
    return Trace((ACCURACY, *(f"D({i + 1},{j + 1})" for i, j in pairs)), rounds)


def toy_lines(
    table: Definition, profile: Profile, only: Sequence[str], folder: Path | None, out: Path, console: Console
) -> list[Line]:
    """A line for each pair, over seeds; traces are kept as files, and read again where they are there."""
    lines = []
    for cell in cells(table, profile, only=only, folder=folder):
        traces, failure = _traces(cell, out, console)
        remarks = (*cell.remarks, *failure)
        values = [one.last(cell.row) for one in traces]
        lines.append(Line(cell.row, cell.column, cell.printed, over_seeds(values), remarks))
    return lines


def _traces(cell: Cell, out: Path, console: Console) -> tuple[list[Trace], tuple[str, ...]]:
    found: list[Trace] = []
    for name, config in cell.runs.items():
        path = out / "traces" / f"{name}.csv"
        if not path.is_file():
            try:
                done = trace(config, console)
            except RaypflError as error:
                return found, (str(error).partition("\n")[0],)
            _write(path, done)
        found.append(_read(path))
    return found, ()


def _write(path: Path, done: Trace) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("round", *done.columns))
        writer.writerows((number, *values) for number, values in enumerate(done.rounds, 1))


def _read(path: Path) -> Trace:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return Trace(tuple(header[1:]), [tuple(map(float, row[1:])) for row in rows])
