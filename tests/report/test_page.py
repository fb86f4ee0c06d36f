"""The page of a report: what is on it, and that a browser shows it, also small and without a network."""

import re
from pathlib import Path

import chromium
import numpy as np
import pytest
from made import made_run
from typer.testing import CliRunner

from raypfl.cli import app
from raypfl.errors import StorageError
from raypfl.report import clients, curves, partition, resources
from raypfl.report.page import write
from raypfl.result import Result

RISING = ((0.5, 0.6, 0.7, 0.8), (0.6, 0.7, 0.8, 0.9))
TAGS = re.compile(r"<img [^>]*>")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    """Four settings, one of them with matrices, one without a server, one that is not complete."""
    folder = tmp_path_factory.mktemp("experiment")
    weights = np.linspace(-0.5, 0.5, 16).reshape(4, 4)
    for seed in (0, 1):
        common = {"seed": seed, "accuracy": RISING}
        made_run(
            folder,
            f"diversifed-{seed}",
            method="diversifed",
            pairs={"coefficient": weights, "distance": np.abs(weights)},
            **common,
        )
        made_run(folder, f"fedamp-{seed}", method="fedamp", **common)
    peers = [{"src": [0, 1, 1], "dst": [1, 0, 2], "kind": "full", "values": 10, "bytes": 40}]
    made_run(folder, "peers", method="peer_fedavg", traffic=peers, accuracy=RISING)
    made_run(folder, "begun<&>", method="a_method_of_ones_own_with_a_long_name", accuracy=RISING, rounds=9)
    return folder


@pytest.fixture(scope="module")
def page(experiment, tmp_path_factory):
    return write([experiment], tmp_path_factory.mktemp("page") / "out")


def test_every_picture_is_on_the_page_and_beside_it(page):
    text = page.path.read_text()
    tags = TAGS.findall(text)
    assert len(tags) == len(page.pictures) > 10
    assert all('src="data:image/png;base64,' in tag for tag in tags)
    assert all(len(re.search(r'alt="([^"]*)"', tag)[1]) > 20 for tag in tags)
    names = [picture.name for picture in page.pictures]
    assert len(set(names)) == len(names)
    assert {f"{name}.png" for name in names} == {path.name for path in page.path.parent.glob("*.png")}
    wanted = "accuracy worst-decile loss-test loss-train clients partition-1 diversifed-coefficient"
    wanted += " diversifed-distances peer_fedavg-heard accuracy-by-bytes busiest-node seconds"
    assert set(wanted.split()) <= set(names)


def test_what_is_missing_is_said_with_the_way_to_it(page):
    missing = " ".join(page.missing)
    assert "who collaborates with whom over rounds (fedamp, peer_fedavg)" in missing
    assert "evaluation.diagnostics=true" in missing
    assert "bands over seeds (" in missing and "seed=[0,1,2]" in missing
    assert "partition.validation_fraction" in missing
    text = page.path.read_text()
    assert "is at round 2 of 9" in text and "raypfl resume" in text


def test_names_are_text_and_not_markup(page):
    text = page.path.read_text()
    assert "begun&lt;&amp;&gt;" in text and "begun<&>" not in text


def test_configuration_and_environment_are_there(page):
    text = page.path.read_text()
    assert "name: diversifed" in text and "<summary>config.yaml of diversifed-0</summary>" in text
    assert ">torch</th>" in text and ">2.9</td>" in text


@pytest.fixture
def curves_only(monkeypatch):
    """Fewer pictures, for tests of what is around them."""
    for module, name in (
        *((curves, name) for name in ("worst_decile", "loss")),
        *((resources, name) for name in ("traffic", "seconds")),
        (clients, "distribution"),
        (partition, "bubbles"),
    ):
        monkeypatch.setattr(module, name, lambda groups: [])


def test_of_one_run_all_figures_are_shown(tmp_path, curves_only):
    made_run(tmp_path, "alone", accuracy=RISING)
    path = Result(tmp_path / "alone").report()
    assert path == tmp_path / "alone" / "report" / "index.html"
    assert "mean of the last 2 evaluated" in path.read_text()


