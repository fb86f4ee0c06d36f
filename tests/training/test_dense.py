"""Layers of several models as batched products: the numbers of the modules, one model after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from raypfl.models import BatchNorm2d
from raypfl.training import Network
from raypfl.training.dense import behind_trunk, dense

K, B = 3, 4


def build() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 5, bias=False),
        nn.ReLU(),
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Identity()),
        nn.Linear(4, 3),
        nn.Sigmoid(),
        nn.Linear(3, 2),
    )


def build_with_trunk() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.GroupNorm(1, 2)),
        nn.Flatten(),
        nn.Linear(4, 3),
        nn.ReLU(),
        nn.Linear(3, 2),
    )


def build_trunk_and_head() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, (2, 3)), nn.Tanh(), nn.Flatten(), nn.Identity(), nn.Linear(2, 3))


HEADS = {build: "4", build_with_trunk: "7", build_trunk_and_head: "4"}
"""Where the heads of these networks begin."""


@pytest.fixture(params=HEADS, ids=lambda build: build.__name__)
def net(request: pytest.FixtureRequest) -> Network:
    return Network(request.param, HEADS[request.param], input_shape=(1, 2, 3), dtype=torch.float64)


@pytest.fixture
def w(net: Network) -> Tensor:
    return torch.cat([net.draw(seed) for seed in range(K)])


@pytest.fixture
def x() -> Tensor:
    return torch.randn(K, B, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def one_by_one(net: Network, w: Tensor, x: Tensor) -> Tensor:
    """Outputs of the module with each row's parameters, by autograd alone."""
    module = net._build().double()
    names = [name for name, _ in module.named_parameters()]
    order = sorted(names, key=lambda name: int(name[0]) < int(net.head_name))
    shapes = dict(module.named_parameters())
    outputs = []
    for row, own in zip(w[:, net.weights], x, strict=True):
        parts = row.split([shapes[name].numel() for name in order])
        given = {name: part.view(shapes[name].shape) for name, part in zip(order, parts, strict=True)}
        outputs.append(functional_call(module, given, (own,)))
    return torch.stack(outputs)


def models(net: Network, w: Tensor, columns: slice):
    leaf = w[:, columns].clone().requires_grad_()
    return leaf, net.bind(w, w.new_zeros(K, 0), leaf=leaf, columns=columns)


@pytest.mark.parametrize("part", ["weights", "head", "extractor"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_outputs_and_gradients_are_those_of_the_modules(
    net: Network, w: Tensor, x: Tensor, part: str, in_parts: bool
) -> None:
    assert net._dense is not None
    columns: slice = getattr(net, part)
    leaf, m = models(net, w, columns)
    out = m.classify(m.features(x)) if in_parts else m(x)
    (slope,) = torch.autograd.grad(out.pow(3).sum(), leaf)
    alone = w.clone().requires_grad_()
    expected = one_by_one(net, alone, x)
    (whole,) = torch.autograd.grad(expected.pow(3).sum(), alone)
    assert torch.allclose(out, expected, atol=1e-14)
    assert torch.allclose(slope, whole[:, columns], atol=1e-13)
    assert slope.abs().sum() > 0


def test_inputs_have_gradients_and_second_derivatives_are_right(net: Network, w: Tensor, x: Tensor) -> None:
    def curvature(forward, leaf: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.autograd.grad(forward().pow(2).sum(), (leaf, inputs), create_graph=True)
        return torch.autograd.grad(sum(part.pow(2).sum() for part in found), (leaf, inputs))

    leaf, m = models(net, w, net.weights)
    inputs = x.clone().requires_grad_()
    found = curvature(lambda: m(inputs), leaf, inputs)
    alone, others = w.clone().requires_grad_(), x.clone().requires_grad_()
    expected = curvature(lambda: one_by_one(net, alone, others), alone, others)
    assert torch.allclose(found[0], expected[0][:, net.weights], atol=1e-12)
    assert torch.allclose(found[1], expected[1], atol=1e-12)


@pytest.mark.parametrize("part", ["weights", "head", "extractor"])
@pytest.mark.parametrize("detach", [False, True])
def test_features_and_logits_at_once_are_both_of_them(
    net: Network, w: Tensor, x: Tensor, part: str, detach: bool
) -> None:
    """Values, gradients by weights and inputs, and second derivatives."""

    def found(at_once: bool) -> list[Tensor]:
        leaf, m = models(net, w, getattr(net, part))
        inputs = x.clone().requires_grad_()
        if at_once:
            z, logits = m.features_and_logits(inputs, detach=detach)
        else:
            z = m.features(inputs)
            logits = m.classify(z.detach() if detach else z)
        loss = z.pow(2).sum() + logits.pow(3).sum()
        first = torch.autograd.grad(loss, (leaf, inputs), retain_graph=True)
        slopes = torch.autograd.grad(loss, (leaf, inputs), create_graph=True)
        return [z, logits, *first, *torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), (leaf, inputs))]

    values, expected = found(True), found(False)
    for number, (own, other) in enumerate(zip(values, expected, strict=True)):
        if number < 2:
            assert torch.equal(own, other)
        else:
            assert torch.allclose(own, other, rtol=1e-11, atol=1e-12)
    alone = w.clone().requires_grad_()
    if part == "weights" and not detach:
        loss = values[0].pow(2).sum() + one_by_one(net, alone, x).pow(3).sum()
        (whole,) = torch.autograd.grad(loss, alone)
        assert torch.allclose(values[2][:, net.head], whole[:, net.head], atol=1e-12)


def test_a_shared_head_gathers_the_gradients_of_all(net: Network, w: Tensor, x: Tensor) -> None:
    leaf, m = models(net, w, net.weights)
    head = w[:1, net.head].clone().requires_grad_()
    own, other = m.logits_of_two(x, head, detach="other")
    slopes = torch.autograd.grad(other.pow(2).sum() + 0 * own.sum(), (head, leaf))
    alone = head.detach().expand(K, -1).clone().requires_grad_()
    (each,) = torch.autograd.grad(m.classify(m.features(x).detach(), alone).pow(2).sum(), alone)
    assert torch.equal(other, m.classify(m.features(x), head))
    assert torch.allclose(slopes[0], each.sum(0, keepdim=True), atol=1e-13)
    assert not slopes[1].any(), "what does not reach the extractor moves nothing else either"


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, given, out: out)
    return layer


