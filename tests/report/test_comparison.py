"""Runs are grouped, labelled, ranked and paired; what cannot be compared is refused, what differs is said."""

import json

import numpy as np
import pytest
from made import made_run
from scipy.stats import t
from typer.testing import CliRunner

import raypfl
from raypfl.cli import app
from raypfl.errors import ComparisonError, ConfigError, StorageError
from raypfl.report.loading import read_groups
from raypfl.result import Result

LOW = ((0.1, 0.2, 0.3, 0.4), (0.2, 0.2, 0.3, 0.5))
HIGH = ((0.3, 0.3, 0.4, 0.6), (0.2, 0.4, 0.6, 0.6))


def test_ranked_with_differences_paired_by_client(tmp_path):
    made_run(tmp_path, "low", method="local", accuracy=LOW)
    made_run(tmp_path, "high", method="fedamp", accuracy=HIGH)
    found = raypfl.compare(tmp_path)
    best, other = found.rows
    assert (best.label, other.label, found.reference) == ("fedamp", "local", "fedamp")
    assert (best.accuracy, other.accuracy) == pytest.approx((0.45, 0.3))
    assert np.isnan(best.difference) and np.isnan(best.sd_seeds)
    differences = np.array([0.2, 0.2, 0.3, 0.5]) - np.array([0.2, 0.4, 0.6, 0.6])
    half = t.ppf(0.975, 3) * differences.std(ddof=1) / 2
    assert other.difference == pytest.approx(differences.mean())
    assert (other.low, other.high) == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert (other.better, other.pairs) == (0.0, 4)
    assert other.worst_decile == pytest.approx(0.2) and other.sd_clients == pytest.approx(np.std(LOW[1]))
    # Four clients, two rounds, 100 bytes down and 80 up; a round takes two seconds.
    assert (other.bytes, other.seconds) == (1440, 4.0)
    assert found.notes == ()


def test_seeds_of_one_setting_are_one_row(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.1), (2, 0.05)):
        # Every seed deals anew, as they do unless partition.seed is set.
        partition = str(seed) * 64
        for method, rows in (("local", LOW), ("fedamp", HIGH)):
            accuracy = [[value + shift * (method == "local") for value in row] for row in rows]
            made_run(
                tmp_path, f"{method}-{seed}", method=method, seed=seed, accuracy=accuracy, partition=partition
            )
    best, other = raypfl.compare(tmp_path).rows
    assert best.seeds == other.seeds == 3
    assert other.accuracy == pytest.approx(0.35) and other.sd_seeds == pytest.approx(0.05)
    half = t.ppf(0.975, 2) * 0.05 / np.sqrt(3)
    assert (other.low, other.high) == pytest.approx((-0.1 - half, -0.1 + half))
    assert other.pairs == 12


def test_reference_and_round_can_be_chosen(tmp_path):
    made_run(tmp_path, "low", method="local", accuracy=LOW[::-1])
    made_run(tmp_path, "high", method="fedamp", accuracy=HIGH)
    found = raypfl.compare(tmp_path, reference="local", at="last")
    best, other = found.rows
    assert found.reference == "local" and np.isnan(other.difference)
    assert best.difference == pytest.approx(0.45 - 0.25)
    with pytest.raises(ConfigError, match=r"reference = 'fedanp'.*Did you mean fedamp\?"):
        raypfl.compare(tmp_path, reference="fedanp")
    with pytest.raises(ConfigError, match="at = 'first'"):
        raypfl.compare(tmp_path, at="first")


def test_best_round_is_chosen_on_validation_where_all_have_it(tmp_path):
    made_run(tmp_path, "low", method="local", accuracy=LOW, validation=(0.9, 0.1))
    made_run(tmp_path, "high", method="fedamp", accuracy=HIGH, validation=(0.1, 0.9))
    found = raypfl.compare(tmp_path)
    assert "best round on validation" in found.explanation
    assert found.rows[1].accuracy == pytest.approx(np.mean(LOW[0]))
    made_run(tmp_path, "third", method="fedavg", accuracy=LOW)
    found = raypfl.compare(tmp_path)
    assert "best round on test" in found.explanation
    assert {row.label: row.accuracy for row in found.rows}["local"] == pytest.approx(np.mean(LOW[1]))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"partition": "1" * 64},
            r"seed 0, the clients of these runs have different samples: .*\(a\).*\(b\)",
        ),
        ({"data": "e" * 64}, r"different data sets: dddddddd \(a\); eeeeeeee \(b\)"),
    ],
)
def test_other_data_are_refused(tmp_path, other, message):
    made_run(tmp_path, "a", method="local", accuracy=LOW)
    made_run(tmp_path, "b", method="fedamp", accuracy=HIGH, **other)
    with pytest.raises(ComparisonError, match=message):
        raypfl.compare(tmp_path)
    found = raypfl.compare(tmp_path, anyway=True)
    assert [row.label for row in found.rows] == ["fedamp", "local"]
    assert all(np.isnan(row.difference) for row in found.rows)
    assert "No differences are given." in found.notes[0]


