"""The round loop on an engine of paper: what is asked of it when, and what is shown."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import drive, small_world

from raypfl.console import Console
from raypfl.engine.contract import HostsLost, RoundReport
from raypfl.errors import DivergedError, PlacementError
from raypfl.records import checkpoints
from raypfl.records.manifest import Part
from raypfl.records.metrics import Metrics
from raypfl.result import Result


class Paper:
    """An engine that does nothing but note what is asked of it; `at` says what happens in a round."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.at, self.asked = at or {}, list[str]()

    def round(
        self, round: int, *, evaluate_pre: bool, evaluate_post: bool, away: Collection[int] = ()
    ) -> RoundReport:
        points = [name for name, wanted in (("pre", evaluate_pre), ("post", evaluate_post)) if wanted]
        self.asked.append(" ".join([f"round {round}", *points]))
        self.at.pop(round, lambda: None)()
        blocks = [record(round - 1, "pre")] if evaluate_pre else []
        blocks += [record(round, "post")] if evaluate_post else []
        return RoundReport(blocks, [], {}, 2, server_seconds=0.0, evaluation_seconds=0.0, work_seconds=0.0)

    def evaluate(self, round: int) -> RoundReport:
        self.asked.append(f"evaluate {round}")
        return RoundReport(
            [record(round, "pre")], [], {}, 0, server_seconds=0.0, evaluation_seconds=0.0, work_seconds=0.0
        )

    def save(self, building: Path) -> Sequence[Part]:
        self.asked.append("save")
        return []

    def restore(self, checkpoint: Path | None) -> None:
        self.asked.append(f"restore {checkpoint.name if checkpoint else 'the start'}")

    def close(self) -> None:
        raise AssertionError("whoever made the engine closes it")


def record(round: int, point: str, accuracy: float = 0.5) -> dict[str, Any]:
    columns = {"client": np.arange(2), "accuracy": np.array([accuracy, 1.0]), "loss": 0.1, "samples": 5}
    group = {"round": round, "point": point, "model": "personalised", "split": "test"}
    return {**columns, **group, "participant": True}


