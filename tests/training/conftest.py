"""Cohorts of the four clients in `plain_torch.toy_data`, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from plain_torch import SIZES, toy_data

from raypfl.training import SGD, ClientData, Cohort, Network, TrainingConfig


@pytest.fixture(scope="session")
def data() -> ClientData:
    return toy_data()


@pytest.fixture
def cohort(data: ClientData) -> Callable[..., Cohort]:
    """Makes a cohort: all clients in one forward, or what is asked for."""

    def make(
        net: Network,
        *,
        ids: Sequence[int] = range(len(SIZES)),
        width: int = len(SIZES),
        round: int = 1,
        **training: object,
    ) -> Cohort:
        settings = TrainingConfig(**{"epochs": 2, "batch_size": 3, "optimizer": SGD(lr=0.1), **training})
        own = data.take(ids)
        return Cohort(net, own, torch.tensor(ids), round=round, seed=0, training=settings, width=width)

    return make
