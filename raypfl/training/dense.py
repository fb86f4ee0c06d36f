"""Linear layers with activations between them, K models at once: a batched matrix product a layer.

What `vmap` makes of the same modules costs more than the products themselves in small networks: it binds and
dispatches layer by layer, and on the way back clones the gradient of each weight and puts them all together
once more. Here each gradient is written where it belongs in one matrix of rows.
"""

# K models, B samples a model, P columns.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypfl.training.trunk import Passed, Trunk, is_hooked, trunk_of


class Activation(NamedTuple):
    """What a layer may end with."""

    apply_: Callable[[Tensor], Tensor]
    """In place."""
    slope: Callable[[Tensor, Tensor], Tensor]
    """The gradient by its input, from that by its output and from the output."""


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(Tensor.relu_, lambda d, y: torch.ops.aten.threshold_backward(d, y, 0.0)),
    nn.Tanh: Activation(Tensor.tanh_, torch.ops.aten.tanh_backward),
    nn.Sigmoid: Activation(Tensor.sigmoid_, torch.ops.aten.sigmoid_backward),
}


class Layer(NamedTuple):
    """One linear layer, and where its parameters are in the columns of its part of a row."""

    weight: slice
    outputs: int
    inputs: int
    bias: slice | None
    activation: Activation | None

    def matrices(self, w_KP: Tensor) -> Tensor:
        """The weights `[K, outputs, inputs]`, a view."""
        rows_KP = w_KP[:, self.weight]
        return rows_KP.view(len(rows_KP), self.outputs, self.inputs)


class Dense(NamedTuple):
    """A part of a network that is nothing but linear layers."""

    layers: tuple[Layer, ...]
    flattens: bool
    """Whether it takes samples of any shape."""
    trunk: Trunk | None = None
    """What comes before the layers and makes vectors."""

    def __call__(self, x: Tensor, w_KP: Tensor) -> Tensor:
        """Outputs `[K, B, outputs]` of each model on its own batch.

        Args:
            x: inputs `[K, B, ...]`.
            w_KP: the columns of this part, and no others.
        """
        x_KBD = x.flatten(2) if self.flattens and self.trunk is None else x
        if not self.layers and self.trunk is None:
            return x_KBD
        out_KBD: Tensor = _Layers.apply(self, x_KBD, w_KP, None, False)
        return out_KBD

    def with_inner(self, x: Tensor, w_KP: Tensor, place: int, detach: bool) -> tuple[Tensor, Tensor]:
        """What enters the layer in a place, `[K, B, inputs]`, and the outputs.

        Args:
            x: inputs `[K, B, ...]`.
            w_KP: the columns of this part.
            place: of a layer that is not given `x` itself.
            detach: outputs do not move what is before that layer.
        """
        x_KBD = x.flatten(2) if self.flattens and self.trunk is None else x
        inner_KBD, out_KBD = _Layers.apply(self, x_KBD, w_KP, place, detach)
        return inner_KBD, out_KBD

    def before(self, other: Dense) -> Dense | None:
        """This part and then `other`, whose columns come first in a row; None where that flattens again."""
        if other.flattens and (self.layers or self.trunk):
            return None
        start = max(layer.weight.stop if layer.bias is None else layer.bias.stop for layer in other.layers)
        moved = tuple(_moved(layer, start) for layer in self.layers)
        trunk = self.trunk and self.trunk._replace(start=self.trunk.start + start)
        return Dense((*moved, *other.layers), self.flattens or other.flattens, trunk)


class DenseParts(NamedTuple):
    """A network of linear layers on vectors, in two parts."""

    extractor: Dense
    head: Dense
    both: Dense | None
    """All of it at once, where all its weights are at hand as they are in a row."""


def dense_parts(
    extractor: nn.Module, head: nn.Module, input_shape: tuple[int, ...], *, trunks: bool = False
) -> DenseParts | None:
    """The parts of a network of linear layers on vectors; None for others.

    Args:
        extractor: the network before its head.
        head: the rest.
        input_shape: of one sample.
        trunks: the extractor may have other layers before its linear ones (`Trunk`).
    """
    first, last = dense(extractor), dense(head)
    if first is None and trunks:
        first = behind_trunk(extractor)
    if first is None or last is None or not last.layers:
        return None
    if not (first.flattens or last.flattens or len(input_shape) == 1):
        return None
    return DenseParts(first, last, first.before(last))


def dense(part: nn.Module) -> Dense | None:
    """The linear layers of a part of a network; None where it is anything else."""
    leaves = list(_leaves(part))
    flattens = bool(leaves) and _flattens(leaves[0])
    layers = _layers(leaves[flattens:], 0)
    return None if layers is None else Dense(layers, flattens)


def behind_trunk(part: nn.Module) -> Dense | None:
    """What flattens its samples later: a trunk and the linear layers after it; None for anything else."""
    leaves = list(_leaves(part))
    places = [place for place, module in enumerate(leaves) if _flattens(module)]
    trunk = trunk_of(leaves[: places[0]]) if places else None
    if trunk is None:
        return None
    layers = _layers(leaves[places[0] + 1 :], trunk.columns.stop)
    return None if layers is None else Dense(layers, True, trunk)


