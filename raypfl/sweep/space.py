"""The points of a space: every combination of its grids, with draws, conditions and constraints."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from pydantic import JsonValue
from simpleeval import AttributeDoesNotExist, EvalWithCompoundTypes, InvalidExpression, NameNotDefined

from raypfl.configuration import apply_override, parse_overrides
from raypfl.errors import ConfigError
from raypfl.rng import key, numpy_generator
from raypfl.sweep.config import Dimension, Listed, SweepConfig, keys_of

Point: TypeAlias = dict[str, JsonValue]
"""Values of the keys of a space, by dotted key; a key whose condition does not hold is absent."""

ATTEMPTS = 1000
"""Draws for one point until the constraints are met; then there is no such point, or nearly none."""

LONGEST_LABEL = 80


class UnknownName(ConfigError):
    """An expression names a key that the configuration at hand does not have."""


def evaluate(expression: str, config: Mapping[str, Any]) -> bool:
    """Whether a condition on dotted keys holds, such as `method.lam * method.rate < 2`.

    Raises:
        UnknownName: it names a key that `config` does not have.
        ConfigError: it is no expression, or cannot be worked out for these values.
    """
    evaluator = EvalWithCompoundTypes(functions={"min": min, "max": max, "abs": abs, "len": len})
    evaluator.names = vars(_namespace(config))
    try:
        return bool(evaluator.eval(expression))
    except (NameNotDefined, AttributeDoesNotExist) as error:
        raise UnknownName(f"{expression!r}: {error}") from None
    except (InvalidExpression, SyntaxError, TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise ConfigError(f"{expression!r} cannot be worked out: {error}") from None


def points_of(config: SweepConfig, meets: Callable[[Point], bool]) -> list[Point]:
    """All points of a space that is listed, in the order of its grids; those drawn twice are there once.

    Draws of one number are the same for every combination of the grids, so combinations compare like with
    like.

    Args:
        config: the sweep.
        meets: whether a point meets the constraints. Grid points that do not are left out, drawn ones are
            drawn again.

    Raises:
        ConfigError: the constraints leave none, or `search.draws` does not fit the space.
    """
    assert isinstance(config.search, Listed)
    drawn = [name for name, dimension in config.space.items() if not dimension.is_grid]
    if bool(drawn) != (config.search.draws is not None):
        raise ConfigError(
            f"search.draws: {drawn[0]} is drawn; say how many points to draw."
            if drawn
            else "search.draws: nothing in the space is drawn; leave it out."
        )
    found: dict[str, Point] = {}
    for draw in range(config.search.draws or 1):
        wanted: set[str] | None = None
        for attempt in range(ATTEMPTS if drawn else 1):
            tried = {
                _grid_part(config, point): point
                for point in walk(config, drawn_values(config.search.seed, draw, attempt))
            }
            kept = {part for part in tried if (wanted is None or part in wanted) and meets(tried[part])}
            found |= {json.dumps(tried[part]): tried[part] for part in tried if part in kept}
            wanted = (set(tried) if wanted is None else wanted) - kept
            if not wanted:
                break
    if not found:
        raise ConfigError(
            "constraints: no point of the space meets all of "
            f"{', '.join(map(repr, config.constraints))}. Change them or the space."
        )
    return list(found.values())


def walk(config: SweepConfig, values_of: Callable[[str, Dimension], Sequence[JsonValue]]) -> Iterator[Point]:
    """Every combination of the values that each name of the space has, where its condition holds."""

    def onward(names: Sequence[str], chosen: Point) -> Iterator[Point]:
        if not names:
            yield chosen
            return
        name, *rest = names
        dimension = config.space[name]
        if dimension.when is not None and not _holds(dimension.when, name, config, chosen):
            yield from onward(rest, chosen)
            return
        for value in values_of(name, dimension):
            yield from onward(rest, chosen | assigned(name, value))

    yield from onward(list(config.space), {})


def assigned(name: str, value: JsonValue) -> Point:
    """One value under its key, or several under theirs."""
    keys = keys_of(name)
    if len(keys) == 1:
        return {name: value}
    assert isinstance(value, list)
    return dict(zip(keys, value, strict=True))


def labels_of(points: Sequence[Point]) -> list[str]:
    """A name for each point, unique and fit for a folder, such as `tau0.5-alpha0.1`."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    short = {key: key.rpartition(".")[2] for key in keys}
    for dotted in keys:
        if sum(other == short[dotted] for other in short.values()) > 1:
            short[dotted] = "_".join(dotted.split(".")[-2:])
    labels = ["-".join(_word(dotted, short[dotted], point[dotted]) for dotted in point) for point in points]
    labels = [re.sub(r"[^\w.+-]", "", label) or "base" for label in labels]
    if len(set(labels)) < len(labels) or max(map(len, labels)) > LONGEST_LABEL:
        return [f"point{number:04d}" for number in range(len(points))]
    return labels


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Dotted keys and their values as the command line has them."""
    return [f"{dotted}={json.dumps(value)}" for dotted, value in values.items()]


def _word(dotted: str, short: str, value: JsonValue) -> str:
    if isinstance(value, dict) and "name" in value:
        options = [f"_{option}{_text(given)}" for option, given in value.items() if option != "name"]
        return str(value["name"]) + "".join(options)
    return _text(value) if dotted == "method.name" else f"{short}{_text(value)}"


def _text(value: JsonValue) -> str:
    return f"{value:.5g}" if isinstance(value, float) else json.dumps(value)


def drawn_values(seed: int, draw: int, attempt: int) -> Callable[[str, Dimension], Sequence[JsonValue]]:
    """All values of a grid, and one of what is drawn: for `walk`."""

    def values_of(name: str, dimension: Dimension) -> Sequence[JsonValue]:
        if dimension.grid is not None:
            return dimension.grid
        generator = numpy_generator(key(seed, f"sweep {name}", round=draw, client=attempt))
        return (dimension.at(float(generator.random())),)

    return values_of


def _grid_part(config: SweepConfig, point: Point) -> str:
    """The values that come from grids, to tell combinations apart."""
    grids = [key for name, dimension in config.space.items() if dimension.is_grid for key in keys_of(name)]
    return json.dumps({key: point[key] for key in grids if key in point})


def _holds(condition: str, name: str, config: SweepConfig, chosen: Point) -> bool:
    """Whether a key's condition holds for what is known before it."""
    raw = copy.deepcopy(config.base)
    assert isinstance(raw, dict)
    for change in parse_overrides(overrides_of({**config.set, **chosen})):
        apply_override(raw, change)
    if isinstance(raw.get("method"), list) and len(raw["method"]) == 1:
        raw["method"] = raw["method"][0]
    try:
        return evaluate(condition, raw)
    except UnknownName as error:
        raise ConfigError(
            f"space.{name}.when: {error}. It may name keys that the base, `set`, or the space before "
            f"{name} gives."
        ) from None
    except ConfigError as error:
        raise ConfigError(f"space.{name}.when: {error}") from None


def _namespace(value: Any) -> Any:
    """Mappings as objects, so that a key can have any name (`items`) and a missing one is an error."""
    return (
        SimpleNamespace(**{str(key): _namespace(inner) for key, inner in value.items()})
        if isinstance(value, Mapping)
        else value
    )
