"""Images with their channels last: the same numbers, and only where no module can notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raypfl.models import CNNA, LeNet5, ResNet8
from raypfl.models.base import Architecture
from raypfl.training import Network
from raypfl.training.layout import channels_last, takes_channels_last


class Views(nn.Module):
    """What people write after convolutions; `view` refuses images that lie otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1)


def layers(flatten: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), flatten, nn.Linear(288, 5))


def network(flatten: type[nn.Module]) -> Network:
    return Network(lambda: layers(flatten()), "3", input_shape=(3, 8, 8), dtype=torch.float64)


def test_a_module_that_views_its_images_gets_them_as_they_are() -> None:
    assert takes_channels_last(layers(nn.Flatten())) and not takes_channels_last(layers(Views()))
    x = torch.randn(1, 2, 3, 8, 8, dtype=torch.float64)
    views, flattens = network(Views), network(nn.Flatten)
    row = views.draw(0)
    assert torch.allclose(views.bind(row)(x), flattens.bind(row)(x), rtol=1e-12)


@pytest.mark.parametrize("model", [CNNA(), ResNet8()])
def test_networks_of_this_package_take_them_last_and_answer_alike(model: Architecture) -> None:
    module = model.build_module((3, 32, 32), 10).double().eval()
    assert takes_channels_last(module)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    last = channels_last(x)
    assert torch.equal(last, x) and last.stride() == (3072, 1, 96, 3)
    plain, moved = module(x), module(last)
    assert torch.allclose(plain, moved, rtol=1e-10)
    weights = list(module.parameters())
    for expected, found in zip(
        torch.autograd.grad(plain.square().sum(), weights),
        torch.autograd.grad(moved.square().sum(), weights),
        strict=True,
    ):
        assert torch.allclose(expected, found, rtol=1e-8, atol=1e-10)


def test_what_are_no_images_or_gain_nothing_stays_as_it_is() -> None:
    assert not takes_channels_last(nn.Sequential(nn.Conv1d(3, 8, 3)))
    assert not takes_channels_last(LeNet5().build_module((3, 32, 32), 10))
    x = torch.randn(2, 3, 8)
    assert channels_last(x) is x


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("model", [CNNA(), ResNet8()])
def test_convolutions_of_one_model_and_of_trunks_see_them(
    model: Architecture, num_models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    forward = nn.Conv2d.forward

    def spy(self: nn.Conv2d, x: Tensor) -> Tensor:
        seen.append(x.stride()[1])
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", spy)
    net = Network(lambda: model.build_module((3, 32, 32), 10), "head", input_shape=(3, 32, 32))
    net.bind(torch.cat([net.draw(0)] * num_models))(torch.randn(num_models, 4, 3, 32, 32))
    together = num_models > 1 and isinstance(model, ResNet8)
    assert seen, "no convolution"
    # Under `vmap` nobody knows how they lie.
    assert together or set(seen) == {1}
