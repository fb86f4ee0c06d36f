"""Pooling by whole-array operations: torch's own values and gradients, also where pixels are equal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypfl.training import Network, pooling
from raypfl.training.pooling import MaxPool2x2, with_fast_pooling


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_FEWEST", 1)


def fast() -> MaxPool2x2:
    pool = MaxPool2x2()
    pool.alone = True
    return pool


def gradient(pool: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = pool(x)
    slopes = torch.arange(1.0, y.numel() + 1).view(y.shape)
    return y.detach(), torch.autograd.grad(y, x, slopes)[0]


@pytest.mark.parametrize("shape", [(3, 2, 6, 8), (2, 3, 7, 9), (1, 1, 2, 2), (2, 1, 5, 4)])
@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], decimals: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=decimals)
    for given in (x, x.relu(), torch.zeros_like(x)):
        y, slope = gradient(fast(), given)
        expected, expected_slope = gradient(nn.MaxPool2d(2), given)
        assert torch.equal(y, expected)
        assert torch.equal(slope, expected_slope)
        with torch.no_grad():
            assert torch.equal(fast()(given), expected)


def test_what_it_is_not_made_for_goes_to_torch() -> None:
    x = torch.randn(2, 3, 4, 6)
    for given in (x.contiguous(memory_format=torch.channels_last), x[0], x.new_zeros(1, 1, 4, 300)):
        assert torch.equal(fast()(given), F.max_pool2d(given, 2))
    assert torch.equal(torch.func.vmap(MaxPool2x2())(x[None]), F.max_pool2d(x, 2)[None])


def test_only_plain_poolings_are_replaced_and_relu_comes_after_them() -> None:
    kept = [nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, padding=1), nn.AvgPool2d(2)]
    layers = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Tanh(), nn.MaxPool2d((2, 2), stride=2), *kept)
    pools = with_fast_pooling(layers)
    assert [type(layer) for layer in layers[:4]] == [MaxPool2x2, nn.ReLU, nn.Tanh, MaxPool2x2]
    assert pools == [layers[0], layers[3]]
    assert list(layers[4:]) == kept


def test_a_network_computes_what_its_module_does() -> None:
    def build() -> nn.Module:
        first = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(2 * 3 * 3, 4))

    net = Network(build, "4")
    torch.manual_seed(0)
    module = build()
    vector = torch.cat([p.detach().flatten() for layer in (module[4], module[0]) for p in layer.parameters()])
    x = torch.randn(5, 1, 6, 6)
    expected = torch.autograd.grad(
        module(x).square().sum(), [*module[4].parameters(), *module[0].parameters()]
    )
    for count in (1, 3):
        leaf = vector.expand(count, -1).clone().requires_grad_()
        out = net.bind(leaf, leaf.new_zeros(count, 0), leaf=leaf)(x.expand(count, *x.shape))
        (slope,) = torch.autograd.grad(out.square().sum(), leaf)
        assert torch.allclose(out, module(x).expand(count, -1, -1), atol=1e-5)
        flat = torch.cat([part.flatten() for part in expected])
        assert torch.allclose(slope, flat.expand(count, -1), rtol=1e-4, atol=1e-4)
