"""What is refused before it is sent, and how a job's end becomes an exit status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from raypfl.cluster import submit
from raypfl.errors import ConfigError, PlacementError

STORED = "storage_path=/shared/runs"


@pytest.fixture
def quickstart(repository: Path) -> Path:
    return repository / "configs" / "quickstart.yaml"


class Cluster:
    """Stands in for a cluster: one job that prints and ends."""

    def __init__(self, status: JobStatus, code: int | None, *, breaks: bool = False) -> None:
        self.status, self.code, self.breaks = status, code, breaks
        self.asked = 0
        self.sent: dict[str, Any] = {}

    def submit_job(self, **job: Any) -> str:
        self.sent = job
        return "job-1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        yield "round 1\n"
        if self.breaks:
            raise RuntimeError("connection closed")
        yield "round 2\n"

    def get_job_info(self, job: str) -> Any:
        self.asked += 1
        status = JobStatus.RUNNING if self.asked == 1 else self.status
        return SimpleNamespace(status=status, driver_exit_code=self.code, message="said", submission_id=job)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (JobStatus.SUCCEEDED, 0, 0),
        (JobStatus.FAILED, 2, 2),
        (JobStatus.FAILED, 137, 137),
        (JobStatus.FAILED, None, 1),
        (JobStatus.FAILED, 0, 1),
        (JobStatus.STOPPED, None, 130),
    ],
)
def test_the_exit_status_is_the_jobs(
    status: JobStatus,
    code: int | None,
    expected: int,
    quickstart: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster(status, code)
    monkeypatch.setattr(submit, "connect", lambda address: cluster)
    monkeypatch.setenv("RAYPFL_ALLOW_IMPORTS", "mine")
    monkeypatch.setattr(submit, "POLL_SECONDS", 0)
    arguments = ["--working-dir", str(repository), "--env", "A=b=c", "--pip", "pkg", str(quickstart), STORED]
    assert submit.main(arguments) == expected
    assert cluster.sent["entrypoint"] == (
        "python -m raypfl run configs/quickstart.yaml storage_path=/shared/runs engine.name=ray"
    )
    assert cluster.sent["runtime_env"]["working_dir"] == str(repository)
    assert cluster.sent["runtime_env"]["env_vars"] == {"A": "b=c", "RAYPFL_ALLOW_IMPORTS": "mine"}
    assert cluster.sent["runtime_env"]["pip"] == ["pkg"]
    told = capsys.readouterr()
    assert told.out.endswith("round 1\nround 2\n")
    assert ("said" in told.err) == (status is JobStatus.FAILED and code is None)
    assert ("ended by signal 9 " in told.err) == (code == 137)


def test_output_that_breaks_off_does_not_end_the_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "POLL_SECONDS", 0)
    assert submit.follow(Cluster(JobStatus.SUCCEEDED, 0, breaks=True), "job-1") == 0
    assert "broke off: connection closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "storage_path = runs is relative to the job's folder"),
        ([STORED, "engine.name=local"], "engine.name = local: would use one process"),
        ([STORED, "round=3"], "round: unknown key"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused_here(
    overrides: list[str], told: str, quickstart: Path, repository: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        submit.entrypoint(quickstart, overrides, repository)


def test_a_configuration_that_would_not_travel_is_refused(quickstart: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lies outside of"):
        submit.entrypoint(quickstart, [STORED], tmp_path)


def test_a_run_goes_on_as_another_job() -> None:
    told = submit.resuming("/shared/runs/a run", ["rounds=9"])
    assert told == "python -m raypfl resume '/shared/runs/a run' rounds=9"
    with pytest.raises(ConfigError, match="runs/a is relative to the job's folder"):
        submit.resuming("runs/a", [])
    assert submit.resuming("s3://bucket/runs/a", []).endswith(" s3://bucket/runs/a")


def test_nobody_there() -> None:
    with pytest.raises(PlacementError, match=r"no Ray dashboard answers at http://127\.0\.0\.1:1 "):
        submit.connect("http://127.0.0.1:1")


def test_a_variable_without_a_value(repository: Path, quickstart: Path) -> None:
    with pytest.raises(ConfigError, match="--env A: write it as KEY=VALUE"):
        submit.main(["--working-dir", str(repository), "--env", "A", str(quickstart), STORED])
