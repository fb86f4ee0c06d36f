"""What local training means by default; a method may ask `Cohort.fit` for something else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypfl.config import StrictModel
from raypfl.training.augmentation import Augmentation
from raypfl.training.optim import SGD, Adam, AdamW
from raypfl.training.precision import Precision

Optimizer = Annotated[SGD | Adam | AdamW, Field(discriminator="name")]


class TrainingConfig(StrictModel):
    """Local training of one client in one round.

    Defaults are those of the DiversiFed protocol: 10 epochs of batches of 100 with Adam at 1e-3,
    optimizer state fresh every round, a last shorter batch kept.
    """

    epochs: int = Field(10, ge=1, description="local passes over a client's training samples a round")
    steps: int | None = Field(None, ge=1, description="so many batches a round for every client, not epochs")
    batch_size: int = Field(100, ge=1, description="samples a step; a last, shorter batch is kept")
    optimizer: Optimizer = Adam()
    lr_decay: float = Field(1.0, gt=0.0, le=1.0, description="factor on the learning rate, round by round")
    lr_every: int = Field(1, ge=1, description="rounds between two of these factors")
    augment: Augmentation | None = Field(
        None, description="random crops and flips of training images, such as {crop: 4, flip: true}"
    )

    precision: Precision = Field(
        "float32",
        description="of products in training: tf32 (on GPUs that have it) or bfloat16 where they gain; "
        "weights, evaluation, distances and mixing never",
    )
    momentum_state: Literal["reset", "keep"] = Field(
        "reset", description="of SGD, over rounds: fresh every round, or each client's own, kept"
    )

    @model_validator(mode="after")
    def _momentum_to_keep(self) -> TrainingConfig:
        if self.momentum_state == "keep" and not isinstance(self.optimizer, SGD):
            raise ValueError(
                f"momentum_state = keep keeps the momentum of SGD, but optimizer is {self.optimizer.name}. "
                "Use optimizer sgd, or momentum_state reset."
            )
        return self

    @property
    def keeps_momentum(self) -> bool:
        """Whether clients have a velocity that outlives a round."""
        optimizer = self.optimizer
        return self.momentum_state == "keep" and isinstance(optimizer, SGD) and optimizer.momentum > 0.0

    def decay(self, round: int) -> float:
        """The factor on learning rates in round `round`; the first is 1. `lr_decay` every `lr_every`."""
        return float(self.lr_decay ** ((round - 1) // self.lr_every))