def _leaves(part: nn.Module) -> Iterator[nn.Module]:
    if type(part) is nn.Sequential and not is_hooked(part):
        for child in part:
            yield from _leaves(child)
    else:
        yield part


def _flattens(module: nn.Module) -> bool:
    whole = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return whole and not is_hooked(module)


def _layers(modules: Sequence[nn.Module], start: int) -> tuple[Layer, ...] | None:
    """Linear layers, their activations and nothing else; the columns of the first begin at `start`."""
    layers: list[Layer] = []
    for module in modules:
        if is_hooked(module):
            return None
        if type(module) is nn.Linear:
            weight = slice(start, start + module.weight.numel())
            start = weight.stop
            bias = None
            if module.bias is not None:
                bias = slice(start, start + module.out_features)
                start = bias.stop
            layers.append(Layer(weight, module.out_features, module.in_features, bias, None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(module)])
        elif type(module) is not nn.Identity:
            return None
    return tuple(layers)


def _moved(layer: Layer, by: int) -> Layer:
    weight = slice(layer.weight.start + by, layer.weight.stop + by)
    bias = None if layer.bias is None else slice(layer.bias.start + by, layer.bias.stop + by)
    return layer._replace(weight=weight, bias=bias)


def _forward(layers: tuple[Layer, ...], x_KBD: Tensor, w_KP: Tensor) -> list[Tensor]:
    """The input and every layer's output, with operations that autograd knows."""
    found = [x_KBD]
    for layer in layers:
        y_KBD = torch.bmm(found[-1], layer.matrices(w_KP).transpose(1, 2))
        if layer.bias is not None:
            y_KBD += w_KP[:, None, layer.bias]
        found.append(y_KBD if layer.activation is None else layer.activation.apply_(y_KBD))
    return found


class _Layers(torch.autograd.Function):
    """Forward and gradient of a part; the gradient of all its weights is one matrix, written once."""

    @staticmethod
    def forward(ctx: Any, part: Dense, x: Tensor, w_KP: Tensor, inner: int | None, detach: bool) -> Any:
        ctx.part, ctx.x, ctx.passed, ctx.inner, ctx.detach = part, x, None, inner, detach
        if part.trunk is not None:
            by_inputs, by_weights = ctx.needs_input_grad[1:3]
            if by_inputs or by_weights:
                ctx.passed = Passed.through(part.trunk, x, w_KP, by_inputs, by_weights)
                vectors = [z.detach() for z in ctx.passed.z]
            else:
                vectors = part.trunk(x, part.trunk.pieces(w_KP))
            x = torch.stack(vectors)
        found = _forward(part.layers, x, w_KP)
        ctx.save_for_backward(w_KP, *found)
        return found[-1] if inner is None else (found[inner], found[-1])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        w_KP, *found = ctx.saved_tensors
        part: Dense = ctx.part
        by_inputs, by_weights = ctx.needs_input_grad[1:3]
        if torch.is_grad_enabled():
            return _differentiable(ctx, w_KP, slopes, by_inputs, by_weights)
        *inner, d_KBD = slopes
        g_KP = torch.empty(w_KP.shape, dtype=w_KP.dtype, device=w_KP.device) if by_weights else None
        for number in reversed(range(len(part.layers))):
            layer, x_KBD = part.layers[number], found[number]
            if layer.activation is not None:
                d_KBD = layer.activation.slope(d_KBD, found[number + 1])
            if g_KP is not None:
                torch.bmm(d_KBD.transpose(1, 2), x_KBD, out=layer.matrices(g_KP))
                if layer.bias is not None:
                    torch.sum(d_KBD, 1, out=g_KP[:, layer.bias])
            here = inner[0] if number == ctx.inner else None
            if here is not None and ctx.detach:
                d_KBD = here
            elif number or by_inputs or part.trunk is not None:
                d_KBD = torch.bmm(d_KBD, layer.matrices(w_KP))
                if here is not None:
                    d_KBD += here
        if part.trunk is None:
            return None, d_KBD if by_inputs else None, g_KP, None, None
        by_x, trunk_KP = ctx.passed.slopes(d_KBD, by_inputs, by_weights)
        if g_KP is not None:
            g_KP[:, part.trunk.columns] = trunk_KP
        return None, by_x, g_KP, None, None


def _differentiable(
    ctx: Any, w_KP: Tensor, slopes: Sequence[Tensor], by_inputs: bool, by_weights: bool
) -> tuple[Tensor | None, ...]:
    """The same gradients with a graph of their own, for whoever wants second derivatives."""
    part, x, inner = ctx.part, ctx.x, ctx.inner
    vectors = x if part.trunk is None else torch.stack(part.trunk(x, part.trunk.pieces(w_KP)))
    wanted = [tensor for tensor, needed in ((x, by_inputs), (w_KP, by_weights)) if needed]
    if inner is None:
        outputs = [_forward(part.layers, vectors, w_KP)[-1]]
    else:
        z_KBD = _forward(part.layers[:inner], vectors, w_KP)[-1]
        rest = _forward(part.layers[inner:], z_KBD.detach() if ctx.detach else z_KBD, w_KP)
        outputs = [z_KBD, rest[-1]]
    found = list(torch.autograd.grad(outputs, wanted, list(slopes), create_graph=True))
    by_x = found.pop(0) if by_inputs else None
    return None, by_x, found.pop(0) if by_weights else None, None, None
