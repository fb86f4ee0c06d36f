"""Methods by name. A method is one file; adding it here makes it known to configurations."""

from typing import Any

from raypfl.methods.contract import Clients, Message, Method, Nothing, Plan
from raypfl.methods.diversifed import DiversiFed
from raypfl.methods.fedamp import FedAMP
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.local import Local
from raypfl.methods.one_lambda import OneLambda

METHODS: dict[str, type[Method[Any, Any, Any, Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedamp": FedAMP,
    "diversifed": DiversiFed,
    "one_lambda": OneLambda,
}

__all__ = ["METHODS", "Clients", "Message", "Method", "Nothing", "Plan"]