@pytest.mark.parametrize(
    "part",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
        nn.Sequential(nn.Linear(2, 2), nn.Flatten()),
        nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU()),
        nn.Conv2d(1, 1, 1),
        hooked(),
    ],
    ids=str,
)
def test_anything_else_is_left_to_its_module(part: nn.Module) -> None:
    assert dense(part) is None


def test_samples_that_nothing_flattens_must_be_vectors() -> None:
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    assert Network(lambda: nn.Sequential(*layers), "1", input_shape=(4,))._dense is not None
    assert Network(lambda: nn.Sequential(*layers), "1", input_shape=(5, 4))._dense is None


def test_gradients_can_be_asked_for_twice(net: Network, w: Tensor, x: Tensor) -> None:
    leaf, m = models(net, w, net.weights)
    loss = m(x).pow(2).sum()
    first, again = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_without_gradients_outputs_are_the_same(net: Network, w: Tensor, x: Tensor) -> None:
    _, m = models(net, w, net.weights)
    with torch.no_grad():
        assert torch.equal(m(x), net.bind(w)(x))


def test_a_client_alone_has_the_numbers_it_has_among_others(net: Network, w: Tensor, x: Tensor) -> None:
    together = net.bind(w)(x)
    for client in range(K):
        alone = net.bind(w[client : client + 1])(x[client : client + 1])
        assert torch.allclose(alone, together[client : client + 1], atol=1e-14)


@pytest.mark.parametrize("layer", [BatchNorm2d(2), nn.Dropout(0.5), hooked(), nn.Identity()], ids=str)
def test_a_trunk_has_no_state_no_chance_and_no_hooks(layer: nn.Module) -> None:
    part = nn.Sequential(nn.Conv2d(1, 2, 1), layer, nn.Flatten(), nn.Linear(2, 2))
    assert (behind_trunk(part) is not None) is isinstance(layer, nn.Identity)


def test_no_trunk_where_norms_stay_at_home() -> None:
    shape = (1, 2, 3)
    assert Network(build_with_trunk, "7", input_shape=shape)._dense is not None
    assert Network(build_with_trunk, "7", input_shape=shape, buffers="fedbn")._dense is None


class Trains(nn.Module):
    """Doubles its inputs while models train."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def test_a_trunk_knows_whether_models_train() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 2, 1, bias=False), Trains(), nn.Flatten(), nn.Linear(12, 2, bias=False)
        )

    net = Network(build, "3", input_shape=(1, 2, 3))
    w = torch.cat([net.draw(seed) for seed in range(K)])
    x = torch.ones(K, B, 1, 2, 3)
    assert net._dense is not None
    for _ in range(2):
        trained, shown = net.bind(w, w.new_zeros(K, 0))(x), net.bind(w)(x)
        assert torch.equal(trained, 2 * shown)
