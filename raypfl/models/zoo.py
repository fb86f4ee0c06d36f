"""The known architectures: the configuration that names one, and the module that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated

from pydantic import Discriminator, Tag
from torch import nn

from raypfl.errors import ConfigError
from raypfl.explain import suggest
from raypfl.models.base import DEFAULT_HEAD, Architecture, Built
from raypfl.models.cnn import CNNA, CNNP, UAPDFLCNN, FedRepCNN, LeNet5
from raypfl.models.imported import IMPORT_PATH, Imported
from raypfl.models.perceptron import MLP, Linear
from raypfl.models.resnet import ResNet8, ResNet18
from raypfl.models.vgg import VGG11

_ARCHITECTURES: dict[str, type[Architecture]] = {
    "linear": Linear,
    "mlp": MLP,
    "lenet5": LeNet5,
    "cnn_a": CNNA,
    "cnn_p": CNNP,
    "cnn_fedrep": FedRepCNN,
    "cnn_uapdfl": UAPDFLCNN,
    "resnet8": ResNet8,
    "resnet18": ResNet18,
    "vgg11": VGG11,
    IMPORT_PATH: Imported,
}

MODELS: dict[str, str] = {
    name: (inspect.getdoc(architecture) or "").partition("\n")[0]
    for name, architecture in _ARCHITECTURES.items()
}
"""Every model that a configuration can name, with one line about it."""


def _tag(config: object) -> str | None:
    name = config.get("name") if isinstance(config, Mapping) else getattr(config, "name", None)
    return IMPORT_PATH if isinstance(name, str) and ":" in name else name


ModelConfig = Annotated[
    Annotated[Linear, Tag("linear")]
    | Annotated[MLP, Tag("mlp")]
    | Annotated[LeNet5, Tag("lenet5")]
    | Annotated[CNNA, Tag("cnn_a")]
    | Annotated[CNNP, Tag("cnn_p")]
    | Annotated[FedRepCNN, Tag("cnn_fedrep")]
    | Annotated[UAPDFLCNN, Tag("cnn_uapdfl")]
    | Annotated[ResNet8, Tag("resnet8")]
    | Annotated[ResNet18, Tag("resnet18")]
    | Annotated[VGG11, Tag("vgg11")]
    | Annotated[Imported, Tag(IMPORT_PATH)],
    Discriminator(_tag),
]
"""Configuration of a model: `name`, `head` and the options of that one architecture."""


def build(config: Architecture, input_shape: tuple[int, ...], num_classes: int) -> Built:
    """A new module for samples of `input_shape`, and where its head begins.

    Initial values come from torch's global generator: call it inside `raypfl.rng.torch_seeded`.

    Raises:
        ConfigError: the model cannot take these samples, or `head` names no part with parameters.
    """
    module = config.build_module(input_shape, num_classes)
    head = DEFAULT_HEAD if config.head is None else config.head
    _check_head(config.name, module, head)
    return Built(module, head)


def _check_head(model: str, module: nn.Module, head: str) -> None:
    children = dict(module.named_children())
    if isinstance(module, nn.Sequential):
        parts = children
    else:
        parts = {name: part for name, part in module.named_modules() if name}
    if head not in parts:
        raise ConfigError(f"model.head = {head!r} is no part of {model}. {suggest(head, children)}")
    following = list(children)[list(children).index(head) :] if isinstance(module, nn.Sequential) else [head]
    if not any(True for name in following for _ in parts[name].parameters()):
        raise ConfigError(f"model.head = {head!r}: that part of {model} has no parameters to train.")
