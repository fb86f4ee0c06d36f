"""Methods by name. A method is one file; adding it here makes it known to configurations."""

from typing import Any

from raypfl.methods.apple import APPLE
from raypfl.methods.contract import Clients, Message, Method, Nothing, Pairs, Plan
from raypfl.methods.criticalfl import CriticalFL
from raypfl.methods.dfedavgm import DFedAvgM
from raypfl.methods.dispfl import DisPFL
from raypfl.methods.diversifed import DiversiFed
from raypfl.methods.fedamp import FedAMP
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedcac import FedCAC
from raypfl.methods.fedfomo import FedFomo
from raypfl.methods.fedpac import FedPAC
from raypfl.methods.fedper import FedPer
from raypfl.methods.fedproto import FedProto
from raypfl.methods.fedrep import FedRep
from raypfl.methods.fedrod import FedRoD
from raypfl.methods.fedrod_hyper import FedRoDHyper
from raypfl.methods.fedtc import FedTC
from raypfl.methods.fml import FML
from raypfl.methods.local import Local
from raypfl.methods.one_lambda import OneLambda
from raypfl.methods.peer_fedavg import PeerFedAvg
from raypfl.methods.peer_fedper import PeerFedPer
from raypfl.methods.per_fedavg import PerFedAvg
from raypfl.methods.pfedme import PFedMe
from raypfl.methods.pfml import PFML
from raypfl.methods.ua_pdfl import UAPDFL

METHODS: dict[str, type[Method[Any, Any, Any, Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedamp": FedAMP,
    "diversifed": DiversiFed,
    "one_lambda": OneLambda,
    "fedfomo": FedFomo,
    "apple": APPLE,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedproto": FedProto,
    "fedrod": FedRoD,
    "fedrod_hyper": FedRoDHyper,
    "fedtc": FedTC,
    "per_fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "pfml": PFML,
    "fml": FML,
    "fedcac": FedCAC,
    "fedpac": FedPAC,
    "peer_fedavg": PeerFedAvg,
    "peer_fedper": PeerFedPer,
    "dfedavgm": DFedAvgM,
    "criticalfl": CriticalFL,
    "dispfl": DisPFL,
    "ua_pdfl": UAPDFL,
}

__all__ = ["METHODS", "Clients", "Message", "Method", "Nothing", "Pairs", "Plan"]
