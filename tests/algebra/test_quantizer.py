"""The quantizer: unbiased, within its range and its bound, exact where it can be."""

import pytest
import torch
from sparse_cases import normal

from raypfl.algebra import dequantize, quantize
from raypfl.errors import ConfigError

BITS = pytest.mark.parametrize("bits", [2, 3, 8, 9, 16, 17, 32])
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
GRID = 4096


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_known_numbers():
    """Largest 6, three bits: s = 2. An entry of 3 is 1.5 steps, so noise below one half takes it up."""
    x, below, above = torch.tensor([[6.0, 3.0, -3.0, 0.0]]), torch.full((1, 4), 0.4), torch.full((1, 4), 0.6)
    integers, scale = quantize(x, 3, below)
    assert scale.tolist() == [2.0] and integers.tolist() == [[3, 2, -1, 0]] and integers.dtype == torch.int8
    assert quantize(x, 3, above)[0].tolist() == [[3, 1, -2, 0]]
    assert dequantize(integers, scale).tolist() == [[6.0, 4.0, -2.0, 0.0]]


@BOTH
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unbiased_with_variance_within_the_bound(bits, dtype):
    """The expectation over the noise as a sum over a grid of it: exact to half a step of the grid."""
    x_1P = normal(1, 30, dtype=dtype)
    grid_G1 = ((torch.arange(GRID) + 0.5) / GRID)[:, None].expand(-1, 30)
    integers, scale = quantize(x_1P.expand(GRID, -1), bits, grid_G1)
    sent, s = dequantize(integers, scale).double(), float(scale[0])
    assert (sent.mean(0) - x_1P[0].double()).abs().max() <= s / GRID
    variance = (sent - x_1P.double()).square().mean(0)
    assert (variance <= s * s / 4 * (1 + 1e-3)).all()
    assert variance.max() > s * s / 8


@BOTH
@BITS
def test_range_type_and_error(bits, dtype):
    sizes = torch.logspace(-30, 30, 20, dtype=torch.float64)[:, None]
    x, u = (normal(20, 300) * sizes).to(dtype), noise(20, 300)
    integers, scale = quantize(x, bits, u)
    levels = 2 ** (bits - 1) - 1
    assert integers.dtype == (torch.int8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32)
    assert scale.dtype == dtype and scale.shape == (20,)
    assert levels * (1 - 2e-7) <= int(integers.long().abs().max()) <= levels
    step = scale.double()[:, None]
    error = (integers.double() * step - x.double()).abs()
    assert (error <= step * (1 + 1e-9)).all()


@BITS
@pytest.mark.parametrize("seed", range(4))
def test_the_largest_entry_is_not_clipped_by_rounding_of_the_scale(bits, seed):
    """With a scale rounded down, the largest entry would need one more level: clipped, and so biased."""
    x = normal(500, 1, seed=seed, dtype=torch.float32)
    integers, scale = quantize(x, bits, torch.zeros(500, 1))
    levels = 2 ** (bits - 1) - 1
    assert (scale.double() * levels * (1 + 1e-15) >= x.abs().double()[:, 0]).all()
    assert int(integers.long().abs().max()) <= levels


@BOTH
def test_many_bits_are_the_identity_to_rounding(dtype):
    x = normal(4, 500, dtype=dtype)
    sent = dequantize(*quantize(x, 32, noise(4, 500)))
    assert sent.dtype == dtype
    assert ((sent - x).abs() <= x.abs().amax(1, keepdim=True) * 2**-30 + x.abs() * 1.2e-7).all()


@BITS
def test_zeros_send_zeros(bits):
    x = torch.zeros(2, 5)
    x[1, 3] = 1e-45
    integers, scale = quantize(x, bits, torch.zeros(2, 5))
    assert scale[0] == 0 and not integers[0].any() and not dequantize(integers, scale)[0].any()
    assert dequantize(integers, scale)[1].isfinite().all()
    assert not integers[1, [0, 1, 2, 4]].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_arrives_as_such_and_alone(bad):
    x, u = normal(3, 8, dtype=torch.float32), noise(3, 8)
    healthy = dequantize(*quantize(x, 8, u))
    x[1, 2] = bad
    sent = dequantize(*quantize(x, 8, u))
    assert sent[1].isnan().all()
    assert torch.equal(sent[[0, 2]], healthy[[0, 2]])


def test_rows_do_not_notice_each_other_and_are_left_alone():
    x, u = normal(6, 20_000, dtype=torch.float32), noise(6, 20_000)
    before = x.clone()
    integers, scale = quantize(x, 8, u)
    alone = [quantize(x[i : i + 1], 8, u[i : i + 1]) for i in range(6)]
    assert torch.equal(integers, torch.cat([part for part, _ in alone]))
    assert torch.equal(scale, torch.cat([part for _, part in alone]))
    assert torch.equal(x, before)


@pytest.mark.parametrize("bits", [1, 33])
def test_bits_out_of_range(bits):
    with pytest.raises(ConfigError, match=f"bits = {bits}"):
        quantize(torch.ones(1, 1), bits, torch.zeros(1, 1))
