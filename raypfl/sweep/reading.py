"""From the file of a sweep and `key=value` overrides to checked settings, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raypfl.configuration import apply_override, parse_overrides, read_yaml, to_dict
from raypfl.errors import ConfigError
from raypfl.explain import coerced, explain, show
from raypfl.records.storage import place
from raypfl.sweep.config import SweepConfig, keys_of

SWEEP = "sweep.yaml"
"""In a sweep's folder: its settings, with the base inside."""

OF_THE_SWEEP = ("name", "storage_path")
"""Keys that belong to the sweep and not to its trials."""


def is_sweep(path: str | Path) -> bool:
    """Whether a path is a sweep: a YAML file with a `space`, or the folder of a sweep."""
    found = place(path)
    return (found / SWEEP).is_file() if found.is_dir() else "space" in read_yaml(found)


def read(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> SweepConfig:
    """Read, override and check a sweep.

    Args:
        source: a YAML file, or the same as a mapping (then with a `name`, and a `base` that is a mapping or
            a path from the working directory).
        overrides: `key=value`. One of the sweep (`search.draws`, `space.method.tau`) is changed there; one
            that the space varies takes the value, or the values of a list; others go to `set`.

    Raises:
        ConfigError: the file cannot be read, or a key, type or value is wrong.
    """
    if isinstance(source, Mapping):
        where, beside, raw = "the sweep", Path(), copy.deepcopy(dict(source))
    else:
        where, beside, raw = str(source), Path(source).parent, read_yaml(Path(source))
        raw.setdefault("name", Path(source).stem)
    if not isinstance(raw.get("space"), dict) or not raw["space"]:
        raise ConfigError(
            f"{where} is not a sweep: `space` must be a mapping of dotted keys to values, such as "
            "{method.tau: [0.5, 1.0]}. A single configuration is run with `raypfl run`."
        )
    _override(raw, overrides)
    if isinstance(raw.get("search"), dict):
        raw["search"].setdefault("name", "listed")
    _move_seeds(where, raw)
    if isinstance(raw.get("base"), str):
        raw["base"] = read_yaml(beside / raw["base"])
    try:
        config = SweepConfig.model_validate(raw)
        lines = "\n".join(coerced(raw, to_dict(config)))
    except ValidationError as error:
        lines = explain(error, SweepConfig)
    lines = lines or "\n".join(_misplaced(config))
    if lines:
        raise ConfigError(f"{where}:\n" + "\n".join(f"    {line}" for line in lines.splitlines()))
    return config


def _override(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put each `key=value` where it belongs."""
    known = SweepConfig.model_fields
    for change in parse_overrides(overrides):
        section, *rest = change.path
        dotted = ".".join(change.path)
        varied = [name for name in raw["space"] if dotted in keys_of(name)]
        if section in ("space", "set") and rest:
            raw.setdefault(section, {})[".".join(rest)] = change.value
        elif section in known:
            apply_override(raw, change)
        elif varied and varied[0] == dotted:
            raw["space"][dotted] = change.value if isinstance(change.value, list) else [change.value]
        elif varied:
            raise ConfigError(
                f"override {change}: {dotted} changes together with others in the space ({varied[0]}). "
                f"Write space.{varied[0]}=..."
            )
        else:
            raw.setdefault("set", {})[dotted] = change.value


def _move_seeds(where: str, raw: dict[str, Any]) -> None:
    """Seeds repeat every point: in the space they mean the same as in the base."""
    if "seed" not in raw["space"]:
        return
    seeds = raw["space"].pop("seed")
    if isinstance(seeds, dict) and set(seeds) == {"grid"}:
        seeds = seeds["grid"]
    if not isinstance(seeds, list):
        raise ConfigError(
            f"{where}: space.seed = {show(seeds)}: every point is run with every seed; give a list."
        )
    raw.setdefault("set", {})["seed"] = seeds


def _misplaced(config: SweepConfig) -> list[str]:
    """What stands in the wrong place, or twice."""
    lines = [
        f"{section}.{key}: belongs to the sweep; write {key} at the top."
        for section, keys in (("set", config.set), ("space", config.keys))
        for key in keys
        if key in OF_THE_SWEEP
    ]
    lines += [f"space.{key}: is also in `set`; remove one." for key in config.keys if key in config.set]
    lines += [
        f"space.{key}: stands in the space twice." for key in {*config.keys} if config.keys.count(key) > 1
    ]
    if not config.space and config.search.name == "optuna":
        lines.append("space: has nothing to search but seeds.")
    return lines
