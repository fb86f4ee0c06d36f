"""DiversiFed's Table VIII: what clients and the server compute a round, by counting."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from raypfl.models import build
from raypfl.paper.cells import cells
from raypfl.paper.definition import Definition
from raypfl.paper.measure import over_seeds
from raypfl.paper.report import Line
from raypfl.rng import torch_seeded
from raypfl.settings import RunConfig

SHAPES = {"fmnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100)}
"""Samples and classes: counting needs no data."""


def cost_lines(table: Definition) -> list[Line]:
    """A line for each cell: parameters, flops of a client and of the server in a round, or their ratio."""
    found = []
    for cell in cells(table, "full"):
        counted = quantities(next(iter(cell.runs.values())))
        found.append(
            Line(cell.row, cell.column, cell.printed, over_seeds([counted[cell.column]]), cell.remarks)
        )
    return found


def quantities(config: RunConfig) -> dict[str, float]:
    """By the names of the table's columns.

    A client does three forwards' worth for each sample of each epoch (backward counts twice); the server's
    distances take three operations a parameter and pair, pairs counted as m^2 / 2. Additions of a bias and
    activations are not counted, a multiplication and an addition are two.
    """
    shape, classes = SHAPES[config.data.name]
    with torch_seeded(0):
        module = build(config.model, shape, classes).module.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, *shape))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    samples: int = config.partition.train_size  # type: ignore[union-attr]
    client = 3.0 * counter.get_total_flops() * samples * config.training.epochs
    server = 1.5 * config.partition.num_clients**2 * parameters
    return {
        "parameters": parameters,
        "client flops": client,
        "server flops": server,
        "ratio %": 100 * server / client,
    }
