"""How many models go forward together, where nobody says: a rule that looks at no host and no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from raypfl.bench.workloads import WORKLOADS
from raypfl.engine.world import make_world
from raypfl.settings import RunConfig


@pytest.mark.parametrize(
    ("workload", "num_clients", "changed", "width"),
    [
        ("mlp", 40, {}, 10),
        ("mlp", 1000, {}, 10),
        ("mlp", 8, {}, 2),
        ("mlp", 1, {}, 1),
        ("lenet5", 40, {}, 4),
        ("lenet5", 10, {}, 2),
        ("lenet5", 8, {}, 1),
        # What is only faster with a trunk goes one by one where the network uses none.
        ("lenet5", 40, {"model": {"name": "lenet5", "buffers": "fedbn"}, "method": {"name": "fedavg"}}, 1),
        ("lenet5", 40, {"training": {"precision": "bfloat16"}}, 1),
        ("resnet8", 40, {"model": {"name": "resnet8", "norm": "batch"}}, 1),
        ("lenet5", 40, {"engine": {"width": 7}}, 7),
    ],
)
def test_width_follows_from_the_network_and_the_participants(
    workload: str, num_clients: int, changed: dict[str, Any], width: int
) -> None:
    small = replace(WORKLOADS[workload], num_clients=num_clients, train_samples=2, test_samples=1)
    given = {**small.config().model_dump(mode="json"), **changed}
    config = RunConfig.model_validate(given)
    world = make_world(config, small.pool(), small.federation())
    assert world.width == width
    together = world.network(torch.device("cpu"))._dense is not None
    assert together or width == 1, "several models where one by one is faster"
