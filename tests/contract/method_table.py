"""The contract table: a row for every method and for variants with code of their own; new ones add a row."""

from __future__ import annotations

import ua_pdfl_rows

from raypfl.algebra import erk_counts
from raypfl.methods.apple import Config as APPLE
from raypfl.methods.criticalfl import Config as CriticalFL
from raypfl.methods.dfedavgm import Config as DFedAvgM
from raypfl.methods.dispfl import Config as DisPFL
from raypfl.methods.diversifed import Config as DiversiFed
from raypfl.methods.fedamp import Config as FedAMP
from raypfl.methods.fedavg import Config as FedAvg
from raypfl.methods.fedcac import Config as FedCAC
from raypfl.methods.fedfomo import Config as FedFomo
from raypfl.methods.fedpac import Config as FedPAC
from raypfl.methods.fedper import Config as FedPer
from raypfl.methods.fedproto import Config as FedProto
from raypfl.methods.fedrep import Config as FedRep
from raypfl.methods.fedrod import Config as FedRoD
from raypfl.methods.fedrod_hyper import Config as FedRoDHyper
from raypfl.methods.fedtc import Config as FedTC
from raypfl.methods.fml import Config as FML
from raypfl.methods.local import Config as Local
from raypfl.methods.one_lambda import Config as OneLambda
from raypfl.methods.peer_fedavg import Config as PeerFedAvg
from raypfl.methods.peer_fedper import Config as PeerFedPer
from raypfl.methods.per_fedavg import Config as PerFedAvg
from raypfl.methods.pfedme import Config as PFedMe
from raypfl.methods.pfml import Config as PFML
from raypfl.testing.row import Row, body, body_and_head, feature, mask, model, nothing, one, weights
from raypfl.topology import Full, KOut
from raypfl.training import Network


def model_and_hypernetwork(net: Network, participants: int) -> int:
    """Whatever travels of a model, and a perceptron from 3 classes over 4 units to a head."""
    return net.shared.stop + 4 * (3 + 1) + (net.head.stop - net.head.start) * (4 + 1)


def body_head_and_statistics(net: Network, participants: int) -> int:
    """Besides extractor and head, features of all 3 classes and a number."""
    return body_and_head(net, participants) + 3 * feature(net, participants) + 1


def others(net: Network, participants: int) -> int:
    """The parameters of all other participants."""
    return (participants - 1) * net.num_weights


def models_heard(net: Network, participants: int) -> int:
    """Whatever travels of a model and the number of samples, of everyone else."""
    return (participants - 1) * (net.shared.stop + 1)


def bodies_heard(net: Network, participants: int) -> int:
    """Whatever travels of an extractor and the number of samples, of everyone else."""
    return (participants - 1) * (body(net, participants) + 1)


def five_others(net: Network, participants: int) -> int:
    """The parameters of five models."""
    return 5 * net.num_weights


def six_models(net: Network, participants: int) -> int:
    """Whatever travels of six models."""
    return 6 * net.shared.stop


def model_and_six_scores(net: Network, participants: int) -> int:
    """Whatever travels of a model, and a number for each of six."""
    return net.shared.stop + 6


def sparse_models_heard(net: Network, participants: int) -> int:
    """The trained weights and whatever travels of running statistics, of everyone else."""
    statistics = net.travelling.stop - net.travelling.start
    return (participants - 1) * (sum(erk_counts(net.shapes, 0.6)) + statistics)


def plain_models_heard(net: Network, participants: int) -> int:
    """Whatever travels of a model, of everyone else."""
    return (participants - 1) * net.shared.stop


def statistics_heard(net: Network, participants: int) -> int:
    """The running statistics that travel, of everyone else."""
    return (participants - 1) * (net.shared.stop - net.num_weights)


def bytes_quantised(net: Network, participants: int) -> int:
    """A scale and 8 bits a parameter, of everyone else."""
    return (participants - 1) * (net.dtype.itemsize + net.num_weights)


def models_and_norms_heard(net: Network, participants: int) -> int:
    """Besides models and numbers of samples a number of each."""
    return models_heard(net, participants) + participants - 1


