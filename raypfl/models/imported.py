"""A user's own `nn.Module`, named by its import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection

import torch
from pydantic import Field, JsonValue, field_validator, model_validator
from torch import Tensor, nn

from raypfl.errors import ConfigError
from raypfl.models.base import Architecture, describe_shape

ALLOW_IMPORTS = "RAYPFL_ALLOW_IMPORTS"
"""Environment variable: packages and modules, with commas between them, that configurations may import."""

IMPORT_PATH = "package.module:Name"
"""The form of the name of an imported model."""


class Imported(Architecture):
    """A class or function of your own that makes an `nn.Module`; `head` is required.

    It is called with `kwargs`, and with `num_classes` and `input_shape` where its signature names them and
    `kwargs` does not. The module maps [B, *input_shape] to logits [B, num_classes].
    """

    kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_path(cls, name: str) -> str:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ValueError(f"is not an import path; write {IMPORT_PATH}")
        return name

    @model_validator(mode="after")
    def _check_head_given(self) -> Imported:
        if self.head is None:
            raise ValueError(
                f"`head` is missing: it must name the submodule of {self.name} that is its classifier, "
                "for example fc"
            )
        return self

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Import, call, and try the module on one sample of zeros.

        Raises:
            ConfigError: it cannot be imported or called, is no module, or does not give the logits.
        """
        make = self._import()
        offered: dict[str, object] = {"num_classes": num_classes, "input_shape": input_shape}
        accepted = inspect.signature(make).parameters
        arguments = {key: value for key, value in offered.items() if key in accepted} | self.kwargs
        try:
            module = make(**arguments)
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise ConfigError(
                f"model.name = {self.name!r}: the call {make.__name__}({given}) failed with "
                f"{type(error).__name__}: {error}. Its signature is {inspect.signature(make)}; "
                "set model.kwargs to fit."
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"model.name = {self.name!r} made a {type(module).__name__}, not a torch.nn.Module. "
                "Name a subclass of torch.nn.Module or a function that returns one."
            )
        self._try(module, input_shape, num_classes)
        return module

    def check_allowed(self, allowed: Collection[str]) -> None:
        """Refuse code that nobody has asked for.

        Args:
            allowed: packages and modules that may be imported, with all that is below them.

        Raises:
            ConfigError: the module is in none of them, and is not imported; or it is, and only hands on what
                another one defines.
        """
        module = self.name.partition(":")[0]
        if not _within(module, allowed):
            package = module.partition(".")[0]
            raise ConfigError(
                f"model.name = {self.name!r}: the configuration names code of package {package!r}, which "
                f"would run on this machine. If you trust it, add --allow-imports {package}, or set "
                f"{ALLOW_IMPORTS}={package}."
            )
        home = self._import().__module__
        if not _within(home, allowed):
            raise ConfigError(
                f"model.name = {self.name!r} is code of module {home!r}, and allowed is only "
                f"{', '.join(allowed)}. If you trust it, add --allow-imports {home}."
            )

    def _import(self) -> Callable[..., object]:
        path, _, attribute = self.name.partition(":")
        try:
            found: object = importlib.import_module(path)
        except Exception as error:
            raise ConfigError(
                f"model.name = {self.name!r}: importing {path!r} failed with "
                f"{type(error).__name__}: {error}. Install the package, or put its folder on PYTHONPATH."
            ) from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ConfigError(f"model.name = {self.name!r}: module {path!r} has no {attribute!r}.")
            found = getattr(found, part)
        is_module_class = inspect.isclass(found) and issubclass(found, nn.Module)
        if not is_module_class and not inspect.isfunction(found):
            raise ConfigError(
                f"model.name = {self.name!r} is {found!r}. "
                "Name a subclass of torch.nn.Module or a function that returns one."
            )
        return found  # type: ignore[return-value]

    def _try(self, module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad():
                logits = module(torch.zeros(1, *input_shape))
        except Exception as error:
            raise ConfigError(
                f"model.name = {self.name!r} cannot take samples of shape {describe_shape(input_shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            module.train(was_training)
        expected = (1, num_classes)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            shown = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"model.name = {self.name!r} gives {shown} for one sample; logits of shape {expected} "
                f"are needed, since the data have {num_classes} classes."
            )


def _within(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
