"""Turns a validation error into lines a person can act on: the dotted key, the value, what is allowed."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError


class Place(NamedTuple):
    """A place in the configuration: its dotted key, and the models that may stand there."""

    path: str
    models: dict[type[BaseModel], tuple[str, ...]]
    """Each with the names that choose it, where there is a choice."""

    @property
    def keys(self) -> list[str]:
        """The keys that are known at this place."""
        return list(dict.fromkeys(key for model in self.models for key in model.model_fields))

    @property
    def names(self) -> list[str]:
        """The values of `name` that choose between the models of this place."""
        return [name for names in self.models.values() for name in names]


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for every key that is wrong, in the order of the configuration.

    Args:
        error: what validating against `model` raised.
        model: the model of the whole configuration; its fields give the nearest known keys.
    """
    details = error.errors(include_url=False)
    said: dict[str, list[str]] = {}
    for detail in details:
        # A wrong item also leaves its sequence too short; the item says it better.
        inside = (other["loc"][: len(detail["loc"])] == detail["loc"] != other["loc"] for other in details)
        if detail["type"] == "too_short" and any(inside):
            continue
        subject, complaint = _describe(detail, model)
        complaints = said.setdefault(subject, [])
        if complaint not in complaints:
            complaints.append(complaint)
    lines = []
    for subject, complaints in said.items():
        alternatives = [complaints[0], *(text.removeprefix("must be ") for text in complaints[1:])]
        lines.append(": ".join(filter(None, (subject, " or ".join(alternatives)))))
    return "\n".join(lines)


def coerced(raw: object, resolved: object, path: str = "") -> Iterator[str]:
    """One line for every value that validation took for another kind, such as "3" or true for 3.

    Args:
        raw: the values as they were given.
        resolved: the same tree, validated and dumped to plain types.
        path: the dotted key of both.
    """
    if isinstance(raw, Mapping) and isinstance(resolved, Mapping):
        for key in filter(resolved.__contains__, raw):
            yield from coerced(raw[key], resolved[key], _join(path, key))
    elif isinstance(raw, list | tuple) and isinstance(resolved, list):
        for index, pair in enumerate(zip(raw, resolved, strict=False)):
            yield from coerced(*pair, f"{path}[{index}]")
    elif (given := _kind(raw)) and (wanted := _kind(resolved)) and given != wanted:
        yield f"{path} = {show(raw)}: must be {wanted}, not {given}"


def suggest(word: str, known: Iterable[str]) -> str:
    """The nearest known word, if one is near, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    question = f"Did you mean {near[0]}? " if near else ""
    return f"{question}Known: {', '.join(known)}."


def show(value: object) -> str:
    """A value as it would stand in a configuration file, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _describe(detail: Mapping[str, Any], model: type[BaseModel]) -> tuple[str, str]:
    """What one of pydantic's errors is about, and what is wrong with it."""
    kind, loc, value = detail["type"], detail["loc"], detail["input"]
    if kind == "extra_forbidden":
        parent = _locate(model, loc[:-1])
        return _join(parent.path, loc[-1]), f"unknown key. {suggest(str(loc[-1]), parent.keys)}"
    place = _locate(model, loc)
    if kind == "missing":
        return place.path, "this key is required."
    if kind == "union_tag_not_found":
        return _join(place.path, "name"), f"this key is required. Known: {', '.join(place.names)}."
    if kind == "union_tag_invalid":
        name = value["name"]
        return f"{_join(place.path, 'name')} = {show(name)}", f"unknown. {suggest(str(name), place.names)}"
    if kind == "value_error":
        complaint = str(detail["ctx"]["error"])
        if complaint.startswith(place.path):
            return "", complaint
        return place.path if isinstance(value, Mapping) else f"{place.path} = {show(value)}", complaint
    if kind == "path_type":
        return f"{place.path} = {show(value)}", "must be a path"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        example = f"name: {place.names[0]}" if place.names else f"{place.keys[0]}: ..."
        return f"{place.path} = {show(value)}", f"must be a mapping, such as {{{example}}}"
    complaint = detail["msg"].split(", unable to ")[0].replace("Input should be", "must be")
    return f"{place.path} = {show(value)}", complaint


def _locate(model: type[BaseModel], loc: Sequence[str | int]) -> Place:
    """Follow pydantic's location, leaving out the names of union members it goes through."""
    path = ""
    annotation: Any = model
    for item in loc:
        models = _models(annotation)
        chosen = [candidate for candidate, names in models.items() if item in names]
        fields = [candidate.model_fields[item] for candidate in models if item in candidate.model_fields]
        if isinstance(item, int):
            path, annotation = f"{path}[{item}]", _element(annotation)
        elif len(models) > 1 and chosen:
            annotation = chosen[0]
        elif fields:
            path, annotation = _join(path, item), fields[0].annotation
        elif any(get_origin(member) is dict for member in _members(annotation)):
            path, annotation = _join(path, item), _element(annotation)
    return Place(path, _models(annotation))


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a type, through Annotated and unions."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for argument in get_args(annotation) for member in _members(argument)]
    return [annotation]


def _models(annotation: Any) -> dict[type[BaseModel], tuple[str, ...]]:
    """The models among the alternatives, with the tag or the literal names that choose each."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        tags = tuple(note.tag for note in notes if isinstance(note, Tag))
        return {model: tags or names for model, names in _models(inner).items()}
    if get_origin(annotation) in (Union, types.UnionType):
        return {model: names for each in get_args(annotation) for model, names in _models(each).items()}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation: _names_of(annotation)}
    return {}


def _element(annotation: Any) -> Any:
    """The type of the items of a sequence, or of the values of a mapping."""
    for member in _members(annotation):
        arguments = [argument for argument in get_args(member) if argument is not Ellipsis]
        if arguments:
            return arguments[-1]
    return Any


def _names_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The literal values of `name` that choose this model in a union."""
    field = model.model_fields.get("name")
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def _kind(value: object) -> str | None:
    """The kind of a scalar, in words of a configuration file."""
    for types_, kind in ((bool, "true or false"), (int | float, "a number"), (str, "text")):
        if isinstance(value, types_):
            return kind
    return None


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)
