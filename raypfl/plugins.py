"""What other packages add, by entry points: methods, data sources, partitions and models.

In the `pyproject.toml` of such a package:

    [project.entry-points."raypfl.methods"]
    fedprox = "fedprox:FedProx"

| group | what the entry point names |
|---|---|
| `raypfl.methods` | a `raypfl.methods.Method` |
| `raypfl.data` | an `ImageConfig` of `raypfl.data.sources.images`, or a model with `load(seed)`, a `Pool` |
| `raypfl.partitions` | a `raypfl.data.partitions.base.Partition` |
| `raypfl.models` | a `raypfl.models.Architecture` |

The `name` in its configuration is the entry point's: `name: Literal["fedprox"] = "fedprox"`. A package that
cannot be used is no obstacle until its name is asked for; then the error says what is wrong with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args

from pydantic import BaseModel, ConfigDict, Tag, create_model, model_validator

from raypfl.config import StrictModel
from raypfl.data import PARTITIONS, SOURCES
from raypfl.data.partitions.base import Partition
from raypfl.errors import PluginError
from raypfl.methods import METHODS, Method
from raypfl.models import MODELS, Architecture

METHOD_GROUP, DATA_GROUP, PARTITION_GROUP, MODEL_GROUP = GROUPS = (
    "raypfl.methods",
    "raypfl.data",
    "raypfl.partitions",
    "raypfl.models",
)
GROUP_OF = dict(zip(("methods", "datasets", "partitions", "models"), GROUPS, strict=True))
"""By what `raypfl list` calls them."""


class Added(NamedTuple):
    """Configuration models of one group, of things that can be used and of those that cannot."""

    configs: dict[str, type[BaseModel]]
    broken: dict[str, str]
    """Why not, by name."""


class _Broken(BaseModel):
    """Stands for a thing that cannot be used, so that asking for it says why."""

    model_config = ConfigDict(extra="allow")


@cache
def install() -> dict[str, Added]:
    """Find all plug-ins, by group, and put them into the tables of names. Done once a process.

    Raises:
        PluginError: a name is taken, by raypfl or by another package.
    """
    known: dict[str, Iterable[str]] = {
        METHOD_GROUP: METHODS,
        DATA_GROUP: SOURCES,
        PARTITION_GROUP: PARTITIONS,
        MODEL_GROUP: MODELS,
    }
    return {group: _add(group, frozenset(names)) for group, names in known.items()}


def union_with(annotation: Any, group: str) -> Any:
    """The union of the configurations of a group, told apart by `name`, with those of plug-ins."""
    union, discriminator = get_args(annotation)
    added = install()[group].configs
    members = (*get_args(union), *(_member(name, config, group) for name, config in added.items()))
    return Annotated[Union[members], discriminator]  # noqa: UP007 - of members that are found at run time


def _member(name: str, config: type[BaseModel], group: str) -> Any:
    return Annotated[config, Tag(name)] if group == MODEL_GROUP else config


def _add(group: str, taken: frozenset[str]) -> Added:
    added = Added({}, {})
    from_package: dict[str, str] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        package = "a package" if point.dist is None else f"the package {point.dist.name}"
        if point.name in taken or point.name in from_package:
            holder = "raypfl" if point.name in taken else from_package[point.name]
            raise PluginError(
                f"{package} adds {point.name!r} to {group}, which {holder} has already. Give its entry point "
                f"another name, or uninstall the package."
            )
        from_package[point.name] = package
        try:
            config = _REGISTER[group](point)
        except Exception as error:  # whatever code of somebody else raises
            reason = f"{package} has {point.name!r} ({point.value}), which cannot be used: {_say(error)}"
            added.broken[point.name] = reason
            config = _stand_in(point.name, reason)
        added.configs[point.name] = config
    return added


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, _Unfit) else f"{type(error).__name__}: {error}"


class _Unfit(Exception):
    """What an entry point names is not what the group wants."""


def _method(point: EntryPoint) -> type[BaseModel]:
    method = _class(point, Method, "Method of raypfl.methods")
    config: type[BaseModel] = getattr(method, "Config", BaseModel)
    _check_config(point, config)
    if not isinstance(getattr(method, "summary", None), str):
        raise _Unfit("its class has no summary, the line for `raypfl list methods`")
    METHODS[point.name] = method
    return config


def _source(point: EntryPoint) -> type[BaseModel]:
    config: type[StrictModel] = _class(point, StrictModel, "ImageConfig or another StrictModel")
    if not callable(getattr(config, "load", None)):
        raise _Unfit("its class has no load(seed), which gives the Pool")
    return _described(point, config, SOURCES)


def _partition(point: EntryPoint) -> type[BaseModel]:
    return _described(point, _class(point, Partition, "Partition of raypfl.data.partitions.base"), PARTITIONS)


def _architecture(point: EntryPoint) -> type[BaseModel]:
    return _described(point, _class(point, Architecture, "Architecture of raypfl.models"), MODELS)


_REGISTER: dict[str, Callable[[EntryPoint], type[BaseModel]]] = {
    METHOD_GROUP: _method,
    DATA_GROUP: _source,
    PARTITION_GROUP: _partition,
    MODEL_GROUP: _architecture,
}


def _class(point: EntryPoint, base: type, wanted: str) -> Any:
    found = point.load()
    if not (isinstance(found, type) and issubclass(found, base)):
        raise _Unfit(f"it is {found!r} and not a {wanted}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise _Unfit(f"its class does not define {missing}")
    return found


def _check_config(point: EntryPoint, config: type[BaseModel]) -> None:
    field = config.model_fields.get("name") if issubclass(config, StrictModel) else None
    if field is None or get_args(field.annotation) != (point.name,) or field.default != point.name:
        raise _Unfit(f'its configuration needs  name: Literal["{point.name}"] = "{point.name}"')


def _described(point: EntryPoint, config: type[BaseModel], table: dict[str, str]) -> type[BaseModel]:
    _check_config(point, config)
    table[point.name] = (inspect.getdoc(config) or "").partition("\n")[0]
    return config


def _stand_in(name: str, reason: str) -> type[BaseModel]:
    def refuse(cls: type[BaseModel], given: object) -> object:
        raise ValueError(reason)

    fields: dict[str, Any] = {"name": (Literal[name], name)}
    validators: dict[str, Any] = {"refuse": model_validator(mode="before")(refuse)}
    return create_model(f"Broken_{name}", __base__=_Broken, __validators__=validators, **fields)