def test_pictures_of_an_earlier_report_do_not_stay(tmp_path, curves_only):
    made_run(tmp_path, "a", accuracy=RISING)
    made_run(tmp_path, "b", method="local", view=("global", "pre"), accuracy=RISING)
    out = tmp_path / "out"
    write([tmp_path / "a", tmp_path / "b"], out)
    assert (out / "accuracy-global-pre.png").is_file()
    (out / "notes.png").write_bytes(b"mine")
    write([tmp_path / "a"], out)
    assert not (out / "accuracy-global-pre.png").exists()
    assert (out / "notes.png").read_bytes() == b"mine"


def test_a_report_is_not_written_over_a_run(tmp_path):
    made_run(tmp_path, "a")
    with pytest.raises(StorageError, match="is the folder of a run"):
        write([tmp_path / "a"], tmp_path / "a")


def test_a_run_that_was_never_evaluated_still_has_a_page(tmp_path):
    nobody = ((np.nan, np.nan),)
    made_run(tmp_path, "a", accuracy=nobody)
    made_run(tmp_path, "b", method="local", accuracy=RISING)
    assert write([tmp_path]).pictures


def test_a_run_that_has_just_begun_is_shown_as_far_as_it_has_got(tmp_path):
    made_run(tmp_path, "begun", accuracy=(), rounds=5)
    found = write([tmp_path])
    assert "begun is at round 0 of 5" in found.path.read_text()
    # Its data are all that there is to see.
    assert [picture.name for picture in found.pictures] == ["partition-1"]


def test_runs_of_other_data_are_shown_with_a_warning(tmp_path, curves_only):
    made_run(tmp_path, "a", partition="1" * 64)
    made_run(tmp_path, "b", method="local")
    text = write([tmp_path]).path.read_text()
    assert "have different samples" in text and "No differences are given." in text


def test_the_command(tmp_path, curves_only):
    made_run(tmp_path, "a")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'out' / 'index.html'}: ")
    assert "Not in it: bands over seeds" in done.stdout


@pytest.fixture(scope="module")
def tab():
    program = chromium.found()
    if program is None:
        pytest.skip("needs Chromium or Chrome: none of " + ", ".join(chromium.NAMES) + " is installed")
    with chromium.browser(program) as found:
        yield found


@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_a_browser_shows_it(page, tab, width):
    seen = tab.open(page.path, width=width)
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith("data:")] == [page.path.as_uri()]
    pictures = tab.evaluate(
        "[...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.clientWidth, i.alt.length])"
    )
    assert len(pictures) == len(page.pictures)
    assert all(min(own[:2]) > 200 and own[2] > 300 and own[3] > 20 for own in pictures)
    # Nothing is wider than the window, so nothing has to be pushed sideways.
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    every = "[...document.body.querySelectorAll('*')]"
    # Of a table that is too wide for a window with a mouse, the table alone is moved.
    every = f"{every}.filter(e => innerWidth < 600 || !e.closest('.wide'))"
    beyond = f"{every}.filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert tab.evaluate(f"{beyond}.map(e => e.outerHTML.slice(0, 80))") == []
    texts = "[...document.querySelectorAll('p, td, li, figcaption')]"
    assert tab.evaluate(f"Math.min(...{texts}.map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 13


def test_a_complaint_of_a_page_is_seen(tab, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><title>x</title><link rel=icon href='data:,'>"
        "<img src='http://example.org/a.png'><script>console.error('oh'); undefined_name()</script>"
        "<div style='width: 2000px'>wide</div>"
    )
    seen = tab.open(bad, width=390)
    assert "http://example.org/a.png" in seen.requests
    assert any("oh" in complaint for complaint in seen.complaints)
    assert any("undefined_name" in complaint for complaint in seen.complaints)
    assert tab.evaluate("document.documentElement.scrollWidth") > 390
