"""An unbiased stochastic quantizer: integers of b bits and one scale a row."""

# K rows, P parameters, B columns of one block.

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.algebra.columns import column_blocks
from raypfl.errors import ConfigError

FEWEST_BITS, MOST_BITS = 2, 32


def quantize(x_KP: Tensor, bits: int, noise_KP: Tensor) -> tuple[Tensor, Tensor]:
    """Round each `x / s` to one of the two integers beside it, the nearer the likelier.

    `Q(x) = s floor(x / s) + s Bernoulli(x / s - floor(x / s))` with `s = max|x| / (2^(b-1) - 1)` for each
    row: `E Q(x) = x`, the variance is at most `s^2 / 4`, and nothing is clipped. The scale is rounded up to
    the dtype it is sent in, since the largest entry would not fit otherwise. A row of zeros sends zeros. A
    row that is not finite has the scale NaN, so that it is not finite at the receiver either.

    Args:
        x_KP: rows, float32 or float64 `[K, P]`.
        bits: b, 2 to 32.
        noise_KP: uniform in [0, 1), drawn by the caller, `[K, P]`.

    Returns:
        The integers, within `+-(2^(b-1) - 1)`, in the smallest of int8, int16 and int32 that holds b bits
        `[K, P]`; and the scales, dtype of `x_KP` `[K]`.

    Raises:
        ConfigError: bits out of range.
    """
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ConfigError(f"quantizer: bits = {bits}. Take {FEWEST_BITS} to {MOST_BITS}.")
    dtype = torch.int8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32
    levels = 2 ** (bits - 1) - 1
    scale_K = _scales(x_KP, levels)
    usable_K1 = (scale_K > 0)[:, None]
    step_K1 = scale_K.double()[:, None].where(usable_K1, 1.0)
    integers_KP = torch.empty_like(x_KP, dtype=dtype)
    for columns in column_blocks(x_KP.shape[1]):
        # At 32 bits the quotient of the largest entry may round to just above the levels.
        steps_KB = (x_KP[:, columns].double() / step_K1).where(usable_K1, 0.0).clamp_(-levels, levels)
        below_KB = steps_KB.floor()
        # Not floor(x / s + noise): near 2^31 that sum rounds up to the next integer.
        up_KB = noise_KP[:, columns] < steps_KB - below_KB
        integers_KP[:, columns] = (below_KB + up_KB).to(dtype)
    return integers_KP, scale_K


def dequantize(integers_KP: Tensor, scale_K: Tensor) -> Tensor:
    """`s q`, in the dtype of the scales: `[K, P]`."""
    out_KP = torch.empty_like(integers_KP, dtype=scale_K.dtype)
    for columns in column_blocks(integers_KP.shape[1]):
        out_KP[:, columns] = integers_KP[:, columns].double() * scale_K.double()[:, None]
    return out_KP


def _scales(x_KP: Tensor, levels: int) -> Tensor:
    low_K, high_K = x_KP.aminmax(dim=1)
    largest_K = torch.maximum(-low_K, high_K).double()
    exact_K = largest_K / levels
    scale_K = exact_K.to(x_KP.dtype)
    short_K = scale_K.double() * levels < largest_K
    scale_K = torch.where(short_K, scale_K.nextafter(torch.full_like(scale_K, torch.inf)), scale_K)
    return scale_K.masked_fill(~largest_K.isfinite(), torch.nan)
