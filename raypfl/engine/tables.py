"""What methods report of a round, by column, as the tables of a run take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raypfl.algebra.phases import phase
from raypfl.methods.contract import Message, Pairs

MOST_CLIENTS = 256
"""Of a matrix between clients the rows and columns that are recorded; of more, those with the lowest ids."""


@phase("messages")
def columns_of(messages: Sequence[Message]) -> dict[str, Any]:
    """Messages, for the table of traffic."""
    return {
        name: np.array(
            [getattr(message, name) for message in messages], dtype=object if name == "kind" else np.int64
        )
        for name in Message._fields
    }


def entries_of(name: str, found: Pairs) -> dict[str, Any]:
    """A matrix, for the table of pairs; of bounded size."""
    receivers, sources, values = (field.cpu() for field in found)
    if len(receivers) > MOST_CLIENTS**2:
        lowest = torch.cat((receivers, sources)).unique()[:MOST_CLIENTS]
        kept = torch.isin(receivers, lowest) & torch.isin(sources, lowest)
        receivers, sources, values = receivers[kept], sources[kept], values[kept]
    numbers = values.double().numpy()
    return {"name": name, "receiver": receivers.numpy(), "source": sources.numpy(), "value": numbers}
