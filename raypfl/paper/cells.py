"""The cells of a table: what is printed, and the runs that ours are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from raypfl.configuration import expand, load, read_yaml, to_dict
from raypfl.errors import CheckpointError, ConfigError
from raypfl.methods import METHODS
from raypfl.paper.definition import Definition, Part, Profile, configs
from raypfl.paper.files import located
from raypfl.paper.published import Printed, published
from raypfl.records.manifest import check_same
from raypfl.settings import RunConfig

PLACES = ("name", "storage_path", "engine", "resources", "checkpoint", "faults")
"""Keys that say where and how safely a run goes, not which one it is."""


class Cell(NamedTuple):
    """One number of a table."""

    row: str
    column: str
    printed: Printed | None
    runs: dict[str, RunConfig]
    """A run a seed, by the name of its folder; none where there are no data, or the profile leaves it out."""
    view: str
    """The model/point whose accuracy it is."""
    statistic: str
    remarks: tuple[str, ...]
    """What is a reconstruction, is missing or differs."""

    @property
    def name(self) -> str:
        """`row/column`."""
        return f"{self.row}/{self.column}"


def cells(
    table: Definition, profile: Profile, *, only: Sequence[str] = (), folder: Path | None = None
) -> list[Cell]:
    """The cells of a table whose kind is `runs`, row by row.

    Args:
        table: the table.
        profile: the paper's setting, or one that two cores can bear.
        only: patterns of `row/column`; none: all.
        folder: where data files are; None: where each source has them by default.

    Raises:
        ConfigError: no cell matches a pattern, or a file of the definition is wrong.
    """
    found = []
    for row, in_row in table.rows.items():
        for column, in_column in table.columns.items():
            name = f"{row}/{column}"
            if only and not any(fnmatchcase(name, pattern) for pattern in only):
                continue
            parts = [table, in_column, in_row, *_small(table, profile, row, column)]
            found.append(_cell(table, row, column, parts, profile, folder))
    if not found:
        first = next(iter(table.rows), "row"), next(iter(table.columns), "column")
        raise ConfigError(
            f"--only {' '.join(only)}: no cell matches. Cells are called row/column, such as "
            f"'{'/'.join(first)}'; patterns such as '{first[0]}/*' choose several."
        )
    return found


def _small(table: Definition, profile: Profile, row: str, column: str) -> Iterator[Part]:
    if profile == "small" and table.small is not None:
        yield table.small
        yield table.small.columns.get(column, Part())
        yield table.small.rows.get(row, Part())


def _cell(
    table: Definition, row: str, column: str, parts: Sequence[Part], profile: Profile, folder: Path | None
) -> Cell:
    printed = published().get((table.paper, table.table, row, column))
    # What is said of the whole table stands below it, once.
    remarks = [part.reconstructed for part in parts[1:] if part.reconstructed]
    if printed is None:
        remarks.append("no number is known from the paper")
    elif printed.source != "printed":
        remarks.append(printed.source)
    raw = resolve(table, parts)
    method = raw["method"]["name"]
    view = _last(parts, "view") or "/".join(METHODS[method].reported)
    cell = Cell(row, column, printed, {}, view, _last(parts, "statistic") or "best", ())
    pattern = next(iter(_left_out(table, profile, cell.name)), None)
    if pattern is not None:
        return cell._replace(remarks=(*remarks, "not in the small profile: too slow for it"))
    raw["data"], remark = located(raw["data"], folder)
    if remark:
        remarks.append(remark)
    if raw["data"] is None:
        return cell._replace(remarks=tuple(remarks))
    runs = {_folder_name(raw, one): one for one in expand(load(raw)).values()}
    return cell._replace(runs=runs, remarks=tuple(remarks))


def _left_out(table: Definition, profile: Profile, name: str) -> list[str]:
    if profile == "full" or table.small is None:
        return []
    return [pattern for pattern in table.small.leave_out if fnmatchcase(name, pattern)]


def resolve(table: Definition, parts: Sequence[Part]) -> dict[str, Any]:
    """The configuration of a cell as a mapping, with one method."""
    base = _last(parts, "base")
    assert base is not None, "every cell of a definition has a base"
    raw = {key: value for key, value in _yaml(base).items() if key != "method"}
    sources = (base, *table.methods_from)
    options: dict[str, Any] = {}
    for part in parts:
        if part.method is not None:
            given = {"name": part.method} if isinstance(part.method, str) else part.method
            options = {**(_settings(given["name"], sources) if "name" in given else options), **given}
    name = options["name"]
    for part in parts:
        options |= part.methods.get(name, {})
    raw = deepcopy(raw)
    for part in parts:
        for key, value in part.set.items():
            _put(raw, key.split("."), deepcopy(value))
    return {**raw, "method": options}


def _last(parts: Sequence[Part], key: str) -> Any:
    return next((value for part in reversed(parts) if (value := getattr(part, key)) is not None), None)


def _settings(name: str, sources: Sequence[str]) -> dict[str, Any]:
    """The first entry of a method in these configurations; else its defaults."""
    for source in sources:
        listed = _yaml(source)["method"]
        for entry in listed if isinstance(listed, list) else [listed]:
            if entry["name"] == name:
                return dict(entry)
    return {"name": name}


@cache
def _yaml(name: str) -> dict[str, Any]:
    """A file below configs/, as it stands; `load` checks the whole later."""
    return read_yaml(configs() / name)


def _put(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, key = path
    for step in above:
        raw = raw.setdefault(step, {})
    raw[key] = value


def _folder_name(raw: Mapping[str, Any], config: RunConfig) -> str:
    """The same for the same run in whatever table, wherever its data lie.

    By what the definition says, without defaults: a new option is no other run. That defaults are still those
    of the run is for `check_unchanged` to see.
    """
    settings = {key: value for key, value in raw.items() if key not in (*PLACES, "seed")}
    data = {key: value for key, value in settings["data"].items() if key not in ("root", "download")}
    if "file" in data:
        data["file"] = Path(data["file"]).name
    digest = hashlib.sha256(json.dumps({**settings, "data": data}, sort_keys=True).encode()).hexdigest()
    return f"{config.method.name}-{config.data.name}-seed{config.seed}-{digest[:10]}"


def check_unchanged(path: Path, config: RunConfig) -> None:
    """Refuse a finished run whose settings, defaults included, are no longer what they were.

    Raises:
        ConfigError: says which.
    """
    (before,) = expand(load(path / "config.yaml")).values()
    try:
        check_same(str(path), to_dict(before), to_dict(config))
    except CheckpointError as error:
        changes = "\n".join(line for line in str(error).splitlines() if " -> " in line and line[0] == " ")
        raise ConfigError(
            f"{path} is finished, but was run with other defaults (key: then -> now):\n{changes}\n"
            "Move that folder away to run it again."
        ) from None
