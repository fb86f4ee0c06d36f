"""Who trains in a round: the sampled clients, or all of them while only the sampled ones upload."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from raypfl.methods.contract import Clients, Plan

UpdateScope = Literal["selected", "all"]


def plan_in_scope(scope: UpdateScope, clients: Clients, round: int, sampled: Tensor) -> Plan:
    """A round of the `sampled` clients, or of everybody with the sampled ones as senders."""
    if scope == "selected":
        return Plan(round, sampled, clients.sizes[sampled])
    return Plan(round, clients.ids, clients.sizes, senders=sampled)
