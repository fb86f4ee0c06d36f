"""Parameter counts, splits, buffers and shapes of every network that the papers use."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from raypfl.errors import ConfigError
from raypfl.models import MLP, MODELS, VGG11, Built, LeNet5, Linear, ModelConfig, ResNet8, ResNet18, build

CONFIG = TypeAdapter(ModelConfig)

MNIST, RGB28, CIFAR, DIGITS = (1, 28, 28), (3, 28, 28), (3, 32, 32), (64,)

# name, options, input shape, classes, parameters of the extractor, of the head
COUNTS = [
    ("linear", {}, MNIST, 10, 0, 7_850),
    ("linear", {}, (60,), 10, 0, 610),
    ("mlp", {"hidden": [64]}, MNIST, 10, 50_240, 650),
    ("mlp", {"hidden": [100]}, MNIST, 10, 78_500, 1_010),
    ("mlp", {"hidden": [20]}, (60,), 10, 1_220, 210),
    ("mlp", {"hidden": [64]}, DIGITS, 10, 64 * 64 + 64, 650),
    ("mlp", {"hidden": [32, 16], "head": "fc2"}, DIGITS, 10, 64 * 32 + 32, 32 * 16 + 16 + 16 * 10 + 10),
    ("lenet5", {}, CIFAR, 10, 61_156, 850),
    ("lenet5", {}, RGB28, 9, 61_156, 765),
    ("lenet5", {}, MNIST, 10, 61_156 - 2 * 25 * 6, 850),
    ("cnn_a", {}, CIFAR, 10, 873_408, 5_130),
    ("cnn_a", {}, MNIST, 10, 576_896, 5_130),
    ("cnn_p", {}, CIFAR, 10, 106_400, 1_290),
    ("cnn_p", {}, MNIST, 10, 115_776, 1_290),
    ("cnn_p", {}, MNIST, 62, 115_776, 7_998),
    ("cnn_p", {"depth": 3}, MNIST, 10, 416 + 12_832 + 18_496 + 256 * 128 + 128, 1_290),
    ("cnn_fedrep", {}, CIFAR, 10, 307_192, 650),
    ("cnn_uapdfl", {"head": "fc1"}, CIFAR, 10, 19_392, 8_394_250),
    ("cnn_uapdfl", {}, CIFAR, 10, 8_408_512, 5_130),
    ("cnn_uapdfl", {"head": "fc1"}, CIFAR, 100, 19_392, 8_440_420),
    ("cnn_uapdfl", {"head": "fc1"}, RGB28, 9, 19_392, 6_427_657),
    ("cnn_uapdfl", {}, RGB28, 9, 6_442_432, 4_617),
    ("resnet8", {}, CIFAR, 100, 1_232_704, 25_700),
    ("resnet8", {"norm": "group"}, CIFAR, 100, 1_232_704, 25_700),
    ("resnet8", {"stem": "3x3"}, CIFAR, 100, 1_225_024, 25_700),
    ("resnet18", {"stem": "7x7"}, CIFAR, 100, 11_176_512, 51_300),
    ("resnet18", {}, CIFAR, 10, 11_168_832, 5_130),
    ("resnet18", {"norm": "group"}, CIFAR, 100, 11_168_832, 51_300),
    ("resnet18", {"head": "layer3"}, CIFAR, 10, 675_392, 11_173_962 - 675_392),
    ("vgg11", {"classifier": "1fc"}, CIFAR, 10, 9_225_984, 5_130),
    ("vgg11", {"classifier": "1fc", "norm": "group"}, CIFAR, 10, 9_225_984, 5_130),
    ("vgg11", {"classifier": "1fc", "conv_bias": False}, CIFAR, 10, 9_225_984 - 2_752, 5_130),
    ("vgg11", {"classifier": "1fc", "head": "conv5"}, CIFAR, 10, 962_304, 9_231_114 - 962_304),
    ("vgg11", {"head": "fc1"}, CIFAR, 10, 9_225_984, 18_923_530),
    ("vgg11", {"classifier": "3fc_imagenet", "head": "fc1"}, CIFAR, 10, 9_225_984, 119_586_826),
    ("vgg11", {"classifier": "1fc", "pad": True}, RGB28, 9, 9_225_984, 4_617),
]


def parse(name: str, **options: object) -> ModelConfig:
    return CONFIG.validate_python({"name": name, **options})


def build_without_storage(name: str, options: dict, shape: tuple[int, ...], classes: int) -> Built:
    with torch.device("meta"):
        return build(parse(name, **options), shape, classes)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name, options, shape, classes, extractor, head", COUNTS)
def test_counts_and_shapes_are_those_of_the_papers(name, options, shape, classes, extractor, head):
    built = build_without_storage(name, options, shape, classes)
    first = [child for child, _ in built.module.named_children()].index(built.head)
    assert (count(built.module[:first]), count(built.module[first:])) == (extractor, head)
    assert built.module(torch.empty(2, *shape, device="meta")).shape == (2, classes)


@pytest.mark.parametrize(
    "name, options, floats, counters",
    [
        ("resnet8", {}, 2_688, 9),
        ("resnet18", {}, 9_600, 20),
        ("resnet18", {"norm": "group"}, 0, 0),
        ("vgg11", {}, 5_504, 8),
        ("lenet5", {}, 0, 0),
    ],
)
def test_running_statistics(name, options, floats, counters):
    buffers = list(build_without_storage(name, options, CIFAR, 10).module.buffers())
    assert sum(buffer.numel() for buffer in buffers if buffer.is_floating_point()) == floats
    assert sum(not buffer.is_floating_point() for buffer in buffers) == counters


def test_resnet_starts_kaiming_normal_over_fan_out():
    torch.manual_seed(0)
    module, _ = build(ResNet8(), CIFAR, 100)
    weight = module.get_submodule("layer3.0.conv2").weight
    # 589,824 draws: the standard error of their deviation is about 0.1 % of it.
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=2e-4)


def test_lenet5_pads_28_pixels_with_two_zeros_on_each_side():
    torch.manual_seed(0)
    module, _ = build(LeNet5(), MNIST, 10)
    x = torch.randn(2, *MNIST)
    by_hand = torch.zeros(2, 1, 32, 32)
    by_hand[:, :, 2:30, 2:30] = x
    assert torch.equal(module.pad(x), by_hand)
    assert "pad" not in dict(build(LeNet5(), CIFAR, 10).module.named_children())


def test_cnn_p_is_leaky_and_others_are_not():
    kinds = {
        name: {type(m) for m in build(parse(name), CIFAR, 10).module if "activation" in type(m).__module__}
        for name in ("cnn_p", "cnn_a")
    }
    assert kinds == {"cnn_p": {nn.LeakyReLU}, "cnn_a": {nn.ReLU}}


def test_dropout_can_be_switched_off():
    config = parse("cnn_uapdfl", conv_dropout=0, dropout=0)
    module, _ = build(config, CIFAR, 10)
    assert not any(isinstance(part, nn.Dropout) for part in module.modules())


def test_every_listed_model_is_buildable_and_described():
    names = [name for name in MODELS if ":" not in name]
    for name in names:
        assert build_without_storage(name, {}, CIFAR, 10).head == "head"
        assert MODELS[name].endswith(".")
    assert [name for name in MODELS if ":" in name] == ["package.module:Name"]


def test_config_survives_a_round_trip():
    for config in (MLP(hidden=(8, 4), head="fc2"), ResNet18(stem="7x7", norm="group")):
        assert CONFIG.validate_json(CONFIG.dump_json(config)) == config


@pytest.mark.parametrize(
    "config, message",
    [
        ({"name": "mlp", "stem": "3x3"}, "the model 'mlp' has no option 'stem'"),
        ({"name": "resnet8", "steem": "3x3"}, "the model 'resnet8' has no option 'steem'. Did you mean stem"),
        ({"name": "lenet"}, "'lenet5'"),
        ({"name": "mlp", "hidden": [64, 0]}, "greater than 0"),
        ({"name": "cnn_uapdfl", "dropout": 1.0}, "less than 1"),
        ({"name": "resnet18", "norm": "layer"}, "'batch' or 'group'"),
        ({"hidden": [64]}, "discriminator"),
    ],
)
def test_wrong_options_are_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        CONFIG.validate_python(config)


@pytest.mark.parametrize(
    "config, shape, words",
    [
        (VGG11(), RGB28, ["vgg11", "32 x 32", "3 x 28 x 28", "model.pad=true"]),
        (VGG11(pad=True), (1, 8, 8), ["vgg11", "28 x 28", "1 x 8 x 8"]),
        (LeNet5(), (1, 8, 8), ["lenet5", "28 x 28", "1 x 8 x 8"]),
        (parse("cnn_a"), (1, 15, 16), ["cnn_a", "16 x 16", "1 x 15 x 16"]),
        (parse("cnn_p"), (1, 11, 12), ["cnn_p", "12 x 12", "1 x 11 x 12"]),
        (ResNet8(), (60,), ["resnet8", "[channels, height, width]", "shape 60", "'mlp'"]),
    ],
)
def test_samples_that_do_not_fit_are_refused_with_what_is_needed(config, shape, words):
    with pytest.raises(ConfigError) as refusal:
        build(config, shape, 10)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("name, side", [("cnn_a", 16), ("cnn_fedrep", 16), ("cnn_p", 12), ("cnn_uapdfl", 2)])
def test_the_smallest_image_that_is_allowed_works(name, side):
    module, _ = build(parse(name), (1, side, side), 3)
    assert module(torch.zeros(2, 1, side, side)).shape == (2, 3)


def test_head_that_does_not_exist_or_has_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match=r"model.head = 'fc3' is no part of mlp. Did you mean fc1\?"):
        build(MLP(head="fc3"), DIGITS, 10)
    with pytest.raises(ConfigError, match="no part of resnet8"):
        build(ResNet8(head="layer1.0"), CIFAR, 10)
    assert build(Linear(head="flatten"), DIGITS, 10).head == "flatten"
