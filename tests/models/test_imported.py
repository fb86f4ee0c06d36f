"""A user's own module, by import path."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from raypfl.errors import ConfigError
from raypfl.models import Imported, ModelConfig, build

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, input_shape, width=4):
        super().__init__()
        self.body = nn.Linear(input_shape[0], width)
        self.act = nn.ReLU()
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.act(self.body(x)))


def plain(width):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU())


def forwards(**options):
    return plain(**options)


def number():
    return 7


CONSTANT = 3
"""


@pytest.fixture(autouse=True)
def own_package(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)


def imported(path: str, head: str = "fc", **kwargs: object) -> Imported:
    return Imported(name=path, head=head, kwargs=kwargs)


def test_gets_its_kwargs_and_what_its_signature_names():
    config = TypeAdapter(ModelConfig).validate_python(
        {"name": "own_networks:Net", "head": "fc", "kwargs": {"width": 5}}
    )
    module, head = build(config, (6,), 3)
    assert head == "fc"
    assert (module.body.weight.shape, module.fc.weight.shape) == ((5, 6), (3, 5))
    assert module.training


def test_function_without_our_arguments_gets_only_its_own():
    for name in ("plain", "forwards"):
        module, head = build(imported(f"own_networks:{name}", head="0", width=3), (6,), 3)
        assert isinstance(module, nn.Sequential)
        assert head == "0"


@pytest.mark.parametrize(
    "config, message",
    [
        (imported("own_missing:Net"), "importing 'own_missing' failed with ModuleNotFoundError"),
        (imported("own_broken:Net"), "importing 'own_broken' failed .*a_package_that_is_not_there"),
        (imported("own_networks:Nett"), "module 'own_networks' has no 'Nett'"),
        (imported("own_networks:CONSTANT"), "is 3. Name a subclass of torch.nn.Module or a function"),
        (imported("own_networks:number"), "made a int, not a torch.nn.Module"),
        (imported("own_networks:Net", depth=2), r"depth=2\) failed with TypeError.*set model.kwargs"),
        (imported("own_networks:plain", width=4), r"gives \(1, 4\) .*\(1, 3\) are needed.* 3 classes"),
        (imported("own_networks:Net", num_classes=5), r"gives \(1, 5\) for one sample"),
        (imported("own_networks:Net", input_shape=[5]), "cannot take samples of shape 6: RuntimeError"),
        (imported("own_networks:Net", head="fcc"), "'fcc' is no part of own_networks:Net. Did you mean fc"),
        (imported("own_networks:Net", head=""), "model.head = '' is no part of"),
        (imported("own_networks:Net", head="act"), "'act': that part .* no parameters"),
        (imported("own_networks:plain", head="1", width=3), "'1': that part .* no parameters"),
    ],
)
def test_refusals_say_what_is_wrong(config, message):
    with pytest.raises(ConfigError, match=message):
        build(config, (6,), 3)


def test_head_is_required():
    with pytest.raises(
        ValidationError, match="`head` is missing: it must name the submodule of own_networks:Net"
    ):
        Imported(name="own_networks:Net")


@pytest.mark.parametrize("path", ["own networks:Net", "own_networks:", ":Net", "a:b:c"])
def test_a_malformed_path_is_refused(path):
    with pytest.raises(ValidationError, match="is not an import path; write package.module:Name"):
        TypeAdapter(ModelConfig).validate_python({"name": path, "head": "fc"})


def test_trying_the_module_leaves_its_values_alone():
    torch.manual_seed(0)
    module, _ = build(imported("own_networks:Net"), (6,), 3)
    torch.manual_seed(0)
    expected = nn.Linear(6, 4).weight
    assert torch.equal(module.body.weight, expected)
