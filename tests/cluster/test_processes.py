"""What a keeper starts cannot get away from it, and is ended with it; nobody else is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypfl.cluster import processes
from raypfl.cluster.keeper import exit_status, keep
from raypfl.cluster.processes import Process, descendants, end, process


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "300"]) as sleeping:
        yield sleeping
        sleeping.kill()


def keeper_of(command: str, folder: Path) -> Process:
    """A keeper whose command has ended with status 3."""
    keeper = keep(["sh", "-c", f"{command} exit 3"], folder)
    assert exit_status(folder, keeper, 60) == 3
    return keeper


def test_a_process_that_detaches_stays_below_its_keeper_and_ends_with_it(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    deaf = 'trap "" TERM; while :; do sleep 0.1; done'
    keeper = keeper_of(f"setsid sleep 300 & setsid sh -c '{deaf}' &", tmp_path)
    below = descendants(keeper)
    assert len(below) >= 2
    assert end(keeper, grace_seconds=0.3) == []
    assert not any(one.alive for one in (keeper, *below))
    assert bystander.poll() is None


def test_a_keeper_ends_when_nobody_is_left(tmp_path: Path) -> None:
    keeper = keeper_of("sleep 0.1 &", tmp_path)
    patience = time.monotonic() + 30
    while keeper.alive and time.monotonic() < patience:
        time.sleep(0.02)
    assert not keeper.alive


def test_those_that_were_recorded_end_also_without_their_keeper(tmp_path: Path) -> None:
    keeper = keeper_of("setsid sleep 300 &", tmp_path)
    below = descendants(keeper)
    end(keeper._replace(started=0), below, grace_seconds=0.3)
    assert len(below) == 1 and not below[0].alive


def test_who_ends_while_somebody_looks_hides_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sh", "-c", "sleep 300 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        sleeper = process(int(shell.stdout.readline()))
        look, ended = processes._stat, iter([None])

        def stat(pid: int) -> list[str] | None:
            return next(ended, look(pid)) if pid == shell.pid else look(pid)

        monkeypatch.setattr(processes, "_stat", stat)
        here = process(os.getpid())
        assert here is not None and sleeper is not None
        below = descendants(here)
        sleeper.send(signal.SIGKILL)
        shell.kill()
    assert sleeper in below


def test_a_later_process_of_the_same_number_is_left_alone(bystander: subprocess.Popen[bytes]) -> None:
    found = process(bystander.pid)
    assert found is not None and found.alive
    earlier = found._replace(started=found.started - 1)
    assert not earlier.alive
    assert end(earlier, [earlier], grace_seconds=0) == []
    assert bystander.poll() is None
