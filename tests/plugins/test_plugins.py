"""What other packages add by entry points, and what is said of those that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SOURCE = '''
    from collections import OrderedDict
    from typing import Literal
    import numpy as np
    from torch import nn
    from raypfl.config import StrictModel
    from raypfl.data import Pool
    from raypfl.data.partitions.base import Draw, Partition
    from raypfl.methods.fedavg import FedAvg
    from raypfl.models import Architecture

    class Config(StrictModel):
        name: Literal["twin"] = "twin"

    class Twin(FedAvg):
        Config = Config
        summary = "FedAvg under another name"

    class Noise(StrictModel):
        """Labels that depend on the seed."""
        name: Literal["noise"] = "noise"

        def load(self, seed):
            rng = np.random.Generator(np.random.PCG64(seed))
            x, y = rng.normal(size=(40, 1, 4, 4)).astype(np.float32), np.arange(40) % 2
            return Pool("noise", x, y, 30, 2, None, f"noise of {seed}")

    class Odd(Partition):
        """Every client has what is its own modulo the number of clients."""
        name: Literal["odd"] = "odd"

        def draw(self, pool, seed):
            rows = [np.arange(len(pool.y))[i :: self.num_clients] for i in range(self.num_clients)]
            return [Draw(own[own < pool.num_train], own[own >= pool.num_train]) for own in rows]

    class Flat(Architecture):
        """One layer."""
        name: Literal["flat"] = "flat"

        def build_module(self, input_shape, num_classes):
            head = nn.Linear(int(np.prod(input_shape)), num_classes)
            return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=head))
'''
POINTS = {
    "raypfl.methods": {"twin": "Twin"},
    "raypfl.data": {"noise": "Noise"},
    "raypfl.partitions": {"odd": "Odd"},
    "raypfl.models": {"flat": "Flat"},
}
RUN = """
import json, sys
from typer.testing import CliRunner
import raypfl
from raypfl.cli import app

for topic in ("methods", "datasets", "partitions", "models"):
    print(CliRunner().invoke(app, ["list", topic]).stdout.splitlines()[-1])
result = raypfl.run({"rounds": 1, "seed": [0, 1], "method": {"name": "twin"}, "data": {"name": "noise"},
                     "partition": {"name": "odd", "num_clients": 3}, "model": {"name": "flat"},
                     "storage_path": sys.argv[1], "name": "added"})
print([json.loads((run.path / "environment.json").read_text())["data"] for run in result.runs])
"""


def test_all_four_kinds_are_listed_and_run(install, python, tmp_path: Path) -> None:
    install("added", SOURCE, POINTS)
    done = python("-c", RUN, str(tmp_path / "runs"))
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "twin FedAvg under another name",
        "noise Labels that depend on the seed.",
        "odd Every client has what is its own modulo the number of clients.",
        "flat One layer.",
        # Another seed, other data: nothing is kept that depends on it.
        "['noise of 0', 'noise of 1']",
    ], done.stderr


BROKEN = {
    "importing": ("raise ImportError('no such library')", "ImportError: no such library"),
    "missing": ("", "has no attribute 'Twin'"),
    "other": ("Twin = 3", "it is 3 and not a Method"),
    "abstract": (
        "from raypfl.methods import Method\nclass Twin(Method):\n    Config = int",
        "its class does not define aggregate, download, init_hub",
    ),
    "nameless": (
        "from raypfl.methods.fedavg import FedAvg\nclass Twin(FedAvg):\n    pass",
        'its configuration needs  name: Literal["nameless"] = "nameless"',
    ),
}
ASK = """
import json, sys
from raypfl.cli import app
from raypfl.configuration import load
from raypfl.errors import ConfigError
from typer.testing import CliRunner

load("configs/quickstart.yaml", ["method.name=fedavg"])
said = {"list": CliRunner().invoke(app, ["list", "methods"]).stdout}
for name in sys.argv[1:]:
    try:
        load("configs/quickstart.yaml", ["method={name: %s, mu: 1}" % name])
    except ConfigError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_packages_that_cannot_be_used_are_in_the_way_of_nobody_else(install, python) -> None:
    for name, (source, _) in BROKEN.items():
        install(f"broken_{name}", source, {"raypfl.methods": {name: "Twin"}})
    asked = python("-c", ASK, *BROKEN)
    assert asked.returncode == 0, asked.stderr
    said = json.loads(asked.stdout)
    for name, (_, words) in BROKEN.items():
        reason = f"the package broken_{name} has '{name}' (broken_{name}:Twin), which cannot be used"
        assert reason in said[name] and words in said[name]
        assert reason in said["list"] and words in said["list"]


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({"one": "fedavg"}, "the package one adds 'fedavg' to raypfl.methods, which raypfl has already"),
        (
            {"one": "twin", "two": "twin"},
            "the package two adds 'twin' to raypfl.methods, which the package one has already",
        ),
    ],
    ids=["by raypfl", "by another package"],
)
def test_a_name_that_is_taken_is_an_error(install, python, packages, words) -> None:
    for package, name in packages.items():
        install(package, SOURCE, {"raypfl.methods": {name: "Twin"}})
    found = python("-c", "from raypfl.cli import main; main()", "list", "methods")
    assert found.returncode == 2
    assert words in found.stderr and "Traceback" not in found.stderr
