import numpy as np
import pytest

from raypfl.errors import StorageError
from raypfl.records.folder import RunFolder
from raypfl.records.metrics import SERVER, Metrics
from raypfl.records.ranking import ranked_table, write_summary
from raypfl.records.summary import summarise


def run(path, accuracy, *, method="fedamp", seed=0, validation=None, reported=("personalised", "post")):
    """Two clients with 1 and 3 samples; `accuracy[t - 1]` are theirs in round t, None if not evaluated."""
    folder = RunFolder.create(path.parent, path.name)
    metrics = Metrics(folder.metrics, method=method, seed=seed, reported=reported)
    for round, values in enumerate(accuracy, start=1):
        splits = {"test": values, "validation": validation[round - 1] if validation else None}
        metrics.add_round(
            round,
            clients=[
                {
                    "round": round,
                    "client": [0, 1],
                    "point": "post",
                    "model": "personalised",
                    "split": split,
                    "accuracy": found,
                    "loss": 1.0,
                    "samples": [1, 3],
                    "participant": True,
                }
                for split, found in splits.items()
                if found is not None
            ],
            traffic=[
                {"src": [0, 1], "dst": SERVER, "kind": "model", "values": 500, "bytes": 2000},
                {"src": SERVER, "dst": 0, "kind": "model", "values": 500, "bytes": 2000},
            ],
            participants=2,
            round_seconds=0.5,
            server_seconds=0.125,
            evaluation_seconds=0.25,
        )
    metrics.flush(force=True)
    return folder


def test_figures_by_hand(tmp_path):
    folder = run(tmp_path / "run", [(0.2, 0.4), (0.5, 0.9), None, (0.9, 0.5), (0.6, 0.6)])
    summary = summarise(folder)
    assert (summary.run, summary.method, summary.seed, summary.rounds) == ("run", "fedamp", 0, 5)
    assert summary.reported == "personalised/post"
    assert list(summary.figures) == ["personalised/post"]

    figures = summary.figures["personalised/post"]
    assert figures.best.round == 2  # as good as round 4, and earlier
    assert figures.best.mean == pytest.approx(0.7)
    assert figures.best.weighted == pytest.approx((0.5 + 3 * 0.9) / 4)
    assert figures.best.sd == pytest.approx(0.2)
    assert figures.best.worst_decile == pytest.approx(0.5)
    assert figures.validated is None
    assert (figures.last.round, figures.last.mean) == (5, pytest.approx(0.6))
    assert figures.last_ten_mean == pytest.approx((0.3 + 0.7 + 0.7 + 0.6) / 4)
    assert figures.evaluations == 4


def test_totals_count_each_round_once_evaluated_or_not(tmp_path):
    summary = summarise(run(tmp_path / "run", [(0.5, 0.5), None, (0.5, 0.5)], validation=[(1, 1)] * 3))
    assert (summary.upload_bytes, summary.download_bytes) == (3 * 4000, 3 * 2000)
    assert (summary.round_seconds, summary.server_seconds, summary.evaluation_seconds) == (1.5, 0.375, 0.75)


def test_last_ten_are_the_last_ten_evaluated(tmp_path):
    accuracy = [(t / 100, t / 100) if t % 2 else None for t in range(1, 25)]  # evaluated: 1, 3, ..., 23
    figures = summarise(run(tmp_path / "run", accuracy)).figures["personalised/post"]
    assert figures.evaluations == 12
    assert figures.last_ten_mean == pytest.approx(sum(range(5, 24, 2)) / 10 / 100)


def test_validation_chooses_the_round_and_test_gives_the_figure(tmp_path):
    test = [(0.9, 0.9), (0.3, 0.5), (0.6, 0.6)]
    validation = [(0.1, 0.1), (0.8, 0.8), (0.7, 0.7)]
    figures = summarise(run(tmp_path / "run", test, validation=validation)).figures["personalised/post"]
    assert (figures.validated.round, figures.validated.mean) == (2, pytest.approx(0.4))
    assert (figures.best.round, figures.best.mean) == (1, pytest.approx(0.9))


