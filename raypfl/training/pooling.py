"""Max-pooling of 2 x 2 pixels in whole-array operations, which a CPU does several at a time.

PyTorch's kernel for images with channels first looks at one pixel after another, and takes a quarter of a
small network's step. Values and gradients here are its own, also where pixels are equal.
"""

# B samples, C channels, H x W pixels, h x w of them pooled.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST = 2**16
"""Pixels; of fewer, a dozen operations take longer than one."""
_MOST_COLUMNS = 254
"""Offsets of up to a row and a pixel are counted in bytes."""


class MaxPool2x2(nn.Module):
    """`nn.MaxPool2d(2)`.

    Attributes:
        alone: whether it is called outside of `vmap`, where alone the fast way works.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alone = False

    def forward(self, x: Tensor) -> Tensor:
        """From [B, C, H, W] to [B, C, H // 2, W // 2]."""
        large = x.dim() == 4 and x.numel() >= _FEWEST and x.is_contiguous() and x.device.type == "cpu"
        if not (self.alone and large and x.shape[2] >= 2 and 2 <= x.shape[3] <= _MOST_COLUMNS):
            return F.max_pool2d(x, 2)
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _Pool.apply(x)
            return y
        return _largest(x)


def with_fast_pooling(part: nn.Module) -> list[MaxPool2x2]:
    """Put fast poolings in the place of those inside a part of a network; they are returned.

    Where ReLU comes right before one it comes right after it instead, and sees a quarter of the pixels: the
    largest of what is above zero is what is above zero of the largest, with the same gradients.
    """
    found = []
    for parent in part.modules():
        for name, child in parent._modules.items():
            if child is not None and _is_plain(child):
                found.append(MaxPool2x2())
                parent._modules[name] = found[-1]
        if type(parent) is nn.Sequential:
            _pool_first(parent)
    return found


def _pool_first(layers: nn.Sequential) -> None:
    children = list(layers._modules.items())
    for place in range(1, len(children)):
        before, child = children[place - 1][1], children[place][1]
        if isinstance(child, MaxPool2x2) and type(before) is nn.ReLU and not before._forward_hooks:
            children[place - 1], children[place] = children[place], children[place - 1]
    layers._modules.clear()
    layers._modules.update(children)


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.MaxPool2d
        and all(side in (2, (2, 2)) for side in (module.kernel_size, module.stride))
        and module.padding in (0, (0, 0))
        and module.dilation in (1, (1, 1))
        and not (module.return_indices or module.ceil_mode)
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def _corners(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four pixels of each window, in the order in which the first of equal ones wins."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    top, bottom = x[:, :, 0:height:2, :width], x[:, :, 1:height:2, :width]
    return top[..., 0::2], top[..., 1::2], bottom[..., 0::2], bottom[..., 1::2]


def _largest(x: Tensor) -> Tensor:
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    # Rows first: neighbours in memory are compared with neighbours.
    rows = torch.maximum(x[:, :, 0:height:2, :width], x[:, :, 1:height:2, :width])
    return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _largest(x)
        columns = x.shape[3]
        first, second, third, _ = _corners(x)
        # 0, 1, a row on, or a row and 1: as many as are not it before the first that is.
        not_first = first != y
        not_second = not_first & (second != y)
        offset = not_first.to(torch.uint8)
        offset.add_(not_second.view(torch.uint8), alpha=columns - 1)
        offset.add_((not_second & (third != y)).view(torch.uint8))
        down = torch.arange(y.shape[2]) * (2 * columns)
        start = down[:, None] + 2 * torch.arange(y.shape[3])
        ctx.save_for_backward(x, start + offset)
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (d,) = slopes
        x, index = ctx.saved_tensors
        sides = [2, 2], [2, 2], [0, 0], [1, 1]
        slope: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(d, x, *sides, False, index)
        return slope