def fail(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


class Listening(Console):
    def __init__(self) -> None:
        self.shown: list[tuple[int, float | None]] = []
        self.notes: list[str] = []

    def round(self, round: int, *, seconds: float, clients: int, accuracy: float | None) -> None:
        self.shown.append((round, accuracy))

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_evaluations_and_checkpoints_fall_due(tmp_path: Path) -> None:
    world, _ = small_world("rounds=5", "evaluation.every=2", "checkpoint.every=3")
    paper, console = Paper(), Listening()
    path = drive(world, paper, tmp_path / "run", console)
    assert paper.asked == [
        "round 1 pre",  # of round 0, the initial models
        "round 2 post",
        "round 3 pre",  # of round 2
        "save",
        "round 4 post",
        "round 5 pre post",  # the last round is always evaluated
        "save",
        "evaluate 5",
    ]
    assert console.shown == [(1, None), (2, 0.75), (3, None), (4, 0.75), (5, 0.75)]
    clients = Result(path).clients()
    pairs = set(zip(clients["round"], clients["point"], strict=True))
    assert pairs == {(0, "pre"), (2, "post"), (2, "pre"), (4, "post"), (4, "pre"), (5, "post"), (5, "pre")}


def test_without_pre_the_end_is_not_evaluated_again(tmp_path: Path) -> None:
    world, _ = small_world("rounds=1", "evaluation.points=[post]", "checkpoint.every=0")
    paper = Paper()
    drive(world, paper, tmp_path / "run")
    assert paper.asked[-1] == "save"


def test_a_lost_host_takes_everything_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    world, _ = small_world("rounds=4", "checkpoint.every=2")
    console = Listening()
    paper = Paper({4: fail(HostsLost("The actor died.\nAt length."))})
    path = drive(world, paper, tmp_path / "run", console)
    asked = [what.partition(" p")[0] for what in paper.asked]
    assert asked[3:] == [
        "round 3",
        "round 4",
        "restore round-000002",
        "round 3",
        "round 4",
        "save",
        "evaluate 4",
    ]
    assert console.notes == [
        "An actor was lost in round 4; replaced, and back to round 2. (The actor died.)",
    ]
    assert len(Result(path).clients().query("round == 3 and point == 'post'")) == 2, "recorded once"


def test_a_loss_before_the_first_checkpoint_goes_back_to_the_start(tmp_path: Path) -> None:
    world, _ = small_world("rounds=1")
    paper = Paper({1: fail(HostsLost("gone"))})
    drive(world, paper, tmp_path / "run")
    assert [what.partition(" p")[0] for what in paper.asked[:3]] == [
        "round 1",
        "restore the start",
        "round 1",
    ]


def test_a_loss_while_restoring_is_one_more_loss(tmp_path: Path) -> None:
    class Frail(Paper):
        def restore(self, checkpoint: Path | None) -> None:
            super().restore(checkpoint)
            if len([what for what in self.asked if what.startswith("restore")]) == 1:
                raise HostsLost("gone again")

    world, _ = small_world("rounds=1")
    console = Listening()
    paper = Frail({1: fail(HostsLost("gone"))})
    drive(world, paper, tmp_path / "run", console)
    assert [note.partition("(")[2] for note in console.notes] == ["gone)", "gone again)"]
    assert paper.asked.count("restore the start") == 2


def test_losses_without_end_are_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    class Mortal(Paper):
        def round(
            self, round: int, *, evaluate_pre: bool, evaluate_post: bool, away: Collection[int] = ()
        ) -> RoundReport:
            raise HostsLost("The actor died.\nAt length.")

    world, _ = small_world()
    mortal = Mortal()
    with pytest.raises(PlacementError) as lost:
        drive(world, mortal, tmp_path / "run")
    times = "actors were lost 4 times since round 0, the last time in round 1: The actor died."
    assert str(lost.value).startswith(times)
    assert str(lost.value).endswith(f"raypfl resume {tmp_path / 'run'}")
    assert mortal.asked == ["restore the start"] * 3


def test_divergence_names_the_last_good_checkpoint_and_keeps_the_records(tmp_path: Path) -> None:
    world, _ = small_world("checkpoint.every=2")
    with pytest.raises(DivergedError) as diverged:
        drive(world, Paper({4: fail(DivergedError("round 4: client 7."))}), tmp_path / "run")
    path = tmp_path / "run"
    assert str(diverged.value) == (
        f"round 4: client 7. Last good checkpoint: {path / 'checkpoints' / 'round-000002'}. "
        f"Records up to round 3 are kept in {path / 'metrics'}."
    )
    assert Result(path).summary["rounds"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("round", [2, 3])
def test_an_interruption_ends_the_round_and_writes_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, round: int
) -> None:
    world, _ = small_world("rounds=3", "checkpoint.every=0")
    console, path = Listening(), tmp_path / "run"
    paper = Paper({round: lambda: os.kill(os.getpid(), number)})
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        drive(world, paper, path, console)
    assert paper.asked[-1] == "save", "also in the last round: what follows it is not begun"
    latest = checkpoints.latest(path / "checkpoints")
    assert latest is not None and checkpoints.read_manifest(latest).round == round
    assert console.notes == [f"Interrupted after round {round}. Continue with: raypfl resume {path}"]
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    world, _ = small_world("rounds=1")
    seen: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    paper = Paper({1: lambda: seen.append(signal.getsignal(signal.SIGINT))})
    thread = threading.Thread(target=drive, args=(world, paper, tmp_path / "run"))
    thread.start()
    thread.join()
    assert seen == [before] and paper.asked[-1] == "evaluate 1"


def test_a_late_loss_before_the_first_checkpoint_replays_from_the_start(tmp_path: Path) -> None:
    world, _ = small_world("rounds=4", "checkpoint.every=0")
    paper = Paper({4: fail(HostsLost("gone"))})
    path = drive(world, paper, tmp_path / "run")
    assert [asked for asked in paper.asked if asked.startswith(("round 1", "restore"))] == [
        "round 1 pre post",
        "restore the start",
        "round 1 pre post",
    ]
    clients = Result(path).clients()
    assert not clients.duplicated(["round", "client", "point"]).any()
    assert set(clients["round"]) == {0, 1, 2, 3, 4}


def test_a_round_that_is_no_longer_the_last_keeps_only_what_an_undisturbed_run_has(tmp_path: Path) -> None:
    """Round 5 of 5 is evaluated; round 5 of 7 with `every=3` is not."""
    world, _ = small_world("rounds=5", "evaluation.every=3")
    path = drive(world, Paper(), tmp_path / "run")
    metrics = Metrics(path / "metrics", method="fedamp", seed=3, reported=("personalised", "post"))
    metrics.truncate(5, evaluated=False)
    assert set(Result(path).clients()["round"]) == {0, 3}
