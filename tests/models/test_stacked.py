"""Every network runs as a stack under `vmap`: outputs, gradients and running statistics of each model."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from raypfl.models import (
    CNNA,
    CNNP,
    MLP,
    UAPDFLCNN,
    VGG11,
    Architecture,
    FedRepCNN,
    LeNet5,
    Linear,
    ResNet8,
    ResNet18,
    build,
)

K = 2

CASES: list[tuple[Architecture, tuple[int, ...]]] = [
    (Linear(), (6,)),
    (MLP(hidden=(5, 4)), (2, 3)),
    (LeNet5(), (1, 28, 28)),
    (CNNA(), (1, 16, 16)),
    (CNNP(), (3, 16, 16)),
    (FedRepCNN(), (3, 16, 16)),
    (UAPDFLCNN(conv_dropout=0, dropout=0), (1, 6, 6)),
    (ResNet8(), (3, 16, 16)),
    (ResNet8(stem="3x3", norm="group"), (3, 8, 8)),
    (ResNet18(), (3, 8, 8)),
    (VGG11(classifier="1fc"), (3, 32, 32)),
]


def loss_of(logits: Tensor) -> Tensor:
    return logits.square().sum()


@pytest.mark.parametrize("config, shape", CASES, ids=lambda value: getattr(value, "name", None))
def test_stack_equals_each_model_alone(config, shape):
    torch.manual_seed(0)
    alone = [build(config, shape, 3).module.double() for _ in range(K)]
    x_KB = torch.randn(K, 3, *shape, dtype=torch.float64)
    before = x_KB.clone()
    parameters, buffers = stack_module_state(alone)
    counters = {name: buffer for name, buffer in buffers.items() if not buffer.is_floating_point()}
    statistics = {name: buffer for name, buffer in buffers.items() if name not in counters}
    template = copy.deepcopy(alone[0])

    def forward(parameters: dict[str, Tensor], statistics: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(template, (parameters, statistics), (x,))

    out = vmap(forward)(parameters, statistics, x_KB)
    loss_of(out).backward()

    for k, model in enumerate(alone):
        expected = model(x_KB[k])
        loss_of(expected).backward()
        torch.testing.assert_close(out[k], expected, rtol=1e-9, atol=1e-9)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name].grad[k], parameter.grad, rtol=1e-7, atol=1e-8)
        for name, buffer in model.named_buffers():
            if name in statistics:
                torch.testing.assert_close(statistics[name][k], buffer, rtol=1e-9, atol=1e-9)
    assert torch.equal(x_KB, before)


def test_no_layer_works_in_place():
    for config, shape in CASES:
        with torch.device("meta"):
            module, _ = build(config, shape if len(shape) < 3 else (3, 32, 32), 3)
        assert not any(getattr(part, "inplace", False) for part in module.modules()), config.name


def test_imagenet_classifier_repeats_the_pooled_map_under_vmap():
    pool = nn.AdaptiveAvgPool2d(7)
    x_KB = torch.arange(12.0, dtype=torch.float64).reshape(2, 3, 2, 1, 1).requires_grad_()
    out = vmap(pool)(x_KB)
    assert torch.equal(out, x_KB.expand(2, 3, 2, 7, 7))
    out.sum().backward()
    assert torch.equal(x_KB.grad, torch.full_like(x_KB, 49))
