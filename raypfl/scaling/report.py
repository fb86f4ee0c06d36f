"""Tables of a study, for the console and for `summary.md`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from rich.filesize import decimal

from raypfl.engine.phases import PHASES
from raypfl.records.grid import Grid
from raypfl.scaling.fit import SIZES

SHOWN_COSTS = ("server", "server_cpu", "distances_cpu", "qp_cpu", "mixing_cpu", "messages_cpu", "other_cpu")
"""Fits that are worth a line; the others are in `fits.parquet`."""

SMALL_SHARE = 0.05
"""A phase that takes less of the server's processor time at a study's largest point has no line."""


def tables(table: pd.DataFrame, fits: pd.DataFrame) -> list[Grid]:
    """All tables: one a study, the exponents, and costs where they were measured."""
    rounds, costs = (table[table.measure == kind] for kind in ("rounds", "costs"))
    grids = [_study(name, own) for name, own in rounds.groupby("study", sort=False)]
    grids += [_costs(name, own) for name, own in costs.groupby("study", sort=False)]
    if len(fits):
        grids.append(_fits(fits, table))
    return grids


def _study(name: str, rows: pd.DataFrame) -> Grid:
    phases = [
        phase for phase in PHASES if f"{phase}_seconds" in rows and (rows[f"{phase}_seconds"] > 0).any()
    ]
    efficient = rows.efficiency.notna().any()
    header = (
        name,
        "N",
        "S",
        "P",
        "hosts",
        "rounds/s",
        "client steps/s",
        "hosts s",
        "server s",
        *(f"{phase} s" for phase in phases),
        "MB a round",
        "memory",
        *(["efficiency"] if efficient else []),
    )

    def line(row: pd.Series) -> tuple[str, ...]:
        if row.status == "failed":
            return (row.settings, "failed", *[""] * (len(header) - 2))
        traffic = (row.upload_bytes + row.download_bytes) / 1e6
        return (
            row.settings,
            *(f"{int(row[size]):,}" for size in SIZES),
            f"{int(row.hosts)}",
            _number(row.rounds_per_second),
            _number(row.client_steps_per_second),
            _number(row.work_seconds),
            _number(row.server_seconds),
            *(_number(row[f"{phase}_seconds"]) for phase in phases),
            _number(traffic),
            decimal(int(row.memory_bytes)),
            *([_number(row.efficiency)] if efficient else []),
        )

    return Grid(header, tuple(line(row) for _, row in rows.iterrows()), note=_conditions(rows))


def _conditions(rows: pd.DataFrame) -> str:
    done = rows[rows.status == "done"]
    if not len(done):
        return _failures(rows)
    least, most = int(done.rounds.min()), int(done.rounds.max())
    counted = f"{least}" if least == most else f"{least} to {most}"
    what = ", ".join(_all_of(done[name]) for name in ("method", "data", "model"))
    commits = done.commit.fillna("none").str.replace(r"^(.{12})[0-9a-f]*", r"\1", regex=True)
    return (
        f"{what} on {_all_of(done.device)}: medians of {counted} rounds without evaluation. N clients, "
        "S participants a round, P parameters. Memory: all processes at their peak, shared parts once. "
        f"{_all_of(done.host)}, {_all_of(done.cpus)} CPUs, load before a point {done.load.min():.1f} to "
        f"{done.load.max():.1f}, commit {_all_of(commits)}.{_failures(rows)}"
    )


def _failures(rows: pd.DataFrame) -> str:
    """A line for each point that could not be measured."""
    failed = rows[rows.status == "failed"]
    return "".join(f"\nFailed: {row.settings}: {_first_line(row.error)}" for _, row in failed.iterrows())


def _costs(name: str, rows: pd.DataFrame) -> Grid:
    header = (
        name,
        "P",
        "m",
        "client flops: formula",
        "counted",
        "client s (CPU)",
        "server flops: formula",
        "counted",
        "server s (CPU)",
        "server/client: formula %",
        "counted %",
        "CPU %",
    )

    def line(row: pd.Series) -> tuple[str, ...]:
        if row.status == "failed":
            return (row.settings, "failed", *[""] * (len(header) - 2))
        formula = row.server_flops_formula
        return (
            row.settings,
            f"{int(row.parameters):,}",
            f"{int(row.participants)}",
            _flops(row.client_flops_formula),
            _flops(row.client_flops),
            f"{_number(row.client_seconds)} ({_number(row.client_cpu_seconds)})",
            _flops(formula),
            _flops(row.server_flops),
            f"{_number(row.server_seconds)} ({_number(row.server_cpu_seconds)})",
            _number(100 * formula / row.client_flops_formula),
            _number(100 * row.server_flops / row.client_flops),
            _number(100 * row.server_cpu_seconds / row.client_cpu_seconds),
        )

    note = (
        "One client's update and the server's part of one round. Formula: three times the forward pass "
        "(matrix products and convolutions); for the server 3/2 m^2 P, as in the paper's Table VIII. "
        "Counted: torch's counter on what is done. The server works in float64, clients in float32. CPU: "
        "processor time."
    )
    return Grid(header, tuple(line(row) for _, row in rows.iterrows()), note=note + _failures(rows))


def _fits(fits: pd.DataFrame, table: pd.DataFrame) -> Grid:
    shown = fits[fits.cost.isin(SHOWN_COSTS)]
    shown = shown[[_matters(row, table) for _, row in shown.iterrows()]]
    names = [name for name in SIZES.values() if shown[f"exponent_{name}"].notna().any()]
    header = ("study", "of", "server's cost", "points", *(f"exponent of {name}" for name in names), "R2", "n")

    def exponent(row: pd.Series, name: str) -> str:
        value, error = row[f"exponent_{name}"], row[f"error_{name}"]
        return "" if pd.isna(value) else f"{value:.2f} ± {error:.2f}"

    rows = tuple(
        (
            row.study,
            row.of,
            row.cost.replace("_cpu", ", CPU"),
            row.part,
            *(exponent(row, name) for name in names),
            f"{row.r_squared:.3f}",
            f"{int(row.points)}",
        )
        for _, row in shown.iterrows()
    )
    note = (
        "Least squares on logarithms of medians, with standard errors: cost = c N^a S^b P^d over the sizes "
        "that vary by themselves (where everybody takes part in every round, S is N). CPU: processor time of "
        "the server, which other work on the machine disturbs least."
    )
    return Grid(header, rows, words=4, note=note)


def _matters(row: pd.Series, table: pd.DataFrame) -> bool:
    """Whether a phase takes a part of the server's time that is worth a line."""
    if row.cost.startswith("server"):
        return True
    own = table[(table.study == row.study) & (table.status == "done")]
    largest = own.loc[own.server_cpu_seconds.idxmax()]
    return bool(largest[f"{row.cost}_seconds"] >= SMALL_SHARE * largest.server_cpu_seconds)


def _all_of(values: pd.Series) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def _flops(value: float) -> str:
    """As the paper prints them."""
    if math.isnan(value):
        return ""
    return f"{value / 1e9:.2f}G" if value >= 1e9 else f"{value / 1e6:.2f}M"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def headings(grids: Sequence[Grid]) -> list[str]:
    """A title for each table: its study, or what it is about."""
    return [grid.header[0] if grid.words == 1 else "Exponents" for grid in grids]
