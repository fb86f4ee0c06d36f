"""From a YAML file and `key=value` overrides to checked settings, and back."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from raypfl.errors import ConfigError
from raypfl.explain import coerced, explain, show, suggest
from raypfl.methods import METHODS
from raypfl.models.imported import ALLOW_IMPORTS, Imported
from raypfl.records.storage import Remote, place
from raypfl.settings import ExperimentConfig, RunConfig, Settings

Source = str | os.PathLike[str] | Remote | Mapping[str, Any]


class Override(NamedTuple):
    """One `key=value` of the command line: the parts of its dotted key, and the value read as YAML."""

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}={show(self.value)}"


def load(
    source: Source, overrides: Sequence[str] = (), *, allow_imports: Collection[str] = ()
) -> ExperimentConfig:
    """Read, override and check the configuration of an experiment.

    Args:
        source: a YAML file, or the same as a mapping.
        overrides: `dotted.key=value`, the value in YAML. Where `method` is a list, `method.name=X` keeps
            the entries of that name (or, where there is none, replaces the list by X with its defaults),
            and `method.option=value` goes to the entries that have the option.
        allow_imports: packages of which a file may name models, beside those in RAYPFL_ALLOW_IMPORTS. What
            overrides or a mapping name was written by the caller, and needs no leave.

    Raises:
        ConfigError: the file cannot be read, or a key, type, value or combination of them is wrong, or it
            names code that it may not import.
    """
    if isinstance(source, Mapping):
        where, raw = "the configuration", copy.deepcopy(dict(source))
    else:
        where, raw = str(source), read_yaml(source)
    changes = parse_overrides(overrides)
    for change in changes:
        apply_override(raw, change)
    for key in ("method", "seed"):
        if key in raw and not isinstance(raw[key], list | tuple):
            raw[key] = [raw[key]]
    try:
        config = ExperimentConfig.model_validate(raw)
        lines = "\n".join(coerced(raw, to_dict(config)))
    except ValidationError as error:
        lines = explain(error, ExperimentConfig)
    if not lines:
        if not isinstance(source, Mapping):
            check_imports(config, allow_imports, typed=changes)
        return config
    for key in ("method", "seed"):
        if len(raw.get(key, ())) == 1:
            lines = lines.replace(f"{key}[0]", key)
    lines += "".join(_advice(change, lines) for change in changes)
    raise ConfigError(f"{where}:\n{_indent(lines)}")


def check_imports(
    config: ExperimentConfig, allow_imports: Collection[str] = (), *, typed: Sequence[Override] = ()
) -> None:
    """Refuse models of packages that nobody has allowed to be imported.

    Args:
        config: of a file that somebody else may have written.
        allow_imports: packages that are allowed, beside those in RAYPFL_ALLOW_IMPORTS.
        typed: overrides; models that they name are allowed.

    Raises:
        ConfigError: says which, and how to allow it.
    """
    allowed = (*allow_imports, *_allowed_by_environment())
    asked = {name for change in typed for name in _words(change.value)}
    for model in _imported(config):
        if model.name not in asked:
            model.check_allowed(allowed)


def leave_to_import(config: Settings) -> str:
    """What a command needs besides to run such a configuration from a file; empty if nothing."""
    packages = dict.fromkeys(model.name.partition(":")[0].partition(".")[0] for model in _imported(config))
    missing = [package for package in packages if package not in _allowed_by_environment()]
    return "".join(f" --allow-imports {package}" for package in missing)


def _imported(config: Settings) -> list[Imported]:
    return [model for model in (config.model, *config.personal_model) if isinstance(model, Imported)]


def _allowed_by_environment() -> list[str]:
    return [name for name in re.split(r"[,\s]+", os.environ.get(ALLOW_IMPORTS, "")) if name]


def _words(value: Any) -> Iterator[str]:
    """Every text in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner)


def expand(config: ExperimentConfig) -> dict[str, RunConfig]:
    """The runs of an experiment, method by method and seed by seed, under labels such as `fedavg-seed0`.

    A method that is listed more than once is told apart by the options in which its entries differ, as in
    `diversifed-tau0.5-seed0`.
    """
    shared = {key: value for key, value in config if key not in ("method", "seed")}
    return {
        f"{label}-seed{seed}": RunConfig(**shared, method=method, seed=seed)
        for label, method in zip(_method_labels(config), config.method, strict=True)
        for seed in config.seed
    }


