"""Fully connected networks for inputs of any shape."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PositiveInt
from torch import nn

from raypfl.models.base import Architecture, dense_layers, sequential


class Linear(Architecture):
    """Multinomial logistic regression (MLR): one linear layer on the flattened sample."""

    name: Literal["linear"] = "linear"

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Children: flatten, head."""
        layers = dense_layers(math.prod(input_shape), (), num_classes)
        return sequential([("flatten", nn.Flatten()), *layers])


class MLP(Architecture):
    """Multi-layer perceptron with ReLU; `hidden` lists the widths.

    `hidden: [64]` on 28 x 28 images is DiversiFed's MLP (50,890 parameters); `[100]` and, on 60 features,
    `[20]` are the DNNs of pFedMe and PFML.
    """

    name: Literal["mlp"] = "mlp"
    hidden: tuple[PositiveInt, ...] = (64,)

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Children: flatten, fc1, fc1_act, ..., head."""
        layers = dense_layers(math.prod(input_shape), self.hidden, num_classes)
        return sequential([("flatten", nn.Flatten()), *layers])