def test_a_run_that_has_just_begun(tmp_path):
    summary = summarise(run(tmp_path / "run", []))
    assert (summary.rounds, summary.figures, summary.upload_bytes) == (0, {}, 0)
    (row,) = ranked_table([summary]).rows
    assert row[:5] == ("fedamp", "personalised, post", "1", "-", "-")


def test_no_tables(tmp_path):
    with pytest.raises(StorageError, match=r"rounds\.parquet"):
        summarise(RunFolder.create(tmp_path, "run"))


def test_summary_file_says_what_was_chosen_on_what(tmp_path):
    folder = run(tmp_path / "run", [(0.2, 0.4), (0.5, 0.9)], validation=[(0.6, 0.6), (0.5, 0.5)])
    write_summary(folder.summary, summarise(folder))
    lines = folder.summary.read_text().splitlines()
    name = "| personalised, post (reported) "
    assert lines[0] == "# fedamp, seed 0"
    assert "2 rounds in 1.0 s" in lines[2]
    assert "8.0 kB up, 4.0 kB down" in lines[2]
    assert lines[6:10] == [
        name + "| best round, chosen on validation | 1 | 30.00 | 35.00 | 10.00 | 20.00 |",
        name + "| best round, chosen on test, as the papers report | 2 | 70.00 | 80.00 | 20.00 | 50.00 |",
        name + "| last evaluated round | 2 | 70.00 | 80.00 | 20.00 | 50.00 |",
        name + "| mean of the last 2 evaluated |  | 50.00 |  |  |  |",
    ]


def ranked(*folders):
    grid = ranked_table([summarise(folder) for folder in folders])
    return grid, [dict(zip(grid.header, row, strict=True)) for row in grid.rows]


def test_seeds_share_a_row_and_the_best_comes_first(tmp_path):
    grid, rows = ranked(
        run(tmp_path / "a", [(0.5, 0.7)], method="local"),
        run(tmp_path / "b", [(0.6, 0.8)], seed=1),
        run(tmp_path / "c", [(0.8, 0.9), (0.6, 0.6)], seed=2),
        run(tmp_path / "d", [], method="fedavg", reported=("global", "pre")),
    )
    assert [row["method"] for row in rows] == ["fedamp", "local", "fedavg"]
    assert rows[0] == {
        "method": "fedamp",
        "model, point": "personalised, post",
        "seeds": "2",
        "accuracy": "77.50",
        "sd": "7.50",
        "sd seeds": f"{100 * np.std([0.7, 0.85], ddof=1):.2f}",
        "worst decile": "70.00",
        "last ten": f"{100 * (0.7 + (0.85 + 0.6) / 2) / 2:.2f}",
        "up": "6.0 kB",
        "down": "3.0 kB",
        "seconds": "0.8",
    }
    assert (rows[1]["seeds"], rows[1]["sd seeds"]) == ("1", "-")
    assert "chosen on test, as the papers report" in grid.note


def test_runs_are_compared_on_validation_only_if_all_have_it(tmp_path):
    validation = [(0.8, 0.8), (0.7, 0.7)]
    first = run(tmp_path / "a", [(0.3, 0.3), (0.9, 0.9)], method="local", validation=validation)
    second = run(tmp_path / "b", [(0.5, 0.5), (0.6, 0.6)], validation=validation)
    third = run(tmp_path / "c", [(0.1, 0.1)], method="fedavg")

    grid, rows = ranked(first, second)
    assert [(row["method"], row["accuracy"]) for row in rows] == [("fedamp", "50.00"), ("local", "30.00")]
    assert "chosen on validation" in grid.note
    grid, rows = ranked(first, second, third)
    assert [row["accuracy"] for row in rows] == ["90.00", "60.00", "10.00"]
    assert "chosen on test" in grid.note


def test_variants_of_one_method_are_not_taken_for_seeds(tmp_path):
    _, rows = ranked(run(tmp_path / "tau-1", [(0.5, 0.5)]), run(tmp_path / "tau-2", [(0.6, 0.6)]))
    assert [(row["method"], row["seeds"]) for row in rows] == [("tau-2", "1"), ("tau-1", "1")]
