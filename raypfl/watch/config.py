"""What can stand under `watch`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypfl.config import StrictModel


class TensorboardConfig(StrictModel):
    """Event files for TensorBoard."""

    name: Literal["tensorboard"]
    folder: str | None = Field(None, description="where; null: tensorboard/ in the run's folder")


class MlflowConfig(StrictModel):
    """A run in MLflow."""

    name: Literal["mlflow"]
    tracking_uri: str | None = Field(None, description="the server; null: MLFLOW_TRACKING_URI")
    experiment: str = Field("raypfl", min_length=1, description="made if it is not there")


class WandbConfig(StrictModel):
    """A run in Weights & Biases."""

    name: Literal["wandb"]
    project: str = Field("raypfl", min_length=1)
    entity: str | None = Field(None, description="user or team; null: your default")
    mode: Literal["online", "offline"] = Field("online", description="offline: `wandb sync` later")


WatchConfig = Annotated[TensorboardConfig | MlflowConfig | WandbConfig, Field(discriminator="name")]
