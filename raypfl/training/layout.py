"""How images lie in memory while convolutions work on them.

On a CPU a step of networks whose channels lie next to each other takes a fifth less time (ResNet-8) to a
tenth (ResNet-18, the papers' CNNs); what surrounds convolutions does not notice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_INDIFFERENT = ("torch.nn.", "raypfl.")
"""Where modules come from that work on images however they lie. Others may call `view` on them."""
_TOGETHER = 8
"""Channels that the processor works on together; with LeNet5's 6 a step is a little slower."""


def takes_channels_last(module: nn.Module) -> bool:
    """Whether a network has convolutions that gain, and nothing in it that could ask how images lie."""
    parts = list(module.modules())
    channels = [part.out_channels for part in parts if isinstance(part, nn.Conv2d)]
    gains = bool(channels) and all(number % _TOGETHER == 0 for number in channels)
    return gains and all(type(part).__module__.startswith(_INDIFFERENT) for part in parts)


def channels_last(x: Tensor) -> Tensor:
    """The same images `[B, C, H, W]` with channels next to each other; anything else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
