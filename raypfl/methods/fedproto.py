"""FedProto: clients exchange class prototypes, never models, and predict by the nearest prototype.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients,
AAAI 2022, arXiv 2105.00243. With z = f(x; theta_i) of d features and global prototypes c_k, a batch b moves
the client's whole model on

    CE(g(z; phi_i), y) + lam * 1 / (|b| d) sum_{l in b} ||z_l - c_{y_l}||^2

Classes without a global prototype add nothing to the sum and stay in |b| (authors' code); before the first
exchange no class has one. Then the client uploads C_ik, its mean feature of each class it has, and the server
averages them class by class. Personalised: argmin_k ||f(x; theta_i) - c_k||^2, with the model after the
client's last training and the newest prototypes (PRE; the code evaluates that once, at the end). Where no
candidate class has a prototype, as at the start, the head decides. The head's own argmax is `alternative`.

Chosen here: prototypes are those of a clean pass in evaluation mode after training, as the paper has it;
codes average features met during training (`proto_pass`). The paper's count-weighted mean has, as printed,
one more factor 1 / |N_k|, which would shrink prototypes with the number of clients; it is left out. Under
partial participation codes rebuild prototypes from the participants alone; here a class that none of them
has keeps its prototype (`proto_absent`). The evaluation of the authors' code does not reset its counters
between clients and between the two read-outs, so that it prints running mixtures; not copied.

The distance rule has no probabilities. The loss recorded with it is cross-entropy on minus the squared
distances, as in prototypical networks; classes that are no candidates count as twice as far as the farthest
candidate and 1, so they are never chosen and the loss of a sample of such a class is finite.

Traffic: prototypes alone, of known classes down and of present ones up. Which classes these are is not
counted; class counts are, where the server weights by them. All clients have the network of the run; of what
is exchanged only the number of features would have to agree.
"""

# N clients, S participants, K clients of a cohort, k of them in a batch, B samples, C classes, D features.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.methods.contract import Answer, Clients, Message, Method, Model, Plan
from raypfl.methods.feature_statistics import class_sums, feature_sums, mean_centroids, num_features
from raypfl.methods.requirements import require_linear_head
from raypfl.methods.start import common_start
from raypfl.training import Batch, Cohort, Network, Rows, TrainingConfig, cross_entropy_per_sample


class Hub(NamedTuple):
    """Held by the server."""

    prototype: Tensor
    """Global prototypes, `[1, C, D]`; 0 for a class that is not known."""
    known: Tensor
    """Which classes have one, bool `[1, C]`."""


class State(NamedTuple):
    """Held by a client."""

    w: Tensor
    """The client's own model with its own running statistics, `[N, width]`."""
    present: Tensor
    """Classes that it has training samples of, bool `[N, C]`; constant."""


class Down(NamedTuple):
    """To a participant; the same for everyone."""

    prototype: Tensor
    """Global prototypes, `[1, C, D]`; sent are those of known classes."""
    known: Tensor
    """Which classes have one, bool `[1, C]`; not counted."""


class Up(NamedTuple):
    """From a participant."""

    prototype: Tensor
    """Mean features by class, `[K, C, D]`; sent are those of classes the client has."""
    weight: Tensor
    """What each counts in the server's mean, int64 `[K, C]`: 0 for a class that the client lacks, else 1, or
    with `proto_weight: count` its training samples, which are then sent."""


class Config(StrictModel):
    """Options of FedProto."""

    name: Literal["fedproto"] = "fedproto"
    lam: float = Field(1.0, ge=0.0, description="lambda, weight of the distances to prototypes; code: 1")
    proto_pass: Literal["after", "during", "all_epochs"] = Field(
        "after",
        description="prototypes are means over a clean pass after training (paper); over what the last local "
        "epoch met while weights moved (authors' code); over all epochs (PFLlib)",
    )
    proto_weight: Literal["uniform", "count"] = Field(
        "uniform", description="server's mean over clients with the class: plain (codes), by samples (paper)"
    )
    proto_absent: Literal["carry", "drop"] = Field(
        "carry", description="classes that no participant has: keep the last prototype, or forget it (codes)"
    )
    classes: Literal["known", "own"] = Field(
        "known",
        description="candidates of a prediction: all known (PFLlib), or the client's own (authors' code)",
    )


