"""Small convolutional networks of the personalised federated learning papers, framework initialisation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import nn

from raypfl.models.base import Architecture, Layers, check_images, dense_layers, pad_to, sequential

Probability = Annotated[float, Field(ge=0, lt=1)]


class Convolution(NamedTuple):
    """A convolution of stride 1, followed by the activation and a 2 x 2 max-pooling."""

    channels: int
    kernel: int
    padding: int = 0

    def output_side(self, side: int) -> int:
        """Pixels after convolution and pooling of `side` pixels."""
        return (side + 2 * self.padding - self.kernel + 1) // 2

    def smallest_input(self, output: int) -> int:
        """Fewest pixels that leave `output` of them."""
        return 2 * output + self.kernel - 1 - 2 * self.padding


class _PooledCNN(Architecture):
    """Convolutions, each pooled, then fully connected layers, all with one activation.

    Children: conv1, conv1_act, conv1_pool, ..., flatten, fc1, fc1_act, ..., head.
    """

    hidden: ClassVar[tuple[int, ...]]
    activation: ClassVar[type[nn.Module]] = nn.ReLU

    @abstractmethod
    def convolutions(self, channels: int) -> tuple[Convolution, ...]:
        """The convolutions for images with so many channels."""

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Fully connected layers take whatever the convolutions leave of the images."""
        channels, height, width = check_images(self.name, input_shape)
        convolutions = self.convolutions(channels)
        smallest = 1
        for convolution in reversed(convolutions):
            smallest = convolution.smallest_input(smallest)
        check_images(self.name, input_shape, smallest=smallest)

        layers: Layers = []
        for i, convolution in enumerate(convolutions, start=1):
            layers += [
                (f"conv{i}", nn.Conv2d(channels, *convolution[:2], padding=convolution.padding)),
                (f"conv{i}_act", self.activation()),
                (f"conv{i}_pool", nn.MaxPool2d(2)),
            ]
            channels = convolution.channels
            height, width = convolution.output_side(height), convolution.output_side(width)
        dense = dense_layers(channels * height * width, self.hidden, num_classes, activation=self.activation)
        return sequential([*layers, ("flatten", nn.Flatten()), *dense])


class LeNet5(_PooledCNN):
    """LeNet5 with ReLU and max-pooling (DiversiFed, PFML); 28 x 28 images are zero-padded to 32 x 32."""

    name: Literal["lenet5"] = "lenet5"
    hidden: ClassVar[tuple[int, ...]] = (120, 84)

    def convolutions(self, channels: int) -> tuple[Convolution, ...]:
        """5 x 5, without padding."""
        return Convolution(6, 5), Convolution(16, 5)

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Images below 32 x 32 first pass the child `pad`, which has no parameters."""
        advice = "Those from 28 to 31 pixels are zero-padded to 32. Use a smaller network for these data."
        channels, height, width = check_images(self.name, input_shape, smallest=28, advice=advice)
        padded = (channels, max(height, 32), max(width, 32))
        network = super().build_module(padded, num_classes)
        if padded == input_shape:
            return network
        return sequential([("pad", pad_to(32, height, width)), *network.named_children()])


class CNNA(_PooledCNN):
    """CNN-A of FedTC and PFLlib: two 5 x 5 convolutions (32, 64) without padding, fc 512."""

    name: Literal["cnn_a"] = "cnn_a"
    hidden: ClassVar[tuple[int, ...]] = (512,)

    def convolutions(self, channels: int) -> tuple[Convolution, ...]:
        """5 x 5, without padding."""
        return Convolution(32, 5), Convolution(64, 5)


class CNNP(_PooledCNN):
    """CNN-P of FedPAC: three pooled convolutions on colour images, two on grey ones, LeakyReLU, fc 128.

    `depth` overrides the number of convolutions; FedPAC's code has 3 for CIFAR-10 and CINIC-10, and 2 for
    EMNIST and Fashion-MNIST.
    """

    name: Literal["cnn_p"] = "cnn_p"
    depth: Literal[2, 3] | None = None
    hidden: ClassVar[tuple[int, ...]] = (128,)
    activation: ClassVar[type[nn.Module]] = nn.LeakyReLU

    def convolutions(self, channels: int) -> tuple[Convolution, ...]:
        """The first 2 or 3 of: 5 x 5, 5 x 5 with padding 1, 3 x 3 with padding 1."""
        depth = self.depth or (2 if channels == 1 else 3)
        return (Convolution(16, 5), Convolution(32, 5, 1), Convolution(64, 3, 1))[:depth]


class FedRepCNN(_PooledCNN):
    """CIFAR-10 network of FedRep's code: two 5 x 5 convolutions (64, 64), fc 120 and 64."""

    name: Literal["cnn_fedrep"] = "cnn_fedrep"
    hidden: ClassVar[tuple[int, ...]] = (120, 64)

    def convolutions(self, channels: int) -> tuple[Convolution, ...]:
        """5 x 5, without padding."""
        return Convolution(64, 5), Convolution(64, 5)


class UAPDFLCNN(Architecture):
    """CNN of UA-PDFL: two 3 x 3 convolutions (32, 64), one pooling, fc 512, dropout.

    The paper's text puts all fully connected layers into the head (`head: fc1`, 99.8 % of the parameters);
    the released code shares everything but the last one (`head: head`, the default here).
    """

    name: Literal["cnn_uapdfl"] = "cnn_uapdfl"
    conv_dropout: Probability = 0.25
    dropout: Probability = 0.5

    def build_module(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
        """Children: conv1, conv1_act, conv2, conv2_act, pool, [drop,] flatten, fc1, ..., head."""
        channels, height, width = check_images(self.name, input_shape, smallest=2)
        layers: Layers = [
            ("conv1", nn.Conv2d(channels, 32, 3, padding=1)),
            ("conv1_act", nn.ReLU()),
            ("conv2", nn.Conv2d(32, 64, 3, padding=1)),
            ("conv2_act", nn.ReLU()),
            ("pool", nn.MaxPool2d(2)),
        ]
        if self.conv_dropout > 0:
            layers.append(("drop", nn.Dropout(self.conv_dropout)))
        flat = 64 * (height // 2) * (width // 2)
        dense = dense_layers(flat, (512,), num_classes, dropout=self.dropout)
        return sequential([*layers, ("flatten", nn.Flatten()), *dense])
