"""The contract table: a row for every method and for variants with code of their own; new ones add a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pytest
import torch

from raypfl.config import StrictModel
from raypfl.methods import METHODS, Method, start, ua_pdfl
from raypfl.methods.diversifed import Config as DiversiFed
from raypfl.methods.fedamp import Config as FedAMP
from raypfl.methods.fedavg import Config as FedAvg
from raypfl.methods.fedcac import Config as FedCAC
from raypfl.methods.fedpac import Config as FedPAC
from raypfl.methods.fedper import Config as FedPer
from raypfl.methods.fedrep import Config as FedRep
from raypfl.methods.fedrod import Config as FedRoD
from raypfl.methods.fedrod_hyper import Config as FedRoDHyper
from raypfl.methods.fedtc import Config as FedTC
from raypfl.methods.local import Config as Local
from raypfl.methods.one_lambda import Config as OneLambda
from raypfl.methods.peer_fedavg import Config as PeerFedAvg
from raypfl.methods.peer_fedper import Config as PeerFedPer
from raypfl.methods.per_fedavg import Config as PerFedAvg
from raypfl.methods.pfedme import Config as PFedMe
from raypfl.methods.ua_pdfl import BOTH
from raypfl.methods.ua_pdfl import Config as UAPDFL
from raypfl.methods.ua_pdfl_decision import draw_peer
from raypfl.rng import NOBODY, key
from raypfl.topology import Full
from raypfl.training import Network

Payload = Callable[[Network, int], int]
"""Values that one participant sends or receives in a round of so many participants."""


def nothing(net: Network, participants: int) -> int:
    return 0


def weights(net: Network, participants: int) -> int:
    """All parameters, no running statistics."""
    return net.num_weights


def model(net: Network, participants: int) -> int:
    """Whatever travels of a model."""
    return net.shared.stop


def body(net: Network, participants: int) -> int:
    """Whatever travels of an extractor."""
    return net.body.stop - net.body.start


def body_and_head(net: Network, participants: int) -> int:
    """Whatever travels of an extractor, and the parameters of a head."""
    return body(net, participants) + net.head.stop - net.head.start


def mask(net: Network, participants: int) -> int:
    """A bit a parameter, in whole bytes."""
    return -(-net.num_weights // 8)


def model_and_hypernetwork(net: Network, participants: int) -> int:
    """Whatever travels of a model, and a perceptron from 3 classes over 4 units to a head."""
    return net.shared.stop + 4 * (3 + 1) + (net.head.stop - net.head.start) * (4 + 1)


def feature(net: Network, participants: int) -> int:
    """What enters a linear head for 3 classes, for one of them."""
    return (net.head.stop - net.head.start) // 3 - 1


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


def answers_heard(net: Network, participants: int, *, auxiliary: bool = True) -> int:
    """Logits of the unit input, the features they are of and the number of samples, of everyone else."""
    features = net.bind(net.draw(0)).features(torch.zeros(1, 1, *net.input_shape, dtype=net.dtype)).numel()
    return (participants - 1) * (net.num_outputs + auxiliary * features + 1)


def answers_and_a_model(net: Network, participants: int) -> int:
    """Whatever travels of one model besides."""
    return answers_heard(net, participants) + (participants > 1) * net.shared.stop


def answers_and_extractors(net: Network, participants: int) -> int:
    """Whatever travels of all extractors besides."""
    return answers_heard(net, participants) + (participants - 1) * body(net, participants)


def answers_and_models(net: Network, participants: int) -> int:
    """Whatever travels of all models besides."""
    return answers_heard(net, participants) + (participants - 1) * net.shared.stop


def extractors_and_a_head(net: Network, participants: int) -> int:
    """All extractors besides one model's own, in place of features that a peer can find with them."""
    if net.private.start != net.private.stop:
        return answers_and_a_model(net, participants)
    head = net.shared.stop - body(net, participants)
    return (
        answers_heard(net, participants, auxiliary=False)
        + (participants - 1) * body(net, participants)
        + (participants > 1) * head
    )


def as_decided(net: Network, participants: int, down: Any) -> list[int]:
    """Besides answers one model, or all extractors and the heads of those that are close."""
    extractors = (participants - 1) * body(net, participants)
    head = net.shared.stop - body(net, participants)
    return [
        answers_heard(net, participants) + (net.shared.stop if pick >= 0 else extractors + close * head)
        for pick, close in zip(down.pick.tolist(), (down.asked == BOTH).sum(1).tolist(), strict=True)
    ]


def nothing_else(patch: pytest.MonkeyPatch, order: Sequence[int]) -> None:
    """No draws but those of cohorts belong to a client's label."""


