"""Residual networks of basic blocks (He et al., CVPR 2016)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from raypfl.models.base import DEFAULT_HEAD, Architecture, Layers, check_images, sequential
from raypfl.models.norm import Norm, make_norm

Stem = Literal["7x7", "3x3"]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        """From `inputs` to `width` channels; `stride` is that of the first convolution."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), make_norm(norm, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """From [B, inputs, H, W] to [B, width, H / stride, W / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class _ResNet(Architecture):
    """Stages of basic blocks; every stage but the first halves the resolution.

    Stem "7x7" has stride 2 and is followed by a pooling; "3x3" keeps the resolution, for small images.
    Convolutions start Kaiming normal over fan-out, as in torchvision. Children: stem, layer1, ..., pool,
    flatten, head.
    """

    widths: ClassVar[tuple[int, ...]]
    blocks: ClassVar[int]
    stem: Stem
    norm: Norm = "batch"

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Takes images of any size."""
        channels, _, _ = check_images(self.name, input_shape)
        inputs = self.widths[0]
        layers: Layers = [("stem", self._build_stem(channels, inputs))]
        for i, width in enumerate(self.widths):
            stage: list[nn.Module] = [BasicBlock(inputs, width, 1 if i == 0 else 2, self.norm)]
            stage += [BasicBlock(width, width, 1, self.norm) for _ in range(self.blocks - 1)]
            layers.append((f"layer{i + 1}", nn.Sequential(*stage)))
            inputs = width
        layers += [
            ("pool", nn.AdaptiveAvgPool2d(1)),
            ("flatten", nn.Flatten()),
            (DEFAULT_HEAD, nn.Linear(inputs, num_classes)),
        ]
        network = sequential(layers)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return network

    def _build_stem(self, channels: int, width: int) -> nn.Sequential:
        if self.stem == "3x3":
            convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            return nn.Sequential(convolution, make_norm(self.norm, width), nn.ReLU())
        convolution = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        pooling = nn.MaxPool2d(3, stride=2, padding=1)
        return nn.Sequential(convolution, make_norm(self.norm, width), nn.ReLU(), pooling)


class ResNet8(_ResNet):
    """ResNet-8 of DiversiFed: three basic blocks (64, 128, 256)."""

    name: Literal["resnet8"] = "resnet8"
    widths: ClassVar[tuple[int, ...]] = (64, 128, 256)
    blocks: ClassVar[int] = 1
    stem: Stem = "7x7"


class ResNet18(_ResNet):
    """ResNet-18, with a 3 x 3 stem for small images (UA-PDFL) or torchvision's 7 x 7 one (FedTC)."""

    name: Literal["resnet18"] = "resnet18"
    widths: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)
    blocks: ClassVar[int] = 2
    stem: Stem = "3x3"
