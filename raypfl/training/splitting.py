"""Where a model is cut into feature extractor and head."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from raypfl.errors import ShapeError


def split_at(module: nn.Module, head: str) -> tuple[nn.Module, nn.Module]:
    """The feature extractor and the head of a module; they share their parameters with it.

    Raises:
        ShapeError: there is no submodule of that name.
    """
    if isinstance(module, nn.Sequential) and head in module._modules:
        first = list(module._modules).index(head)
        return module[:first], module[first:]
    try:
        found = module.get_submodule(head)
    except AttributeError:
        raise ShapeError(
            f"model.head = {head!r}: {type(module).__name__} has no such submodule. "
            f"It has: {', '.join(name for name, _ in module.named_modules() if name)}"
        ) from None
    extractor = copy.copy(module)
    parent_name, _, name = head.rpartition(".")
    # Copy only the path to the head, so that everything else stays the same objects.
    node = extractor
    node._modules = dict(node._modules)
    for part in parent_name.split(".") if parent_name else []:
        child = copy.copy(node._modules[part])
        assert child is not None
        child._modules = dict(child._modules)
        node._modules[part] = child
        node = child
    node._modules[name] = nn.Identity()
    return extractor, found


def check_split(module: nn.Module, head: str, x: Tensor) -> None:
    """Make sure that nothing is computed beside extractor and head.

    Args:
        module: the model, any state.
        head: where its head begins.
        x: a few samples `[B, ...]`.

    Raises:
        ShapeError: the head after the extractor does not give what the module gives.
    """
    extractor, rest = split_at(module, head)
    module.eval()
    extractor.eval()
    with torch.no_grad():
        same = torch.equal(rest(extractor(x)), module(x))
    if not same:
        raise ShapeError(
            f"model.head = {head!r}: {type(module).__name__} computes something after its head or beside "
            "it, so extractor and head are not the whole model. Move that into the extractor, or name "
            "another head."
        )