def picks_move(patch: pytest.MonkeyPatch, order: Sequence[int]) -> None:
    """Whose model a client takes moves with both."""

    def moved(seed: int, round: int, peer: int, candidates: torch.Tensor) -> int:
        labels = torch.tensor(sorted(order[candidate] for candidate in candidates.tolist()))
        return list(order).index(draw_peer(seed, round, order[peer], labels))

    patch.setattr(ua_pdfl, "draw_peer", moved)


def picks_and_starts_move(patch: pytest.MonkeyPatch, order: Sequence[int]) -> None:
    """Besides, where each client starts."""

    def moved(seed: int, purpose: str, round: int = 0, client: int = NOBODY) -> int:
        return key(seed, purpose, round, client if client == NOBODY else order[client])

    picks_move(patch, order)
    patch.setattr(start, "key", moved)


class Row(NamedTuple):
    """What a method promises beyond what all methods do."""

    name: str
    options: StrictModel
    up: Payload
    down: Payload
    masks_up: Payload = nothing
    """Bytes of bit masks that a participant sends besides."""
    up_per_class: Payload = nothing
    """Values that a participant sends besides for each class it has samples of."""
    down_per_class: Payload = nothing
    """Values that it receives besides for each class that participants of the round before have."""
    decided: Callable[[Network, int, Any], list[int]] | None = None
    """Values that each participant receives where that is decided in the round, by the downloaded message;
    `down` is then of the first round."""
    moves: Callable[[pytest.MonkeyPatch, Sequence[int]], None] = nothing_else
    """Lets further draws that belong to a client's label move with the client."""
    away: Literal["own", "newest", "own head", "own residual", "own shares"] = "own"
    """What a client that does not take part would use: its own last model, the newest shared one, the newest
    extractor with its own head, the newest shared model with its own head added to that model's, or that with
    what the newest shared parameters make of its own label shares."""
    collaborates: bool = True
    """Whether a client's data ever reach the others' models."""
    sent_as_stored: bool = True
    """Whether messages are exactly the arrays that cross process borders; else `sent_*` say what would be."""
    moving: frozenset[str] = frozenset()
    """Server fields with a row a client that change for clients that are absent, too."""
    without_server: bool = False
    """Whether messages go from client to client; `down` is then what a client hears."""
    momentum: Literal["reset", "keep"] = "reset"
    """Over rounds; only local training knows of it, and the method should not notice."""
    tolerance: float = 1e-9
    """Float64 differences between one client at a time and all at once, after three rounds."""

    def method(self) -> Method:
        return METHODS[self.options.name](self.options, seed=3)


FULL = Full(weights="samplesize")
"""Everyone hears everyone: no draw that belongs to a client's label."""
PEERS = {"up": nothing, "without_server": True, "sent_as_stored": False}

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
    Row("fedper", FedPer(), up=body, down=body, away="own head"),
    Row("fedrep", FedRep(head_epochs=2), up=body, down=body, away="own head"),
    Row("fedrep kept momentum", FedRep(head_epochs=2), up=body, down=body, away="own head", momentum="keep"),
    Row("fedrep fresh features", FedRep(features="fresh"), up=body, down=body, away="own head"),
    Row("fedrep uniform", FedRep(head_epochs=2, aggregation="uniform"), up=body, down=body, away="own head"),
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
    Row(
        "ua_pdfl",
        UAPDFL(topology=FULL, tau=0.03),
        down=answers_and_a_model,
        decided=as_decided,
        moves=picks_move,
        **PEERS,
    ),
    Row(
        "ua_pdfl never close, kept momentum",
        UAPDFL(topology=FULL, tau=-1.0),
        down=answers_and_extractors,
        momentum="keep",
        **PEERS,
    ),
    Row(
        "ua_pdfl always drops, own starts, kept momentum",
        UAPDFL(topology=FULL, tau=1.0, init="independent"),
        down=answers_and_a_model,
        momentum="keep",
        moves=picks_and_starts_move,
        **PEERS,
    ),
    Row(
        "ua_pdfl as the code",
        UAPDFL(
            topology=FULL,
            tau=1.0,
            drop_strict=True,
            heads_strict=False,
            prox_input="batch",
            aux_avg="samplesize_peers",
        ),
        down=extractors_and_a_head,
        moves=picks_move,
        **PEERS,
    ),
    Row(
        "ua_pdfl without dropout, jeffreys, sum, zeros",
        UAPDFL(
            topology=FULL,
            tau=100.0,
            divergence="jeffreys",
            use_cd=False,
            prox_reduce="sum",
            mu=0.1,
            unit="zeros",
        ),
        down=answers_and_models,
        **PEERS,
    ),
    Row(
        "ua_pdfl without layers",
        UAPDFL(topology=FULL, tau=0.0, drop_strict=True, use_lp=False),
        down=answers_and_models,
        **PEERS,
    ),
]
