"""What a scaling study measures: a run's configuration, and which of its keys are varied.

A file is an ordinary configuration with a section `scale`. Each study varies some keys over lists of values;
every combination is one point, which is measured by itself.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator

from raypfl.config import StrictModel
from raypfl.configuration import (
    Source,
    apply_override,
    expand,
    load,
    parse_overrides,
    read_yaml,
    to_dict,
)
from raypfl.errors import ConfigError
from raypfl.explain import explain, show, suggest
from raypfl.records.storage import is_remote
from raypfl.settings import RunConfig

SECTION = "scale"

Keys = dict[str, Any]
"""Dotted keys of a run's configuration, with values."""


class Study(StrictModel):
    """Points that differ in the keys of `over` and in their case; all combinations are measured."""

    measure: Literal["rounds", "costs"] = Field(
        "rounds", description="whole rounds; or flops and seconds of one client's update and of the server's"
    )
    fixed: Keys = Field({}, description="keys of all its points")
    cases: dict[str, Keys] = Field({}, description="keys that change together, under a label of their own")
    over: dict[str, tuple[Any, ...]] = Field({}, description="values of single keys")

    @field_validator("over", mode="before")
    @classmethod
    def _dotted(cls, over: object) -> object:
        """On the command line `over.partition.num_clients=[5]` is a mapping in a mapping."""
        return dict(_flat(over)) if isinstance(over, Mapping) else over

    @field_validator("over")
    @classmethod
    def _some_values(cls, over: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in over.items():
            if not values:
                raise ValueError(f"{key} has no values.")
            if len({json.dumps(value, sort_keys=True, default=str) for value in values}) < len(values):
                raise ValueError(f"{key} has a value twice: {show(list(values))}.")
        return over

    @model_validator(mode="after")
    def _one_place_a_key(self) -> Study:
        if not (self.over or self.cases):
            raise ValueError("give over (dotted keys with lists of values) or cases, or there is one point.")
        for label, case in self.cases.items():
            if not label or any(letter.isspace() for letter in label):
                raise ValueError(f"cases: the label {label!r} must be one word.")
            twice = sorted(set(self.over) & (set(self.fixed) | set(case)))
            if twice:
                raise ValueError(f"{twice[0]} is in over and in fixed or the case {label}: leave one out.")
        twice = sorted(set(self.over) & set(self.fixed))
        if twice:
            raise ValueError(f"{twice[0]} is in over and in fixed: leave one out.")
        return self

    def combinations(self) -> Iterator[tuple[str, Keys]]:
        """What each point has of its own, in order: its settings in words, and its keys."""
        short = [key.rpartition(".")[2] for key in self.over]
        names = short if len(set(short)) == len(short) else list(self.over)
        for label, case in (self.cases or {"": {}}).items():
            for values in product(*self.over.values()):
                varied = dict(zip(self.over, values, strict=True))
                told = (f"{name}={_text(value)}" for name, value in zip(names, values, strict=True))
                words = [*([label] if label else []), *told]
                yield " ".join(words), {**self.fixed, **case, **varied}


class ScaleConfig(StrictModel):
    """The section `scale`."""

    warm_up: PositiveInt = Field(
        2, description="rounds before those that count; memory is watched in them. Round 1 may be special"
    )
    seconds: PositiveFloat = Field(
        60.0, description="no further round is begun after so many seconds of counted ones; one always is"
    )
    limit_seconds: PositiveFloat | None = Field(
        None, description="a point that takes longer than this in all is ended, and fails; null: none is"
    )
    free_memory: float = Field(
        0.05, gt=0.0, lt=1.0, description="share of the machine's memory below which a point is ended"
    )
    studies: dict[str, Study] = Field(min_length=1)
    only: tuple[str, ...] = Field((), description="studies that are measured now; none: all")

    @model_validator(mode="after")
    def _known(self) -> ScaleConfig:
        for name in self.only:
            if name not in self.studies:
                raise ValueError(f"only: there is no study {name!r}. {suggest(name, self.studies)}")
        return self


class _Section(StrictModel):
    """For messages that name the section."""

    scale: ScaleConfig


class Point(NamedTuple):
    """One size."""

    study: str
    number: int
    """In its study, from 1."""
    settings: str
    """What it has of its own, in words."""
    measure: str
    config: RunConfig

    @property
    def name(self) -> str:
        """Unique, and fit for a file's name."""
        return f"{self.study}-{self.number:03d}"


class Scaling(NamedTuple):
    """All studies of a file."""

    name: str
    """The folder's, below `storage_path`."""
    storage_path: Path
    scale: ScaleConfig
    points: tuple[Point, ...]

    @property
    def chosen(self) -> tuple[Point, ...]:
        """The points that are to be measured now."""
        only = self.scale.only
        return tuple(point for point in self.points if not only or point.study in only)

    def to_dict(self) -> dict[str, Any]:
        """Everything that is measured, in plain types."""
        points = {
            point.name: {
                "settings": point.settings,
                "measure": point.measure,
                "config": to_dict(point.config),
            }
            for point in self.points
        }
        return {"scale": self.scale.model_dump(mode="json", exclude={"studies", "only"}), "points": points}


def read(source: Source, overrides: Sequence[str] = ()) -> Scaling:
    """Read, override and check a file of studies.

    Args:
        source: a YAML file, or the same as a mapping.
        overrides: `dotted.key=value` for all points; `scale.key=value` changes the section itself.

    Raises:
        ConfigError: a key, type or value is wrong; says in which study and at which point.
    """
    where = "the configuration" if isinstance(source, Mapping) else str(source)
    base = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read_yaml(source)
    own = [text for text in overrides if text.partition("=")[0].partition(".")[0] == SECTION]
    for change in parse_overrides(own):
        apply_override(base, change)
    changes = [text for text in overrides if text not in own]
    if SECTION not in base:
        raise ConfigError(
            f"{where}: has no section {SECTION}. It says what is varied, for instance "
            f"{SECTION}: {{studies: {{clients: {{over: {{partition.num_clients: [20, 100]}}}}}}}}."
        )
    try:
        scale = _Section.model_validate({SECTION: base.pop(SECTION)}).scale
    except ValidationError as error:
        lines = explain(error, _Section).splitlines()
        raise ConfigError(f"{where}:\n" + "\n".join(f"    {line}" for line in lines)) from None
    points = tuple(_points(where, scale, base, changes))
    first = points[0].config
    if is_remote(first.storage_path):
        raise ConfigError(
            f"{where}: storage_path = {first.storage_path}: a study measures this machine and keeps its "
            "results on it. Give a folder here; the folder of a finished study can be copied anywhere."
        )
    stem = "scale" if isinstance(source, Mapping) else f"scale-{Path(where).stem}"
    return Scaling(first.name or stem, Path(first.storage_path), scale, points)


def _points(
    where: str, scale: ScaleConfig, base: Mapping[str, Any], changes: Sequence[str]
) -> Iterator[Point]:
    given = {text.partition("=")[0] for text in changes}
    for name, study in scale.studies.items():
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ConfigError(f"{where}: scale.studies: the name {name!r} is not fit for a file's name.")
        for number, (settings, keys) in enumerate(study.combinations(), 1):
            if clash := sorted(given & keys.keys()):
                raise ConfigError(
                    f"{where}: {clash[0]} is given on the command line, and study {name} has it, too. Change "
                    f"the study, for instance scale.studies.{name}.fixed={{...}}."
                )
            own = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
            try:
                runs = expand(load(base, [*changes, *own]))
            except ConfigError as error:
                text = str(error).removeprefix("the configuration:").strip()
                raise ConfigError(f"{where}: study {name}, {settings}:\n    {text}") from None
            if len(runs) > 1:
                raise ConfigError(
                    f"{where}: study {name}: a point is one method with one seed, and this is "
                    f"{', '.join(runs)}. Vary them: over: {{method.name: [fedavg, fedpac]}}, or seed."
                )
            (config,) = runs.values()
            yield Point(name, number, settings, study.measure, config)


def _flat(nested: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; of one that comes twice the last counts."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _text(value: Any) -> str:
    """A value in a label: mappings by their values alone."""
    if isinstance(value, Mapping):
        return "+".join(map(_text, value.values()))
    if isinstance(value, list | tuple):
        return "x".join(map(_text, value)) or "none"
    return str(value).replace(" ", "_")