def fifths_and_norms_heard(net: Network, participants: int) -> int:
    """The same with a fifth of the parameters: those not below four fifths of the way to the last."""
    left_out = -(-4 * (net.num_weights - 1) // 5)
    return models_and_norms_heard(net, participants) - (participants - 1) * left_out


def masks_heard(net: Network, participants: int) -> int:
    """A bit a parameter in whole bytes, of everyone else."""
    return (participants - 1) * mask(net, participants)


FULL = Full(weights="samplesize")
"""Everyone hears everyone: no draw that belongs to a client's label."""
EVEN = Full(weights="uniform")
"""The same, with a matrix that is symmetric whatever the sizes."""
EVERYONE = KOut(k=100)
"""The same as `FULL`, for a method that draws for itself."""
PEERS = {"up": nothing, "without_server": True, "sent_as_stored": False}
SPARSE = {"topology": FULL, "density": 0.6, "anneal_rounds": 6}
MASKED = {**PEERS, "down": sparse_models_heard, "packed_down": {"mask": masks_heard}}

TABLE = [
    Row("local", Local(), up=nothing, down=nothing, collaborates=False),
    Row("local kept momentum", Local(), up=nothing, down=nothing, collaborates=False, momentum="keep"),
    Row("fedavg", FedAvg(), up=model, down=model, away="newest"),
    Row("fedamp", FedAMP(alpha=1.0, sigma=4.0, lam=0.3), up=weights, down=weights),
    Row("fedamp heuristic", FedAMP(attention="heuristic", alpha=1.0, lam=0.3), up=weights, down=weights),
    Row("diversifed", DiversiFed(), up=weights, down=weights),
    Row(
        "diversifed balanced joint squared",
        DiversiFed(form="balanced", coupling="joint", distance="squared", eta=0.1, lam=0.1),
        up=weights,
        down=weights,
    ),
    Row("one_lambda", OneLambda(lam=0.05), up=weights, down=others, sent_as_stored=False),
    Row(
        "one_lambda off",
        OneLambda(lam=0.0),
        up=weights,
        down=others,
        sent_as_stored=False,
        collaborates=False,
    ),
    *(
        Row(
            f"fedfomo {name}".strip(),
            # As many as there are clients: whom ties leave out depends on labels.
            FedFomo(num_models=6, **options),
            up=model_and_six_scores,
            down=six_models,
            chooses=True,
            sent_as_stored=False,
            momentum=momentum,
        )
        for name, options, momentum in [
            ("", {}, "reset"),
            ("paper, l1", {"no_gain": "paper", "distance": "l1"}, "reset"),
            ("explores, kept momentum", {"epsilon": 0.5, "validation": 0.3}, "keep"),
        ]
    ),
    *(
        Row(f"apple {name}".strip(), APPLE(**options), up=weights, down=five_others, sent_as_stored=False)
        for name, options in [
            ("", {"eta2": 0.01}),
            ("cos, momentum", {"eta2": 0.01, "schedule": "cos", "p_momentum": 0.9, "L": 2}),
            # As many as there are others: whom a draw leaves out depends on labels.
            ("caches", {"eta2": 0.01, "max_downloads": 5}),
        ]
    ),
    Row("fedper", FedPer(), up=body, down=body, away="own head"),
    Row("fedrep", FedRep(head_epochs=2), up=body, down=body, away="own head"),
    Row("fedrep kept momentum", FedRep(head_epochs=2), up=body, down=body, away="own head", momentum="keep"),
    Row("fedrep fresh features", FedRep(features="fresh"), up=body, down=body, away="own head"),
    Row("fedrep uniform", FedRep(head_epochs=2, aggregation="uniform"), up=body, down=body, away="own head"),
    Row(
        "fedproto",
        FedProto(),
        up=nothing,
        down=nothing,
        up_per_class=feature,
        down_per_class=feature,
        away="own by newest",
        sent_as_stored=False,
    ),
    Row(
        "fedproto during, by counts, own classes",
        FedProto(proto_pass="during", proto_weight="count", proto_absent="drop", classes="own"),
        up=nothing,
        down=nothing,
        up_per_class=feature,
        down_per_class=feature,
        counts_up_per_class=one,
        away="own by newest",
        sent_as_stored=False,
    ),
    Row(
        "fedproto all epochs, kept momentum",
        FedProto(proto_pass="all_epochs"),
        up=nothing,
        down=nothing,
        up_per_class=feature,
        down_per_class=feature,
        away="own by newest",
        sent_as_stored=False,
        momentum="keep",
    ),
    Row("fedrod", FedRoD(), up=model, down=model, away="own residual"),
    Row("fedrod zero", FedRoD(personal_init="zero"), up=model, down=model, away="own residual"),
    Row(
        "fedrod_hyper",
        FedRoDHyper(hidden=4),
        up=model_and_hypernetwork,
        down=model_and_hypernetwork,
        away="own shares",
    ),
    Row("fedtc", FedTC(classifier_lr=0.1), up=model, down=model, away="own head"),
    Row(
        "fedtc kept momentum",
        FedTC(classifier_lr=0.1),
        up=model,
        down=model,
        away="own head",
        momentum="keep",
    ),
    Row(
        "fedtc live both",
        FedTC(classifier_lr=0.1, shared_head="live", local_loss_to_extractor=True),
        up=model,
        down=model,
        away="own head",
    ),
    Row("per_fedavg", PerFedAvg(alpha=0.1, beta=0.3), up=model, down=model, away="newest"),
    Row(
        "per_fedavg hessian_free parts",
        PerFedAvg(variant="hessian_free", draw="parts", alpha=0.1, beta=0.3),
        up=model,
        down=model,
        away="newest",
    ),
    Row(
        "per_fedavg exact",
        PerFedAvg(variant="exact", alpha=0.1, beta=0.3),
        up=model,
        down=model,
        away="newest",
    ),
    Row("pfedme", PFedMe(lam=5.0, rate=0.1, inner_rate=0.1, inner_steps=3), up=model, down=model),
    Row(
        "pfedme of w, some batches, beyond the mean",
        PFedMe(lam=5.0, rate=0.1, inner_rate=0.1, inner_steps=3, beta=1.5, local_batches=4, pm="w"),
        up=model,
        down=model,
    ),
    Row(
        "pfedme all train",
        PFedMe(lam=5.0, rate=0.1, inner_rate=0.1, inner_steps=3, local_batches=4, update_scope="all"),
        up=model,
        down=model,
        trains="all",
    ),
    Row("pfml", PFML(lam=5.0, rate=0.1, local_batches=4), up=model, down=model),
    Row(
        "pfml reset, beyond the mean",
        PFML(lam=5.0, rate=0.1, local_batches=4, beta=1.5, aux="reset", agg_weight="size"),
        up=model,
        down=model,
    ),
    Row(
        "pfml anchor, of m",
        PFML(lam=5.0, rate=0.1, local_batches=4, beta=1.0, aux="anchor", pm="m"),
        up=model,
        down=model,
    ),
    Row(
        "pfml gauss_seidel",
        PFML(lam=5.0, rate=0.1, local_batches=4, beta=1.0, inner_rate=0.05, inner_order="gauss_seidel"),
        up=model,
        down=model,
    ),
    Row(
        "pfml all train",
        PFML(lam=5.0, rate=0.1, local_batches=4, beta=1.0, update_scope="all"),
        up=model,
        down=model,
        trains="all",
    ),
    Row(
        "pfml other models",
        PFML(lam=5.0, rate=0.1, local_batches=4, beta=1.0),
        up=model,
        down=model,
        personal=("wide", "conv"),
    ),
    Row("fml", FML(), up=model, down=model),
    Row("fml other models", FML(alpha=0.7, beta=0.3), up=model, down=model, personal=("wide", "conv")),
    Row(
        "fedpac",
        FedPAC(head_lr=0.2),
        up=body_head_and_statistics,
        down=body_and_head,
        up_per_class=feature,
        down_per_class=feature,
        away="own head",
        sent_as_stored=False,
    ),
    Row(
        "fedpac without alignment, all weights",
        FedPAC(head_lr=0.2, head_epochs=2, lam=0.0, weight_eps=0.0),
        up=body_head_and_statistics,
        down=body_and_head,
        up_per_class=feature,
        down_per_class=feature,
        away="own head",
        sent_as_stored=False,
    ),
    Row("fedcac", FedCAC(beta=5.0), up=weights, down=weights, masks_up=mask),
    Row("peer_fedavg", PeerFedAvg(topology=FULL), down=models_heard, **PEERS),
    Row("peer_fedavg kept momentum", PeerFedAvg(topology=FULL), down=models_heard, momentum="keep", **PEERS),
    Row("peer_fedper", PeerFedPer(topology=FULL), down=bodies_heard, **PEERS),
    Row("dispfl", DisPFL(**SPARSE), **MASKED),
    Row("dispfl kept momentum", DisPFL(clip=0.5, **SPARSE), momentum="keep", **MASKED),
    Row("dispfl random common", DisPFL(regrow="random", init_mask="common", **SPARSE), **MASKED),
    Row("dfedavgm", DFedAvgM(topology=EVEN), down=plain_models_heard, **PEERS),
    Row("dfedavgm kept momentum", DFedAvgM(topology=EVEN), down=plain_models_heard, momentum="keep", **PEERS),
    Row("criticalfl", CriticalFL(topology=EVERYONE), down=models_and_norms_heard, **PEERS),
    Row(
        "criticalfl kept momentum, clipped",
        CriticalFL(topology=EVERYONE, rule="paper", clip=0.5),
        down=models_and_norms_heard,
        momentum="keep",
        **PEERS,
    ),
    Row(
        "criticalfl sparse",
        CriticalFL(topology=EVERYONE, sparse_upload=True),
        down=fifths_and_norms_heard,
        packed_down={"mask": masks_heard},
        **PEERS,
    ),
    Row(
        "dfedavgm quantised as the paper",
        DFedAvgM(topology=EVEN, quant="paper"),
        down=statistics_heard,
        packed_down={"quant": bytes_quantised},
        **PEERS,
    ),
    Row(
        "dfedavgm quantised replicas",
        DFedAvgM(topology=EVEN, quant="replica"),
        down=statistics_heard,
        packed_down={"quant": bytes_quantised},
        **PEERS,
    ),
    *(Row(**PEERS, **row) for row in ua_pdfl_rows.ROWS),
]
