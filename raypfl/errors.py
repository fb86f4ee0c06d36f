"""Errors a person can act on: what is wrong, where, the value, what to do.

Everything a user can cause derives from `RaypflError`; the command line prints its text alone and exits
with a non-zero status. Anything else that escapes is a defect of ours and keeps its traceback.
"""

from collections.abc import Sequence


class RaypflError(ValueError):
    """Base of every error that a user's input, data or machine can cause."""


class ConfigError(RaypflError):
    """A key, a type or a value of the configuration is wrong."""


class DataError(RaypflError):
    """A data file is missing, corrupt or of the wrong form."""


class PartitionError(RaypflError):
    """The requested partition cannot be drawn from the data."""


class ShapeError(RaypflError):
    """Tensors, rows or a user's module do not fit together."""


class PlacementError(RaypflError):
    """Actors, GPUs or memory that were asked for do not fit the machine or cluster."""


class StorageError(RaypflError):
    """A run folder, file or checkpoint cannot be written or read."""


class CheckpointError(StorageError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class DivergedError(RaypflError):
    """A client's loss or parameters are no longer finite."""


class ClientError(RaypflError):
    """Code of a method, model or objective raised at a client; carries that traceback once.

    Attributes:
        clients: those that trained together when it happened, and without whom the round could be done
            again; empty where leaving them out would not help.
        hung: whether they took longer than `faults.deadline`, instead of raising.
    """

    def __init__(self, text: str, clients: Sequence[int] = (), *, hung: bool = False) -> None:
        super().__init__(text)
        self.clients, self.hung = tuple(clients), hung


class PluginError(RaypflError):
    """A package that adds to raypfl takes a name that is taken."""