def test_what_differs_in_the_protocol_is_said(tmp_path):
    more = {"training": {"epochs": 5}, "rounds": 9}
    made_run(tmp_path, "a", method="local", accuracy=LOW, config=more, seed=1)
    made_run(tmp_path, "b", method="fedavg", view=("global", "pre"), config={"training": {"epochs": 2}})
    made_run(tmp_path, "c", method="fedamp", config={"training": {"epochs": 2}}, seed=1)
    notes = " ".join(raypfl.compare(tmp_path).notes)
    assert "evaluated as each paper does: global, pre (fedavg); personalised, post (fedamp, local)." in notes
    assert "training.epochs differs: 2 (fedavg, fedamp); 5 (local)." in notes
    assert "rounds: 2 (fedavg, fedamp); 2 of 9 (local)." in notes
    assert "seeds differ: 0 (fedavg); 1 (fedamp, local)." in notes


def test_labels_say_in_what_runs_of_one_method_differ(tmp_path):
    for number, tau in enumerate((0.5, 0.9)):
        options = {"method": {"name": "diversifed", "tau": tau, "eta": 1.0}}
        for seed in (0, 1):
            made_run(tmp_path, f"{number}-{seed}", method="diversifed", seed=seed, config=options)
    made_run(tmp_path, "fed", method="fedavg", config={"evaluation": {"diagnostics": True}})
    groups = read_groups([tmp_path])
    assert {group.label for group in groups} == {"diversifed tau=0.5", "diversifed tau=0.9", "fedavg"}
    assert {group.label: group.seeds for group in groups}["diversifed tau=0.9"] == (0, 1)


def test_the_same_setting_twice_is_told_apart_by_folders(tmp_path):
    for parent in ("monday", "tuesday"):
        made_run(tmp_path / parent, "fedavg", method="fedavg")
    labels = [group.label for group in read_groups([tmp_path / "monday", tmp_path / "tuesday"])]
    assert sorted(labels) == ["monday/fedavg", "tuesday/fedavg"]
    # One folder that is given twice is one run.
    assert len(read_groups([tmp_path / "monday", tmp_path / "monday" / "fedavg"])[0].runs) == 1


def test_a_part_that_some_do_not_have_is_one_difference(tmp_path):
    graph = {"topology": {"name": "ring", "weights": "uniform", "lazy": 0.0}}
    made_run(tmp_path, "a", method="local", config={"topology": None})
    made_run(tmp_path, "b", method="local", config=graph, seed=1)
    assert {group.label for group in read_groups([tmp_path])} == {"local", "local topology=ring"}


def test_clients_that_only_one_run_has_evaluated_are_left_out(tmp_path):
    made_run(tmp_path, "a", method="local", accuracy=((0.2, 0.4),))
    made_run(tmp_path, "b", method="fedamp", accuracy=((0.5, 0.5, 0.9),))
    other = raypfl.compare(tmp_path).rows[1]
    assert other.pairs == 2 and other.difference == pytest.approx(-0.2)


def test_shown_as_text_html_and_frame(tmp_path):
    made_run(tmp_path, "a", method="local", accuracy=LOW)
    made_run(tmp_path, "b", method="fedamp", accuracy=HIGH, rounds=7)
    result = Result(tmp_path)
    found = result.compare()
    assert repr(found).splitlines()[2].startswith("fedamp  personalised, post      1     45.00")
    assert "Note: rounds: 2 of 7 (fedamp); 2 (local)." in repr(found)
    page = found._repr_html_()
    assert page.startswith("<table>") and "<li>rounds: 2 of 7 (fedamp); 2 (local).</li>" in page
    assert found.frame.set_index("label").loc["local", "accuracy"] == pytest.approx(0.3)
    assert json.loads(found.frame.to_json())["label"] == {"0": "fedamp", "1": "local"}


def test_the_command(tmp_path):
    made_run(tmp_path, "a", method="local", accuracy=LOW)
    made_run(tmp_path, "b", method="fedamp", accuracy=HIGH, partition="1" * 64)
    done = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert done.exit_code == 2 and done.stderr.startswith("ComparisonError: With seed 0")
    done = CliRunner().invoke(app, ["compare", str(tmp_path), "--anyway", "--at", "last"])
    assert done.exit_code == 0, done.output
    assert "last evaluated round" in done.stdout and "Note: With seed 0" in done.stdout


@pytest.mark.parametrize("command", ["compare", "report"])
def test_what_is_no_run_is_said(tmp_path, command):
    done = CliRunner().invoke(app, [command, str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"StorageError: {tmp_path / 'nowhere'} is not a run")
    assert "Traceback" not in done.output


def test_no_run_at_all():
    with pytest.raises(StorageError, match="no run was given"):
        raypfl.compare()
