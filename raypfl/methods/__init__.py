"""Methods by name. A method is one file; adding it here makes it known to configurations."""

from typing import Any

from raypfl.methods.contract import Clients, Message, Method, Nothing, Plan
from raypfl.methods.criticalfl import CriticalFL
from raypfl.methods.dfedavgm import DFedAvgM
from raypfl.methods.diversifed import DiversiFed
from raypfl.methods.fedamp import FedAMP
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedcac import FedCAC
from raypfl.methods.fedpac import FedPAC
from raypfl.methods.fedper import FedPer
from raypfl.methods.fedrep import FedRep
from raypfl.methods.fedrod import FedRoD
from raypfl.methods.fedrod_hyper import FedRoDHyper
from raypfl.methods.fedtc import FedTC
from raypfl.methods.local import Local
from raypfl.methods.one_lambda import OneLambda
from raypfl.methods.peer_fedavg import PeerFedAvg
from raypfl.methods.peer_fedper import PeerFedPer
from raypfl.methods.per_fedavg import PerFedAvg
from raypfl.methods.pfedme import PFedMe

METHODS: dict[str, type[Method[Any, Any, Any, Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedamp": FedAMP,
    "diversifed": DiversiFed,
    "one_lambda": OneLambda,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "fedrod_hyper": FedRoDHyper,
    "fedtc": FedTC,
    "per_fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "fedcac": FedCAC,
    "fedpac": FedPAC,
    "peer_fedavg": PeerFedAvg,
    "peer_fedper": PeerFedPer,
    "dfedavgm": DFedAvgM,
    "criticalfl": CriticalFL,
}

__all__ = ["METHODS", "Clients", "Message", "Method", "Nothing", "Plan"]
