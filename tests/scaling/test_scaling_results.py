"""Exponents and tables of studies, from figures that a reader can recompute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_scaling_config import with_studies

from raypfl.engine.phases import PHASES
from raypfl.records.grid import markdown
from raypfl.scaling.config import Point, read
from raypfl.scaling.fit import fit, larger_half, varying
from raypfl.scaling.plots import plot
from raypfl.scaling.report import headings, tables
from raypfl.scaling.results import fits_table, groups, points_table

SIZES = [(n, p) for n in (10, 20, 50, 100) for p in (100, 1000, 5000)]


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_the_exponents_of_a_power_law_are_found() -> None:
    rows = frame(
        clients=[n for n, _ in SIZES],
        participants=[n for n, _ in SIZES],
        parameters=[p for _, p in SIZES],
        cost=[3.0 * n**2 * p**0.5 for n, p in SIZES],
    )
    assert varying(rows) == ["clients", "parameters"], "participants are as many as clients"
    found = fit(rows, "cost", ["clients", "parameters"])
    assert found is not None
    assert found.exponents == pytest.approx({"clients": 2.0, "parameters": 0.5})
    assert found.errors == pytest.approx({"clients": 0.0, "parameters": 0.0}, abs=1e-6)
    assert (found.factor, found.r_squared, found.points) == (pytest.approx(3.0), pytest.approx(1.0), 12)


def test_standard_errors_are_those_of_a_straight_line() -> None:
    """log2: x = 0, 1, 2 and y = 0, 1, 1: slope 1/2, residuals -1/6, 1/3, -1/6, error sqrt(1/6 / 2)."""
    found = fit(frame(n=[1, 2, 4], cost=[1, 2, 2]), "cost", ["n"])
    assert found is not None
    assert found.exponents["n"] == pytest.approx(0.5)
    assert found.errors["n"] == pytest.approx((1 / 12) ** 0.5)
    assert found.r_squared == pytest.approx(0.75)


def test_there_is_no_fit_without_more_points_than_unknowns() -> None:
    assert fit(frame(n=[1, 2], cost=[1, 2]), "cost", ["n"]) is None
    assert fit(frame(n=[1, 2, 4], cost=[1, 0, 2]), "cost", ["n"]) is None


def test_sizes_that_stand_still_or_grow_together_are_left_out() -> None:
    rows = frame(clients=[10, 100], participants=[1, 10], parameters=[7, 7])
    assert varying(rows) == ["clients"]
    rows = frame(clients=[100, 100, 100], participants=[1, 10, 100], parameters=[7, 7, 7])
    assert varying(rows) == ["participants"]


def test_the_larger_half_has_the_middle() -> None:
    assert larger_half(frame(n=[5, 1, 4, 2, 3]), "n").n.tolist() == [3, 4, 5]


def finished(point: Point, seconds: list[float], **facts: Any) -> tuple[Point, dict[str, Any]]:
    config = point.config
    sizes = {"clients": config.partition.num_clients, "participants": config.partition.num_clients}
    kept = {
        "method": config.method.name,
        "data": "digits",
        "model": "mlp",
        "parameters": 610,
        "hosts": config.engine.num_actors or 1,
        "gpus_per_host": 0.0,
        "device": "cpu",
        "memory_bytes": 2**30,
        "load": 1.5,
        **sizes,
        **facts,
    }
    rounds = [
        {
            "round": number,
            "seconds": value,
            "client_steps": 40.0,
            "work_seconds": value / 2,
            "server_seconds": value / 4,
            "server_cpu_seconds": value / 4,
            **{f"{name}_seconds": value / 24 for name in PHASES},
            **{f"{name}_cpu_seconds": value / 24 for name in PHASES},
            "upload_bytes": 1e6,
            "download_bytes": 2e6,
        }
        for number, value in enumerate(seconds, 3)
    ]
    environment = {"started": "now", "commit": "0123456789abcdef-dirty", "host": "here", "cpus": 2}
    return point, {"error": None, "environment": environment, "facts": kept, "rounds": rounds}


def failed(point: Point, error: str) -> tuple[Point, dict[str, Any]]:
    done = finished(point, [])[1]
    return point, {**done, "error": error, "facts": {}, "rounds": []}


@pytest.fixture
def table() -> pd.DataFrame:
    points = read(
        with_studies(
            hosts={"over": {"partition.num_clients": [10, 20, 40], "engine.num_actors": [1, 2]}},
        )
    ).points
    # Twice as many clients take four times as long; two hosts do the round in 0.8 of the time.
    seconds = [4.0**i * (1.0 if hosts == 1 else 0.8) for i in range(3) for hosts in (1, 2)]
    rows = [finished(point, [own, own * 2, own]) for point, own in zip(points, seconds, strict=True)]
    rows[-1] = failed(points[-1], "out of memory: 3 GiB\nmore")
    return points_table(rows)


def test_a_point_is_the_median_of_its_rounds(table: pd.DataFrame) -> None:
    first = table.iloc[0]
    assert (first.round_seconds, first.round_seconds_low, first.round_seconds_high) == (1.0, 1.0, 1.5)
    assert (first.rounds_per_second, first.client_steps_per_second, first.rounds) == (1.0, 40.0, 3)
    assert (first.status, first.upload_bytes) == ("done", 1e6)


def test_efficiency_is_to_the_fewest_hosts(table: pd.DataFrame) -> None:
    assert table.efficiency.tolist()[:4] == pytest.approx([1.0, 1 / 0.8 / 2] * 2)
    assert table.efficiency[4:].isna().all(), "a point that failed cannot be compared with"


def test_points_that_differ_in_more_than_sizes_are_fitted_apart(table: pd.DataFrame) -> None:
    done = table[table.status == "done"]
    assert [(name, len(rows)) for name, rows in groups(done)] == [("num_actors=1", 3), ("num_actors=2", 2)]
    fits = fits_table(table)
    assert set(fits.of) == {"num_actors=1"}, "two points are too few for the other"
    server = fits[fits.cost == "server"].iloc[0]
    assert server.exponent_N == pytest.approx(2.0)
    assert pd.isna(server.exponent_P)


def test_tables_name_what_failed_and_go_on(table: pd.DataFrame) -> None:
    study, exponents = tables(table, fits_table(table))
    assert [row[1] for row in study.rows] == ["10", "10", "20", "20", "40", "failed"]
    failure = "Failed: num_clients=40 num_actors=2: out of memory: 3 GiB"
    assert study.note.endswith(f"commit 0123456789ab-dirty.\n{failure}")
    assert {len(row) for row in study.rows} == {len(study.header)}
    assert exponents.rows[0][:5] == ("hosts", "num_actors=1", "server", "all", "2.00 ± 0.00")
    assert headings([study, exponents]) == ["hosts", "Exponents"]
    assert "| num_clients=40 num_actors=2 | failed |" in markdown(study)


def test_a_study_of_failures_has_a_table() -> None:
    points = read(with_studies(a={"over": {"partition.num_clients": [10, 20]}})).points
    table = points_table([failed(point, "too large") for point in points])
    fits = fits_table(table)
    (study,) = tables(table, fits)
    assert [row[1] for row in study.rows] == ["failed", "failed"]
    assert len(fits) == 0


def test_every_study_has_a_figure(table: pd.DataFrame, tmp_path: Path) -> None:
    paths = plot(table, tmp_path / "plots")
    assert [path.name for path in paths] == ["hosts.png"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