def to_dict(config: BaseModel) -> dict[str, Any]:
    """Every key with its value, defaults included, in plain types; `load` gives the same settings back."""
    return config.model_dump(mode="json")


def to_yaml(config: BaseModel) -> str:
    """The same as a YAML document."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML as a person expects it: 1e-3 is a number, a date is text, no key twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                mark = node.value[position][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} stands here twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as a number."""


for _yaml in (_Loader, _Dumper):
    # YAML 1.1, which PyYAML follows, wants a dot in a number with an exponent.
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def read_yaml(path: str | os.PathLike[str] | Remote) -> dict[str, Any]:
    """The mapping in a YAML file, as it stands.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        raw = _parse_yaml(place(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_position(error)}: not valid YAML: {_problem(error)}.") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, not {show(raw)}.")
    return raw


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from SafeLoader


def _position(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error)


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Read overrides: whole sections first, then the names that choose, then options."""
    overrides: list[Override] = []
    for text in texts:
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            raise ConfigError(
                f"override {show(text)}: write it as key=value, for instance training.epochs=5."
            )
        if path in (override.path for override in overrides):
            raise ConfigError(f"override {show(text)}: {key} is given twice.")
        try:
            overrides.append(Override(path, _parse_yaml(value)))
        except yaml.YAMLError as error:
            raise ConfigError(f"override {show(text)}: not valid YAML: {_problem(error)}.") from None
    return sorted(overrides, key=lambda override: (len(override.path), override.path[-1] != "name"))


def apply_override(raw: dict[str, Any], override: Override) -> None:
    """Put one override in its place in `raw`."""
    section, *rest = override.path
    if section == "method" and rest and isinstance(raw.get("method"), list):
        if rest == ["name"]:
            chosen = [entry for entry in raw["method"] if _name(entry) == override.value]
            raw["method"] = chosen or {"name": override.value}
        else:
            for entry in _having_option(raw["method"], override):
                apply_override(entry, override._replace(path=tuple(rest)))
        return
    if not rest:
        raw[section] = override.value
        return
    inner = raw.setdefault(section, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"override {override}: {section} = {show(inner)} has no keys below it.")
    apply_override(inner, override._replace(path=tuple(rest)))


def _having_option(entries: list[Any], override: Override) -> list[dict[str, Any]]:
    """The entries of a list of methods to which an option belongs."""
    option = override.path[1]
    options = {_name(entry): _options(_name(entry)) for entry in entries}
    having = [entry for entry in entries if option in options[_name(entry)]]
    if not having:
        known = dict.fromkeys(key for keys in options.values() for key in keys if key != "name")
        raise ConfigError(
            f"override {override}: no method of {', '.join(map(str, options))} has the option {option}. "
            f"{suggest(option, known)}"
        )
    return having


def _name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, dict) else None


def _options(method: Any) -> list[str]:
    return list(METHODS[method].Config.model_fields) if method in METHODS else []


def _method_labels(config: ExperimentConfig) -> list[str]:
    """A label for each entry of `method`, unique and fit for a folder's name."""
    options = [to_dict(method) for method in config.method]
    labels = []
    for mine in options:
        namesakes = [theirs for theirs in options if theirs["name"] == mine["name"]]
        varying = [key for key in mine if any(theirs[key] != mine[key] for theirs in namesakes)]
        told_apart = [f"-{key}{json.dumps(mine[key])}" for key in varying]
        labels.append(re.sub(r"[^\w.+-]", "", mine["name"] + "".join(told_apart)))
    if len(set(labels)) < len(labels):
        return [f"{index}-{method.name}" for index, method in enumerate(config.method, 1)]
    return labels


def _advice(change: Override, lines: str) -> str:
    """How to choose something else without the options that the file gives to the old choice."""
    section = ".".join(change.path[:-1])
    if change.path[-1] != "name" or not re.search(rf"^{section}\.\w+: unknown key", lines, re.MULTILINE):
        return ""
    return f"\n({change} keeps the other keys of {section}; {section}={{name: {change.value}}} drops them.)"


def _indent(lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines.splitlines())
