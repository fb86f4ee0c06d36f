"""What local training means by default; a method may ask `Cohort.fit` for something else."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raypfl.config import StrictModel
from raypfl.training.optim import SGD, Adam, AdamW

Optimizer = Annotated[SGD | Adam | AdamW, Field(discriminator="name")]


class TrainingConfig(StrictModel):
    """Local training of one client in one round.

    Defaults are those of the DiversiFed protocol: 10 epochs of batches of 100 with Adam at 1e-3,
    optimizer state fresh every round, a last shorter batch kept.
    """

    epochs: int = Field(10, ge=1, description="local passes over a client's training samples a round")
    batch_size: int = Field(100, ge=1, description="samples a step; a last, shorter batch is kept")
    optimizer: Optimizer = Adam()
    lr_decay: float = Field(1.0, gt=0.0, le=1.0, description="factor on the learning rate after every round")

    def decay(self, round: int) -> float:
        """The factor on learning rates in round `round` (the first round is 1)."""
        return self.lr_decay ** (round - 1)
