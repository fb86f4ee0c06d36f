"""Linear layers with activations between them, K models at once: a batched matrix product a layer.

What `vmap` makes of the same modules costs more than the products themselves in small networks: it binds and
dispatches layer by layer, and on the way back clones the gradient of each weight and puts them all together
once more. Here each gradient is written where it belongs in one matrix of rows.
"""

# K models, B samples a model, P columns.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


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

    def __call__(self, x: Tensor, w_KP: Tensor) -> Tensor:
        """Outputs `[K, B, outputs]` of each model on its own batch.

        Args:
            x: inputs `[K, B, ...]`.
            w_KP: the columns of this part, and no others.
        """
        x_KBD = x.flatten(2) if self.flattens else x
        if not self.layers:
            return x_KBD
        out_KBD: Tensor = _Layers.apply(self.layers, x_KBD, w_KP)
        return out_KBD

    def before(self, other: Dense) -> Dense | None:
        """This part and then `other`, whose columns come first in a row; None where that flattens again."""
        if other.flattens and self.layers:
            return None
        start = max(layer.weight.stop if layer.bias is None else layer.bias.stop for layer in other.layers)
        moved = tuple(_moved(layer, start) for layer in self.layers)
        return Dense((*moved, *other.layers), self.flattens or other.flattens)


class DenseParts(NamedTuple):
    """A network of linear layers on vectors, in two parts."""

    extractor: Dense
    head: Dense
    both: Dense | None
    """All of it at once, where all its weights are at hand as they are in a row."""


def dense_parts(extractor: nn.Module, head: nn.Module, input_shape: tuple[int, ...]) -> DenseParts | None:
    """The parts of a network of linear layers on vectors; None for others."""
    first, last = dense(extractor), dense(head)
    if first is None or last is None or not last.layers:
        return None
    if not (first.flattens or last.flattens or len(input_shape) == 1):
        return None
    return DenseParts(first, last, first.before(last))


def dense(part: nn.Module) -> Dense | None:
    """The linear layers of a part of a network; None where it is anything else."""
    layers: list[Layer] = []
    flattens, start = False, 0
    for module in _leaves(part):
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1) and not layers:
            flattens = True
        elif type(module) is nn.Linear:
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
    return Dense(tuple(layers), flattens)


def _leaves(part: nn.Module) -> Iterator[nn.Module]:
    if type(part) is nn.Sequential and not (part._forward_hooks or part._forward_pre_hooks):
        for child in part:
            yield from _leaves(child)
    else:
        yield part


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
    """Forward and gradient of layers; the gradient of all weights is one matrix, written once."""

    @staticmethod
    def forward(ctx: Any, layers: tuple[Layer, ...], x_KBD: Tensor, w_KP: Tensor) -> Tensor:
        found = _forward(layers, x_KBD, w_KP)
        ctx.layers = layers
        ctx.save_for_backward(w_KP, *found)
        return found[-1]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        (d_KBD,) = slopes
        w_KP, *found = ctx.saved_tensors
        _, by_inputs, by_weights = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable(ctx.layers, found[0], w_KP, d_KBD, by_inputs, by_weights)
        g_KP = torch.empty(w_KP.shape, dtype=w_KP.dtype, device=w_KP.device) if by_weights else None
        for number in reversed(range(len(ctx.layers))):
            layer, x_KBD = ctx.layers[number], found[number]
            if layer.activation is not None:
                d_KBD = layer.activation.slope(d_KBD, found[number + 1])
            if g_KP is not None:
                torch.bmm(d_KBD.transpose(1, 2), x_KBD, out=layer.matrices(g_KP))
                if layer.bias is not None:
                    torch.sum(d_KBD, 1, out=g_KP[:, layer.bias])
            if number or by_inputs:
                d_KBD = torch.bmm(d_KBD, layer.matrices(w_KP))
        return None, d_KBD if by_inputs else None, g_KP


def _differentiable(
    layers: tuple[Layer, ...], x_KBD: Tensor, w_KP: Tensor, d_KBD: Tensor, by_inputs: bool, by_weights: bool
) -> tuple[None, Tensor | None, Tensor | None]:
    """The same gradients with a graph of their own, for whoever wants second derivatives."""
    wanted = [tensor for tensor, needed in ((x_KBD, by_inputs), (w_KP, by_weights)) if needed]
    found = list(torch.autograd.grad(_forward(layers, x_KBD, w_KP)[-1], wanted, d_KBD, create_graph=True))
    return None, found.pop(0) if by_inputs else None, found.pop(0) if by_weights else None
