"""Own batch normalisation against PyTorch's: values, gradients, and statistics kept in rows of a matrix."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from raypfl.models import BatchNorm1d, BatchNorm2d

CASES = [
    (BatchNorm2d, nn.BatchNorm2d, (5, 3, 4, 2)),
    (BatchNorm1d, nn.BatchNorm1d, (6, 3)),
    (BatchNorm1d, nn.BatchNorm1d, (4, 3, 5)),
]


def pair(own: type[nn.Module], plain: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Both layers in float64 with the same affine parameters, none of them trivial."""
    layers = own(3).double(), plain(3).double()
    for layer in layers:
        layer.weight.data = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        layer.bias.data = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    return layers


@pytest.mark.parametrize("own, plain, shape", CASES)
def test_equals_pytorch_in_training_and_evaluation(own, plain, shape):
    generator = torch.Generator().manual_seed(0)
    layer, reference = pair(own, plain)
    for _ in range(3):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 1
        torch.testing.assert_close(layer(x), reference(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, reference.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_var, reference.running_var, rtol=1e-12, atol=1e-12)
    layer.eval(), reference.eval()
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("own, plain, shape", CASES)
def test_gradients_equal_pytorchs(own, plain, shape, training):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    cotangent = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = []
    for layer in pair(own, plain):
        leaf = x.clone().requires_grad_()
        out = layer.train(training)(leaf)
        gradients.append(torch.autograd.grad(out, [leaf, layer.weight, layer.bias], cotangent))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_one_value_per_channel_keeps_the_statistics_finite():
    layer = BatchNorm2d(1).double()
    layer(torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64))
    assert layer.running_mean.item() == pytest.approx(0.4)
    assert layer.running_var.item() == pytest.approx(0.9)


def test_wrong_rank_is_refused():
    with pytest.raises(ValueError, match="expected 4D input"):
        BatchNorm2d(3)(torch.zeros(2, 3))


def run_stacked(network: nn.Module, matrix_KP: Tensor, x_KB: Tensor) -> Tensor:
    """Call K models at once whose parameters and buffers are columns of one matrix, as views of it."""
    tensors = dict(network.named_parameters()) | {
        name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()
    }
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = matrix_KP[:, start : start + tensor.numel()].unflatten(1, tensor.shape)
        start += tensor.numel()
    return vmap(lambda state, x: functional_call(network, state, (x,)))(views, x_KB)


def test_statistics_in_strided_rows_move_as_those_of_plain_models():
    """The silent failure: with `nn.BatchNorm2d`, vmap updates a copy and the rows never move."""
    num_models = 3
    generator = torch.Generator().manual_seed(0)
    x_KB = torch.randn(num_models, 4, 2, 5, 5, generator=generator, dtype=torch.float64)

    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double() for _ in range(num_models)]
    own = nn.Sequential(nn.Conv2d(2, 3, 3), BatchNorm2d(3)).double()
    rows = [
        torch.cat([*(p.detach().flatten() for p in model.parameters()), *statistics(model)])
        for model in plain
    ]
    matrix_KP = torch.stack(rows)

    out = run_stacked(own, matrix_KP, x_KB)

    for k, model in enumerate(plain):
        torch.testing.assert_close(out[k], model(x_KB[k]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(matrix_KP[k, -6:], torch.cat(statistics(model)), rtol=1e-12, atol=1e-12)
        assert not torch.equal(matrix_KP[k, -6:], rows[k][-6:])
        assert torch.equal(matrix_KP[k, :-6], rows[k][:-6])


def statistics(model: nn.Sequential) -> list[Tensor]:
    return [model[1].running_mean, model[1].running_var]
