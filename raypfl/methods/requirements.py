"""What methods that split a model into extractor and head ask of it, said before a run starts."""

from __future__ import annotations

from raypfl.errors import ConfigError
from raypfl.training import Network, TrainingConfig


def require_split(net: Network, method: str) -> None:
    """Refuse a model without parameters before its head, or in it.

    Raises:
        ConfigError: the head covers every layer, or has no parameters.
    """
    if net.extractor.start == net.extractor.stop:
        raise ConfigError(
            f"method {method} needs layers before the head, but model.head = {net.head_name!r} covers "
            f"every layer ({net.num_weights} parameters) of this model. Name a later layer in model.head, or "
            "use a model with a hidden layer."
        )
    if net.head.start == net.head.stop:
        raise ConfigError(
            f"method {method} keeps the head at its client, but model.head = {net.head_name!r} has no "
            "parameters. Name a layer that has some."
        )


def require_linear_head(net: Network, method: str) -> None:
    """Refuse a head that is more than the last linear layer, besides what `require_split` refuses.

    Raises:
        ConfigError: the head is no single linear layer.
    """
    require_split(net, method)
    if not net.linear_head:
        raise ConfigError(
            f"method {method} needs a head that is one linear layer, but model.head = {net.head_name!r} is "
            "more than that. Name the last linear layer in model.head."
        )


def require_fresh_momentum(training: TrainingConfig, method: str) -> None:
    """Refuse momentum kept over rounds, for methods that train parameters beside the model's own.

    Raises:
        ConfigError: `training.momentum_state` is keep.
    """
    if training.keeps_momentum:
        raise ConfigError(
            f"method {method} trains parameters beside the model, whose momentum is fresh every round, so "
            "training.momentum_state = 'keep' would treat them unlike the model's. Use 'reset'."
        )
