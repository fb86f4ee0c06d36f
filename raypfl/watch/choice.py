"""From what `watch` names to watchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec

from raypfl.errors import ConfigError
from raypfl.watch.base import Watcher
from raypfl.watch.config import MlflowConfig, TensorboardConfig, WandbConfig
from raypfl.watch.mlflow import Mlflow
from raypfl.watch.tensorboard import Tensorboard
from raypfl.watch.wandb import Wandb

AnyConfig = TensorboardConfig | MlflowConfig | WandbConfig

PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
"""What each needs; the extra of the same name installs it."""

MAKE: dict[type[AnyConfig], Callable[..., Watcher]] = {
    TensorboardConfig: Tensorboard,
    MlflowConfig: Mlflow,
    WandbConfig: Wandb,
}


def check_installed(chosen: Iterable[AnyConfig]) -> None:
    """Refuse what cannot be used, before anything starts.

    Raises:
        ConfigError: its package is missing.
    """
    for config in chosen:
        package = PACKAGES[config.name]
        if find_spec(package) is None:
            raise ConfigError(
                f"watch = {config.name}: the package {package} is not installed. Install it with "
                f"pip install 'raypfl[{config.name}]', or leave {config.name} out of watch."
            )


def watchers_of(chosen: Sequence[AnyConfig]) -> dict[str, Watcher]:
    """The watchers by name; none has done anything yet."""
    return {config.name: MAKE[type(config)](config) for config in chosen}
