"""Coarser arithmetic for models in training, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "tf32", "bfloat16"]


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """How products and convolutions are computed inside: entered around forwards and backwards of models.

    Weights, gradients, optimizer and everything between models stay in float32.
    """
    if precision == "bfloat16":
        # Weights change with every step, so there is nothing to gain from a cache of rounded ones.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return _tensor_cores() if precision == "tf32" else nullcontext()


def with_rough_convolutions(part: nn.Module) -> None:
    """Let convolutions round under `torch.autocast` in `vmap`, too, where it passes them by."""
    for module in part.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            module._conv_forward = partial(_rounding, module._conv_forward)  # type: ignore[method-assign]


def _rounding(forward: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return forward(x, weight, bias)
    dtype = torch.get_autocast_dtype(device)
    return forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@contextmanager
def _tensor_cores() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
