"""One page that shows runs: tables, pictures, settings, and what they lack; it needs no network.

Beside the page lies each picture as a PNG file. Nothing but the folder `out` is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from raypfl.errors import StorageError
from raypfl.records.files import storage_errors, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.grid import Grid
from raypfl.records.ranking import figures_table
from raypfl.records.storage import Place, place
from raypfl.report import clients, collaboration, curves, partition, resources
from raypfl.report.comparison import Comparison, compare_groups
from raypfl.report.loading import Group, Run, differing_options, has_validation, read_groups
from raypfl.report.picture import Picture

INDEX = "index.html"
FOLDER = "report"
"""Inside the folder of the runs."""
MOST_IN_TITLE = 4


class Text(NamedTuple):
    """Something to unfold."""

    title: str
    content: str


class Section(NamedTuple):
    """A part of the page."""

    name: str
    title: str
    tables: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    texts: tuple[Text, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.tables or self.notes or self.pictures or self.texts)


class Page(NamedTuple):
    """What was written."""

    path: Place
    pictures: tuple[Picture, ...]
    missing: tuple[str, ...]
    """What the runs do not have, and how to get it."""


def write(runs: Iterable[str | Place], out: str | Place | None = None) -> Page:
    """Write the page of some runs and its pictures.

    Args:
        runs: folders of runs, or of several runs each.
        out: the folder to write to; `report` in the first of `runs` if None. Files of an earlier report there
            are replaced.

    Raises:
        StorageError: a folder is none of a run, or `out` cannot be written.
    """
    runs = list(runs)
    groups = read_groups(runs)
    folder = place(out) if out is not None else RunFolder.open(runs[0]).path / FOLDER
    if (folder / "config.yaml").exists():
        raise StorageError(
            f"{folder} is the folder of a run. Give --out another one, such as {folder}/report."
        )
    comparison = compare_groups(groups, anyway=True)
    missing = lacking(groups)
    sections = [section for section in _sections(groups, comparison, missing) if not section.is_empty]
    pictures = tuple(picture for section in sections for picture in section.pictures)
    with storage_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
        for before in _pictures_of(folder):
            before.unlink(missing_ok=True)
    for picture in pictures:
        picture.save(folder / f"{picture.name}.png")
    # Last: a page that is there has its pictures.
    write_text(folder / INDEX, render(groups, sections))
    return Page(folder / INDEX, pictures, tuple(missing))


def render(groups: Sequence[Group], sections: Sequence[Section]) -> str:
    """The page as HTML."""
    template = files("raypfl.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["breakable"] = _breakable
    runs = [run for group in groups for run in group.runs]
    labels = [group.label for group in groups]
    data = sorted({str(run.config.get("data", {}).get("name", "unknown data")) for run in runs})
    names = ", ".join(labels[:MOST_IN_TITLE])
    more = f" and {len(labels) - MOST_IN_TITLE} more" if len(labels) > MOST_IN_TITLE else ""
    started = sorted({str(run.environment["started"])[:10] for run in runs if "started" in run.environment})
    when = f", {' to '.join(dict.fromkeys((started[0], started[-1])))}" if started else ""
    return environment.from_string(template).render(
        title=f"{names}{more} on {', '.join(data)}",
        subtitle=f"{len(runs)} runs of {len(groups)} settings{when}",
        warnings=_unfinished(groups),
        sections=sections,
    )


def lacking(groups: Sequence[Group]) -> list[str]:
    """What the runs do not have that a report could show, and how to get it."""
    # Only here: it needs torch, which takes longer to load than most of the rest.
    from raypfl.methods import METHODS, Method

    runs = [run for group in groups for run in group.runs]
    found = []
    silent = [
        group.label
        for group in groups
        if (method := METHODS.get(group.method)) is not None
        and (method.relations, method.own_relations) != (Method.relations, Method.own_relations)
        and not any(len(run.pairs) for run in group.runs)
    ]
    if silent:
        found.append(
            f"who collaborates with whom over rounds ({', '.join(silent)}): run with "
            "evaluation.diagnostics=true."
        )
    single = [group.label for group in groups if len(group.runs) == 1]
    if single:
        found.append(f"bands over seeds ({', '.join(single)}): run with several, such as seed=[0,1,2].")
    if not has_validation(groups):
        found.append(
            "best rounds chosen on validation data: run with partition.validation_fraction=0.2; "
            "until then they are chosen on test data."
        )
    if not any(run.config.get("clock") for run in runs):
        found.append("virtual time: run with a clock, such as configs/clock/stragglers.yaml has.")
    unseen = [run.name for run in runs if not run.folder.partition_table.is_file()]
    if unseen:
        found.append(f"who has which samples ({', '.join(unseen)}): partition.csv is not in these folders.")
    return found


def _sections(groups: Sequence[Group], comparison: Comparison, missing: Sequence[str]) -> tuple[Section, ...]:
    ranking = (comparison.grid,) if len(groups) > 1 else ()
    figures = tuple(figures_table(run.summary) for run in groups[0].runs) if len(groups) == 1 else ()
    return (
        Section("ranking", "Figures", (*ranking, *figures), comparison.notes if ranking else ()),
        Section(
            "curves",
            "Over rounds",
            pictures=(*curves.accuracy(groups), *curves.worst_decile(groups), *curves.loss(groups)),
        ),
        Section("clients", "Clients", pictures=tuple(clients.distribution(groups))),
        Section("partition", "Data of clients", pictures=tuple(partition.bubbles(groups))),
        Section(
            "collaboration",
            "Collaboration",
            pictures=(
                *collaboration.matrices(groups),
                *collaboration.distances(groups),
                *collaboration.heard(groups),
            ),
        ),
        Section("traffic", "Traffic", pictures=tuple(resources.traffic(groups))),
        Section("time", "Time", pictures=(*resources.seconds(groups), *resources.virtual_time(groups))),
        Section("settings", "Settings", _settings(groups), texts=_configurations(groups)),
        Section("environment", "Environment", (_environment(groups),)),
        Section("missing", "What these runs do not have", notes=tuple(missing)),
    )


def _breakable(text: str) -> Markup:
    """Text whose long names may go on in a new line after an underscore, a slash or a sign."""
    return Markup(re.sub("([_/=.])", r"\1<wbr>", str(escape(text))))


def _settings(groups: Sequence[Group]) -> tuple[Grid, ...]:
    """What differs between the settings."""
    options = differing_options([group.runs[0].options for group in groups])
    rows = tuple(
        (group.label, ", ".join(f"{key}: {value}" for key, value in sorted(own.items())) or "-")
        for group, own in zip(groups, options, strict=True)
    )
    note = "All other keys are the same."
    return (Grid(("setting", "what it differs in"), rows, words=2, note=note),) if len(groups) > 1 else ()


def _configurations(groups: Sequence[Group]) -> tuple[Text, ...]:
    return tuple(
        Text(f"config.yaml of {run.name}", yaml.safe_dump(dict(run.config), sort_keys=False))
        for run in (group.runs[0] for group in groups)
    )


def _environment(groups: Sequence[Group]) -> Grid:
    """What the runs ran on; a value that is not the same for all is listed with its runs."""
    runs = [run for group in groups for run in group.runs]
    facts = [_facts(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for own in facts for key in own):
        values: dict[str, list[str]] = {}
        for run, own in zip(runs, facts, strict=True):
            values.setdefault(own.get(key, "not recorded"), []).append(run.name)
        if len(values) == 1:
            rows.append((key, *values))
        elif len(values) <= MOST_IN_TITLE:
            rows.append((key, "; ".join(f"{value} ({', '.join(names)})" for value, names in values.items())))
        else:
            rows.append((key, f"{len(values)} different ones, see environment.json of each run"))
    return Grid(("what", "value"), tuple(rows), words=2)


def _facts(run: Run) -> dict[str, str]:
    found: dict[str, str] = {}
    known: Mapping[str, Any] = run.environment
    for key, value in known.items():
        if key == "packages":
            found |= {name: str(version) for name, version in value.items()}
        elif key == "command":
            found[key] = " ".join(value)
        else:
            found[key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _unfinished(groups: Sequence[Group]) -> list[str]:
    """Runs that have not got to their last round."""
    return [
        f"{run.name} is at round {run.summary.rounds} of {run.wanted_rounds}: the page shows it as far as it "
        f"has got. If it no longer runs, go on with: raypfl resume {run.folder.path}"
        for group in groups
        for run in group.runs
        if run.summary.rounds < run.wanted_rounds
    ]


def _pictures_of(folder: Place) -> list[Place]:
    """The pictures of an earlier report in a folder: those that its page shows."""
    index = folder / INDEX
    if not index.is_file():
        return []
    page = index.read_text(encoding="utf-8")
    every: Iterable[Place] = folder.glob("*.png")
    return [path for path in every if f'<figure id="{path.name.removesuffix(".png")}">' in page]
