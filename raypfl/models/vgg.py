"""VGG-11 with normalisation (Simonyan and Zisserman, ICLR 2015) and three readings of its classifier.

The papers that use it for 32 x 32 images do not say which fully connected layers they keep.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from raypfl.models.base import Architecture, Layers, check_images, dense_layers, pad_to, sequential
from raypfl.models.norm import Norm, make_norm

# Channels of the eight convolutions, grouped by the pooling that ends each group.
_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11(Architecture):
    """VGG-11 (UA-PDFL, DisPFL); `classifier` chooses its fully connected layers.

    `1fc`: 512 to classes. `3fc_512in`: 512-4096-4096-classes. `3fc_imagenet`: the same on a 7 x 7 map, so on
    25,088 inputs. `head: fc1` gives all fully connected layers to the head. `pad` zero-pads 28 x 28 images.
    """

    name: Literal["vgg11"] = "vgg11"
    classifier: Literal["1fc", "3fc_512in", "3fc_imagenet"] = "3fc_512in"
    norm: Norm = "batch"
    conv_bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    pad: bool = False

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Children: [pad,] conv1, conv1_norm, conv1_act, pool1, ..., pool, flatten, [fc1, ...,] head."""
        channels, height, width = check_images(
            self.name,
            input_shape,
            smallest=28 if self.pad else 32,
            advice="Its five poolings need 32; model.pad=true zero-pads images from 28 x 28 on.",
        )
        layers: Layers = [("pad", pad_to(32, height, width))] if min(height, width) < 32 else []
        conv = 0
        for stage, stage_widths in enumerate(_STAGES, start=1):
            for out in stage_widths:
                conv += 1
                layers += [
                    (f"conv{conv}", nn.Conv2d(channels, out, 3, padding=1, bias=self.conv_bias)),
                    (f"conv{conv}_norm", make_norm(self.norm, out)),
                    (f"conv{conv}_act", nn.ReLU()),
                ]
                channels = out
            layers.append((f"pool{stage}", nn.MaxPool2d(2)))
        side = 7 if self.classifier == "3fc_imagenet" else 1
        hidden = () if self.classifier == "1fc" else (4096, 4096)
        dense = dense_layers(channels * side * side, hidden, num_classes, dropout=self.dropout)
        return sequential([*layers, ("pool", nn.AdaptiveAvgPool2d(side)), ("flatten", nn.Flatten()), *dense])
