"""What every architecture is: its options, and how it makes a module for the data at hand."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from pydantic import Field, model_validator
from torch import nn

from raypfl.config import StrictModel
from raypfl.errors import ConfigError
from raypfl.explain import suggest

DEFAULT_HEAD = "head"
"""Name of the last linear layer in every network of the zoo."""

Layers = list[tuple[str, nn.Module]]
"""Direct children of a network in order, by name."""


class Built(NamedTuple):
    """A freshly initialised module and where its head (the classifier) begins.

    For an `nn.Sequential`, `head` is a direct child: it and all children after it are the head. For any
    other module it is the name of the one submodule that is the head.
    """

    module: nn.Module
    head: str


class Architecture(StrictModel):
    """Options of one architecture; `head` moves the split between extractor and head."""

    name: str
    head: str | None = None
    buffers: Literal["average", "local", "fedbn"] = Field(
        "average",
        description="running statistics: sent with the extractor, or kept by each client; fedbn: kept, and "
        "so are scales and shifts of normalisation layers",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, values: object) -> object:
        """Refuse an option that this model does not read, by the model's name."""
        if isinstance(values, Mapping):
            for option in values:
                if option not in cls.model_fields:
                    name = values.get("name", cls.model_fields["name"].default)
                    raise ValueError(
                        f"the model {name!r} has no option {option!r}. "
                        f"{suggest(str(option), cls.model_fields)}"
                    )
        return values

    @abstractmethod
    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """A new module from [B, *input_shape] to logits [B, num_classes].

        Raises:
            ConfigError: the network cannot take samples of this shape.
        """


def sequential(layers: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """The layers in order, as direct children that a configuration can name."""
    return nn.Sequential(OrderedDict(layers))


def dense_layers(
    inputs: int,
    hidden: Iterable[int],
    outputs: int,
    *,
    activation: type[nn.Module] = nn.ReLU,
    dropout: float = 0.0,
) -> Layers:
    """Linear layers `fc1`, `fc2`, ..., each with activation and dropout, then the linear `head`."""
    layers: Layers = []
    for i, width in enumerate(hidden, start=1):
        layers += [(f"fc{i}", nn.Linear(inputs, width)), (f"fc{i}_act", activation())]
        if dropout > 0:
            layers.append((f"fc{i}_drop", nn.Dropout(dropout)))
        inputs = width
    return [*layers, (DEFAULT_HEAD, nn.Linear(inputs, outputs))]


def check_images(
    model: str, input_shape: tuple[int, ...], *, smallest: int = 1, advice: str = ""
) -> tuple[int, int, int]:
    """Channels, height and width of the samples, once they are images that `model` can take.

    Raises:
        ConfigError: not [C, H, W], or less than `smallest` pixels high or wide.
    """
    found = describe_shape(input_shape)
    if len(input_shape) != 3:
        raise ConfigError(
            f"model.name = {model!r} takes images [channels, height, width]; the samples have shape {found}. "
            "Use 'linear' or 'mlp' for these data."
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"model.name = {model!r} needs images of at least {smallest} x {smallest} pixels; the samples "
            f"are {found} (channels x height x width). {advice or 'Use a smaller network for these data.'}"
        )
    return channels, height, width


def describe_shape(shape: tuple[int, ...]) -> str:
    """A shape as a person writes it: `3 x 32 x 32`."""
    return " x ".join(map(str, shape)) or "scalar"


def pad_to(side: int, height: int, width: int) -> nn.ZeroPad2d:
    """Zeros around images smaller than `side`, as evenly as whole pixels allow."""
    vertical, horizontal = max(side - height, 0), max(side - width, 0)
    return nn.ZeroPad2d((horizontal // 2, -(-horizontal // 2), vertical // 2, -(-vertical // 2)))