class FedProto(Method[Config, Hub, State, Down, Up]):
    """w_i <- LT(w_i) on CE and distances to c_k; c_k <- mean_i C_ik over clients that have class k."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"prototype", "known"})
    reported = ("personalised", "pre")
    summary = "FedProto: own models drawn to shared class prototypes; the nearest one decides"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_linear_head(net, self.config.name)

    def cost(self) -> float:
        """Five epochs, and a pass without gradients; distances to C prototypes."""
        return 1.25

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        features = num_features(net, clients.label_counts.shape[1])
        a_class = features * net.dtype.itemsize
        if self.config.proto_weight == "count":
            a_class += clients.label_counts.dtype.itemsize
        return (clients.label_counts > 0).sum(1) * a_class

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        num_classes = clients.label_counts.shape[1]
        nothing = torch.zeros(1, num_classes, num_features(net, num_classes), dtype=net.dtype)
        return Hub(nothing.to(net.device), clients.label_counts.new_zeros(1, num_classes, dtype=torch.bool))

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(common_start(net, self.seed, len(clients.ids)), clients.label_counts > 0)

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.prototype, hub.known)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        config, count_KC = self.config, cohort.label_counts
        if config.proto_pass == "after":
            w = cohort.fit(state.w, self.drawn, down.prototype, down.known).w
            prototype_KCD = feature_sums(cohort, w).centroids()
        else:
            w, prototype_KCD = self._fit_and_meet(cohort, state.w, down, count_KC)
        weight_KC = count_KC if config.proto_weight == "count" else (count_KC > 0).long()
        return State(w, state.present), Up(prototype_KCD.to(cohort.net.dtype), weight_KC)

    def drawn(self, m: Rows, batch: Batch, prototype_1CD: Tensor, known_1C: Tensor) -> Tensor:
        """`CE + lam * mean over batch and features of (z_l - c_{y_l})^2` of each client, `[k]`."""
        return self._loss(*m.features_and_logits(batch.x), batch, prototype_1CD, known_1C)

    def _loss(
        self, z_kBD: Tensor, logits_kBC: Tensor, batch: Batch, prototype_1CD: Tensor, known_1C: Tensor
    ) -> Tensor:
        distance_kB = (z_kBD - prototype_1CD[0, batch.y]).square().mean(2)
        distance_kB = torch.where(known_1C[0, batch.y], distance_kB, 0.0)
        entropy_kB = cross_entropy_per_sample(logits_kBC, batch.y)
        return batch.mean(entropy_kB + self.config.lam * distance_kB)

    def _fit_and_meet(self, cohort: Cohort, w: Tensor, down: Down, count_KC: Tensor) -> tuple[Tensor, Tensor]:
        """Trained rows, and the mean feature of each class over epochs that count, float64 `[K, C, D]`."""
        epochs = cohort.training.epochs
        counted = epochs if self.config.proto_pass == "all_epochs" else 1
        num_classes = count_KC.shape[1]
        sum_KCD = w.new_zeros(len(w), *down.prototype.shape[1:], dtype=torch.float64)
        ahead_K = (epochs - counted) * cohort.sizes.double()

        def objective(
            m: Rows, batch: Batch, prototype_1CD: Tensor, known_1C: Tensor, who_k: Tensor
        ) -> Tensor:
            z_kBD, logits_kBC = m.features_and_logits(batch.x)
            met_kCD = class_sums(z_kBD.detach(), batch, num_classes)
            # A client's batches never reach over the end of an epoch.
            sum_KCD[who_k] += torch.where(ahead_K[who_k] > 0, 0.0, 1.0)[:, None, None] * met_kCD
            ahead_K[who_k] -= batch.sizes.double()
            return self._loss(z_kBD, logits_kBC, batch, prototype_1CD, known_1C)

        who_K = torch.arange(len(w), device=w.device)
        w = cohort.fit(w, objective, down.prototype, down.known, who_K).w
        return w, sum_KCD / (counted * count_KC.clamp_min(1))[:, :, None]

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """The client's model, all prototypes, and which classes are candidates: `[K, width + C D + C]`."""
        candidate_KC = down.known & state.present if self.config.classes == "own" else down.known
        num_clients = len(state.w)
        prototype_KP = down.prototype.flatten(1).expand(num_clients, -1)
        candidate_KC = candidate_KC.expand(num_clients, -1).to(state.w.dtype)
        return torch.cat([state.w, prototype_KP, candidate_KC], 1)

    def alternative(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """The client's model, which answers with its own head."""
        return state.w

    def answer(self, net: Network, model: Model, ids: Tensor, rows: Tensor) -> Answer:
        if model != "personalised":
            return super().answer(net, model, ids, rows)
        m = net.bind(rows)

        def nearest(x: Tensor) -> Tensor:
            z_kBD, head_kBC = m.features_and_logits(x)
            size = head_kBC.shape[2] * z_kBD.shape[2]
            prototype_kCD = rows[:, net.width : net.width + size].unflatten(1, (-1, z_kBD.shape[2]))
            candidate_kC = rows[:, net.width + size :] > 0
            found_kBC = closeness(z_kBD, prototype_kCD, candidate_kC)
            return torch.where(candidate_kC.any(1)[:, None, None], found_kBC, head_kBC)

        return nearest

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        prototype = mean_centroids(up.weight, up.prototype)
        known = (up.weight > 0).any(0, keepdim=True)
        if self.config.proto_absent == "drop":
            return Hub(prototype, known)
        return Hub(torch.where(known[:, :, None], prototype, hub.prototype), known | hub.known)

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        """The prototypes of known classes."""
        sent = Down(down.prototype[:, down.known[0]], down.known[:, :0])
        return super().sent_down(net, plan, sent)

    def sent_up(self, net: Network, ids: Tensor, up: Up) -> list[Message]:
        """The prototypes of classes that the client has, and its counts of them if the mean is weighted."""
        counted = self.config.proto_weight == "count"
        messages = []
        for row, client in enumerate(ids.split(1)):
            has_C = up.weight[row] > 0
            weight = up.weight[row : row + 1, has_C if counted else has_C & False]
            messages += super().sent_up(net, client, Up(up.prototype[row : row + 1, has_C], weight))
        return messages


def closeness(z_kBD: Tensor, prototype_kCD: Tensor, candidate_kC: Tensor) -> Tensor:
    """Minus the squared distance of each feature to each prototype, `[k, B, C]`.

    A class that is no candidate is twice as far as the farthest candidate, and 1.
    """
    # Not by products: they cancel where features are close to prototypes far from the origin.
    distance_kBC = torch.cdist(z_kBD, prototype_kCD, compute_mode="donot_use_mm_for_euclid_dist").square()
    candidate_k1C = candidate_kC[:, None]
    farthest_kB1 = torch.where(candidate_k1C, distance_kBC, 0.0).amax(2, keepdim=True)
    return -torch.where(candidate_k1C, distance_kBC, 2.0 * farthest_kB1 + 1.0)
