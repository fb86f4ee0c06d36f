"""What a table of a paper consists of: a file of `configs/paper` that refers to other configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

import raypfl
from raypfl.config import StrictModel
from raypfl.configuration import read_yaml
from raypfl.errors import ConfigError
from raypfl.explain import explain, suggest

Profile = Literal["full", "small"]
View = Annotated[str, Field(pattern="^(personalised|global|alternative)/(pre|post)$")]
Statistic = Annotated[
    str,
    Field(
        pattern="^((best|last|last ten)( weighted)?|best (sd|range)|gigabytes|diagnostics/[a-z_]+)$",
        description="of which evaluated round the accuracy is, in %: uniform mean over clients, or weighted "
        "by their samples; or, in the best round, sd or range over clients; or bytes of the run in GB; or "
        "the last value of a diagnostic",
    ),
]


class Part(StrictModel):
    """What a whole table, a row or a column says about its cells; a later one goes before an earlier one."""

    base: str | None = Field(None, description="configuration, below configs/")
    set: dict[str, Any] = Field({}, description="changes to it: dotted key, value")
    method: str | dict[str, Any] | None = Field(
        None, description="name, and options that differ from those that the base or `methods_from` gives"
    )
    methods: dict[str, dict[str, Any]] = Field({}, description="options of a method, where it is the cell's")
    view: View | None = Field(None, description="model/point; absent: what the method's papers report")
    statistic: Statistic | None = None
    reconstructed: str | None = Field(None, description="what of the cell the paper does not say")


class Small(Part):
    """How the small profile differs."""

    differs: str = Field(description="the same in words")
    rows: dict[str, Part] = {}
    columns: dict[str, Part] = {}
    leave_out: tuple[str, ...] = Field((), description="cells too slow for it: patterns of row/column")


class Difference(StrictModel):
    """The largest difference between two rows over columns, as a row of its own."""

    name: str
    column: str = "largest"
    rows: tuple[str, str]
    columns: tuple[str, ...] = ()


class Definition(Part):
    """A table or figure."""

    title: str
    paper: str
    table: str
    kind: Literal["runs", "cost", "divergence"] = Field(
        "runs",
        description="trained cells; counts that need no training; or pairs of models and their answers",
    )
    methods_from: tuple[str, ...] = Field((), description="more configurations with settings of methods")
    rows: dict[str, Part] = {}
    columns: dict[str, Part] = {}
    expect: str = Field("", description="what the paper says in words")
    differences: tuple[Difference, ...] = ()
    absent: str = Field("", description="why nothing of it can be run")
    small: Small | None = None

    @field_validator("rows", "columns", mode="before")
    @classmethod
    def _parts(cls, given: object) -> object:
        """A row without changes may be left empty."""
        return {key: part or {} for key, part in given.items()} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _known_cells(self) -> Definition:
        for difference in self.differences:
            for name, names in ((difference.rows, self.rows), (difference.columns, self.columns)):
                if unknown := [one for one in name if one not in names]:
                    raise ValueError(f"differences: {unknown[0]} is no row or column of this table")
        return self


def configs() -> Path:
    """The folder of the configurations: in a checkout beside the package, in a wheel inside it."""
    package = Path(raypfl.__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def known() -> dict[str, Definition]:
    """Every table and figure by its name, such as `diversifed-1`."""
    files = sorted((configs() / "paper").glob("*.yaml"))
    return {path.stem: _read(path) for path in files}


def read(name: str) -> Definition:
    """One of them.

    Raises:
        ConfigError: there is none of this name.
    """
    path = configs() / "paper" / f"{name}.yaml"
    if not path.is_file():
        names = [path.stem for path in sorted((configs() / "paper").glob("*.yaml"))]
        raise ConfigError(f"no table or figure is called {name!r}. {suggest(name, names)}")
    return _read(path)


def _read(path: Path) -> Definition:
    try:
        return Definition.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}:\n{explain(error, Definition)}") from None
