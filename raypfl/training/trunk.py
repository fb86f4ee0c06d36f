"""The convolutions before a network's linear layers: several models one after the other, in one operation.

Next to small convolutions, what surrounds them on a CPU (views of parameters, autograd's nodes, the
optimizer, linear layers of one model) takes half of a step. With the convolutions of several models behind
one operation all the rest is done for them together.
"""

# K models, B samples a model, P columns.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from raypfl.training.layout import channels_last, takes_channels_last
from raypfl.training.pooling import MaxPool2x2
from raypfl.training.slots import Slot, bound, buffer_slots, parameter_slots


class Trunk(NamedTuple):
    """The part of a network before its linear layers, up to vectors."""

    module: nn.Sequential
    slots: tuple[Slot, ...]
    start: int
    """Its first column."""
    channels_last: bool
    """Whether images are laid out anew before they are worked on."""

    @property
    def columns(self) -> slice:
        """Where its parameters are, in the order of its slots."""
        return slice(self.start, self.start + sum(slot.size for slot in self.slots))

    def pieces(self, w_KP: Tensor) -> list[tuple[Tensor, ...]]:
        """Every model's parameters, flat; views."""
        sizes = [slot.size for slot in self.slots]
        return [row.split(sizes) for row in w_KP[:, self.columns].unbind()]

    def __call__(self, x_KB: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Vectors `[B, D]` of each model."""
        for part in self.module:
            if isinstance(part, MaxPool2x2):
                part.alone = True
        found = []
        for x, own in zip(x_KB, pieces, strict=True):
            with bound(self.slots, own):
                found.append(self.module(channels_last(x) if self.channels_last else x).flatten(1))
        return found


class Passed(NamedTuple):
    """A forward of trunks, for gradients."""

    x_KB: Tensor
    pieces: list[tuple[Tensor, ...]]
    """Leaves."""
    z: list[Tensor]
    """The vectors `[B, D]` of each model, with autograd's graph of this forward."""

    @classmethod
    def through(cls, trunk: Trunk, x_KB: Tensor, w_KP: Tensor, by_inputs: bool, by_weights: bool) -> Passed:
        """Go forward and remember it."""
        with torch.enable_grad():
            x_KB = x_KB.detach().requires_grad_(by_inputs)
            pieces = [
                tuple(piece.detach().requires_grad_(by_weights) for piece in own)
                for own in trunk.pieces(w_KP)
            ]
            return cls(x_KB, pieces, trunk(x_KB, pieces))

    def slopes(self, d_KBD: Tensor, by_inputs: bool, by_weights: bool) -> tuple[Tensor | None, Tensor | None]:
        """Gradients by the inputs `[K, B, ...]` and by the trunk's columns, from those by its vectors."""
        leaves = [piece for own in self.pieces for piece in own] if by_weights else []
        wanted = [*leaves, self.x_KB] if by_inputs else leaves
        # Kept, since whoever asks once may ask again.
        found = list(torch.autograd.grad(self.z, wanted, list(d_KBD.unbind()), retain_graph=True))
        by_x = found.pop() if by_inputs else None
        return by_x, torch.cat(found).view(len(self.pieces), -1) if by_weights else None


def trunk_of(parts: Sequence[nn.Module]) -> Trunk | None:
    """The trunk of modules, one after the other; None where one has a state, draws numbers or has hooks."""
    module = nn.Sequential(*parts)
    slots = parameter_slots(module)
    if not slots or buffer_slots(module):
        return None
    if any(isinstance(part, _DropoutNd) or is_hooked(part) for part in module.modules()):
        return None
    return Trunk(module, tuple(slots), 0, takes_channels_last(module))


def is_hooked(module: nn.Module) -> bool:
    """Whether something else is called with the module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
