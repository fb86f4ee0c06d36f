"""Coarser products while models train, and nowhere else."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.models import BatchNorm2d
from raypfl.training import Network
from raypfl.training.precision import arithmetic

K, B = 3, 8
CPU = torch.device("cpu")
SEEN: list[tuple[bool, bool, bool]] = []


class Watching(nn.Flatten):
    """Notes what arithmetic there is when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        SEEN.append((torch.is_autocast_enabled("cpu"), matmul.allow_tf32, cudnn.allow_tf32))
        return super().forward(x)


def mlp() -> nn.Module:
    layers = [("flatten", nn.Flatten()), ("fc", nn.Linear(36, 7)), ("act", nn.Tanh())]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(7, 3))]))


def conv() -> nn.Module:
    layers = [
        ("conv", nn.Conv2d(1, 4, 3)),
        ("norm", BatchNorm2d(4)),
        ("flatten", Watching()),
    ]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(64, 3))]))


def models(build, precision: str, rows: int = K) -> tuple[Network, Tensor, Tensor]:
    net = Network(build, "head", input_shape=(1, 6, 6), precision=precision)
    w = torch.cat([net.draw(seed) for seed in range(rows)])
    return net, w, torch.randn(rows, B, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def trained(build, precision: str, rows: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, gradients and running statistics of a step."""
    net, w, x = models(build, precision, rows)
    leaf = w[:, net.weights].clone().requires_grad_()
    buffers = w[:, net.statistics].clone()
    logits = net.bind(w, buffers, leaf=leaf)(x)
    (g,) = net.slopes(logits.square().mean((1, 2)), [leaf])
    return logits.detach(), g, buffers


@pytest.mark.parametrize("rows", [1, K])
@pytest.mark.parametrize("build", [mlp, conv])
def test_bfloat16_rounds_products_and_keeps_everything_else(build, rows) -> None:
    exact, rough = trained(build, "float32", rows), trained(build, "bfloat16", rows)
    for one, other in zip(exact, rough, strict=True):
        assert other.dtype == torch.float32
        assert not one.numel() or 0 < (one - other).norm() / one.norm() < 0.02


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@pytest.mark.parametrize("build", [mlp, conv])
def test_evaluation_has_the_bits_it_always_has(build, precision) -> None:
    net, w, x = models(build, precision)
    exact = models(build, "float32")[0]
    if precision == "tf32":
        assert torch.equal(net.bind(w)(x), exact.bind(w)(x))
    else:
        # Perceptrons take another way to the same numbers.
        torch.testing.assert_close(net.bind(w)(x), exact.bind(w)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "precision, inside",
    [("float32", (False,) * 3), ("tf32", (False, True, True)), ("bfloat16", (True, False, False))],
)
def test_only_the_forward_of_a_model_in_training_is_rough(precision, inside) -> None:
    SEEN.clear()
    with arithmetic("float32", CPU):
        before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        trained(conv, precision)
        net, w, x = models(conv, precision)
        net.bind(w)(x)
        after = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert SEEN[0] == inside and SEEN[-1] == (False,) * 3 and after == (False, False)


@pytest.mark.parametrize("method", ["diversifed", "pfml", "fedtc", "apple"])
def test_a_run_learns_about_as_well(tmp_path, method) -> None:
    config = {
        "rounds": 2,
        "method": {"name": method},
        "data": {"name": "digits"},
        "partition": {"name": "pathological", "num_clients": 4, "train_size": 60, "test_size": 20},
        "model": {"name": "mlp", "hidden": [20]},
        "training": {"epochs": 3, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.1}},
        "engine": {"name": "local"},
        "storage_path": str(tmp_path),
    }
    exact, rough = (
        raypfl.run(config, [f"name={precision}", f"training.precision={precision}"]).clients()
        for precision in ("float32", "bfloat16")
    )
    assert not exact["loss"].equals(rough["loss"])
    assert (exact["loss"] - rough["loss"]).abs().max() < 0.1
