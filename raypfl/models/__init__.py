"""Networks: the zoo of the papers, a user's own modules, and normalisation that works on rows."""

from raypfl.models.base import Architecture, Built
from raypfl.models.cnn import CNNA, CNNP, UAPDFLCNN, FedRepCNN, LeNet5
from raypfl.models.imported import Imported
from raypfl.models.norm import BatchNorm1d, BatchNorm2d
from raypfl.models.perceptron import MLP, Linear
from raypfl.models.resnet import ResNet8, ResNet18
from raypfl.models.vgg import VGG11
from raypfl.models.zoo import MODELS, ModelConfig, build

__all__ = [
    "CNNA",
    "CNNP",
    "MLP",
    "MODELS",
    "UAPDFLCNN",
    "VGG11",
    "Architecture",
    "BatchNorm1d",
    "BatchNorm2d",
    "Built",
    "FedRepCNN",
    "Imported",
    "LeNet5",
    "Linear",
    "ModelConfig",
    "ResNet8",
    "ResNet18",
    "build",
]
