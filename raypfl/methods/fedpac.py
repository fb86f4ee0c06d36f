"""FedPAC: features aligned to class centroids, heads combined for each client by quadratic programmes.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR
2023, arXiv 2306.11867. One round of a client, theta received, phi_i its combined head:

    h_i, V_i, mu_ik   statistics of f(x; theta), before anything is trained (`feature_statistics`)
    phi_i             one epoch of cross-entropy on the head alone, rate `head_lr`
    theta_i           E epochs on the extractor alone, CE + lam * mean_l ||f(x_l; theta_i) - t_{y_l}||^2 / d,
                      t_k = c_k where some participant of the last round had class k, else mu_ik;
                      plain CE in the first round
    c_ik              class means of f(x; theta_i)

The server averages theta_i by samples and c_ik by class counts, and gives each participant the combination of
this round's phi_j that minimises variance plus squared bias of h (`algebra.simplex_qp`), weights below
`weight_eps` left out. Reported: the newest extractor with the combined head, before training (PRE). Who does
not take part keeps its head; a combined head is fetched at the next participation.

Against the authors' code: statistics and centroids are those of clean samples in evaluation mode, the first
from one pass (theirs: two passes of augmented ones). Its repair of a cost matrix whose float32 spectrum has a
negative value (eigenvalues below 0.01 cut, an absolute threshold) is left out, as is clipping at 0. The
matrix is a Gram matrix plus variances, here in float64, and needs neither. A cut would give every client a
matrix that is no longer made of statistics, which the solver works on, and in float32 it depends on the
machine. A client whose weights cannot be certified is an error; theirs keeps its own head.

Traffic: class counts are sent once, with registration, and are not in the ledger; neither are the marks of
which classes the server knows. Centroids are sent for classes that the sender has.
"""

# N clients, S participants, K clients of a cohort, k of them in a batch, B samples, C classes, D features.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import (
    combination_weights,
    mix,
    replace_rows,
    require_certified,
    rows_of,
    weighted_mean,
)
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Message, Method, Pairs, Plan, every_pair, same_for_all
from raypfl.methods.feature_statistics import extracted, feature_sums, kept, mean_centroids, num_features
from raypfl.methods.fedrep import on_features
from raypfl.methods.requirements import require_linear_head
from raypfl.methods.start import common_start
from raypfl.training import (
    Batch,
    Cohort,
    Network,
    Rows,
    TrainingConfig,
    cross_entropy,
    cross_entropy_per_sample,
)

LARGEST = 1.0 - 1e-9
"""Weights within rounding of a row's largest are never left out."""


class Collaboration(NamedTuple):
    """How heads were combined at the end of a round; leading axis 1, since it is about the round."""

    ids: Tensor
    """Whose, ascending, int64 `[1, S]`."""
    weights: Tensor
    """Row: who receives, column: whose head; sum 1, float64 `[1, S, S]`."""
    objective: Tensor
    """Variance plus squared bias at the optimum, float64 `[1, S]`."""
    residual: Tensor
    """Scaled residual of the optimality conditions, float64 `[1, S]`."""


class Hub(NamedTuple):
    """Held by the server."""

    body: Tensor
    """The shared extractor, with its running statistics where they travel, `[1, body]`."""
    head: Tensor
    """The head each client receives next: as combined after its last participation, `[N, head]`."""
    centroid: Tensor
    """Global centroids of the last round, `[1, C, D]`; 0 for a class that is not known."""
    known: Tensor
    """Classes that participants of the last round had, bool `[1, C]`."""
    ids: Tensor
    """This and what follows: `Collaboration` of the last round. Of its participants only, so it is no larger
    than the programmes were; for all pairs of clients it could be. int64 `[1, S]`."""
    weights: Tensor
    """float64 `[1, S, S]`."""
    objective: Tensor
    """float64 `[1, S]`."""
    residual: Tensor
    """float64 `[1, S]`."""


class State(NamedTuple):
    """Held by a client."""

    head: Tensor
    """The client's head as it was trained last, `[N, head]`."""
    kept: Tensor
    """Running statistics that do not travel: the head's, or all; `[N, kept]`, usually none."""


class Down(NamedTuple):
    """To a participant."""

    body: Tensor
    """The shared extractor, the same for everyone, `[1, body]`."""
    head: Tensor
    """Its combined head, `[S, head]`."""
    centroid: Tensor
    """Global centroids, the same for everyone, `[1, C, D]`; sent are those of known classes."""
    known: Tensor
    """Which classes are known, bool `[1, C]`; not counted."""


class Up(NamedTuple):
    """From a participant."""

    body: Tensor
    """The locally trained extractor, `[K, body]`."""
    head: Tensor
    """The locally trained head, `[K, head]`."""
    mean: Tensor
    """h: class shares times mean features of the received extractor, `[K, C, D]`."""
    variance: Tensor
    """V: total variance of h, `[K]`."""
    centroid: Tensor
    """Mean features of the trained extractor, `[K, C, D]`; sent are those of classes the client has."""
    counts: Tensor
    """Training samples a class, int64 `[K, C]`; sent once, with registration."""


class Config(StrictModel):
    """Options of FedPAC; `training.epochs` are those of the extractor, at the optimizer's learning rate."""

    name: Literal["fedpac"] = "fedpac"
    lam: float = Field(1.0, ge=0.0, description="lambda, weight of feature alignment; code: 1")
    head_epochs: int = Field(1, ge=1, description="passes over the head; code: 1")
    head_lr: float = Field(
        0.1, gt=0.0, description="rate of the head, decays as the extractor's; code: 0.1, fixed"
    )
    weight_eps: float = Field(
        1e-3, ge=0.0, lt=1.0, description="smaller weights of heads are left out; code: 1e-3, 0: none"
    )


class FedPAC(Method[Config, Hub, State, Down, Up]):
    """phi_i, then theta_i towards centroids; theta <- sum beta_i theta_i, phi_i <- sum_j alpha_ij phi_j."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"body", "centroid", "known"})
    reported = ("personalised", "pre")
    summary = "FedPAC: features aligned to class centroids, heads combined by quadratic programmes"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_linear_head(net, self.config.name)

    def cost(self) -> float:
        """Five epochs of the extractor, with one of the head and two passes without gradients beside them."""
        return 1.4

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        classes = clients.label_counts.shape[1]
        features = num_features(net, classes)
        body_and_head = net.body.stop - net.body.start + net.head.stop - net.head.start
        alike = same_for_all(net, clients, body_and_head + classes * features + 1)
        return alike + (clients.label_counts > 0).sum(1) * features * net.dtype.itemsize

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        start = common_start(net, self.seed)
        num_classes = clients.label_counts.shape[1]
        nothing = start.new_zeros(1, 0, dtype=torch.float64)
        return Hub(
            start[:, net.body].clone(),
            start[:, net.head].expand(len(clients.ids), -1),
            start.new_zeros(1, num_classes, num_features(net, num_classes)),
            torch.zeros(1, num_classes, dtype=torch.bool, device=start.device),
            *Collaboration(nothing.long(), nothing[:, :, None], nothing, nothing),
        )

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        return State(start[:, net.head].clone(), start[:, net.kept].clone())

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.body, rows_of(hub.head, plan.ids), hub.centroid, hub.known)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, config = cohort.net, self.config
        received = self.personalised(net, state, down)
        # Kept features serve statistics and head phase, unless they would differ from step to step.
        fresh = cohort.features_differ
        phase = cohort if fresh else cohort.on_features(received)
        before = feature_sums(phase, received, extracted if fresh else kept)
        w = phase.fit(
            received,
            cross_entropy if fresh else on_features,
            epochs=config.head_epochs,
            optimizer=cohort.training.optimizer.model_copy(update={"lr": config.head_lr}),
            columns=net.head,
            purpose="head batches",
        ).w
        if cohort.round == 1 or config.lam == 0.0:
            w = cohort.fit(w, cross_entropy, columns=net.extractor).w
        else:
            own_KCD = before.centroids().to(net.dtype)
            target_KCD = torch.where(down.known[:, :, None], down.centroid, own_KCD)
            w = cohort.fit(w, self.aligned, target_KCD, columns=net.extractor).w
        after = feature_sums(cohort, w)
        up = Up(
            w[:, net.body].clone(),
            w[:, net.head].clone(),
            before.mean().to(net.dtype),
            before.variance().to(net.dtype),
            after.centroids().to(net.dtype),
            after.count_KC,
        )
        return State(w[:, net.head].clone(), w[:, net.kept].clone()), up

    def aligned(self, m: Rows, batch: Batch, target_kCD: Tensor) -> Tensor:
        """`CE + lam * mean_l ||z_l - t_{y_l}||^2 / d` of each client, `[k]`."""
        z_kBD, logits_kBC = m.features_and_logits(batch.x)
        t_kBD = target_kCD.gather(1, batch.y[:, :, None].expand(-1, -1, target_kCD.shape[2]))
        loss_kB = cross_entropy_per_sample(logits_kBC, batch.y)
        return batch.mean(loss_kB + self.config.lam * (z_kBD - t_kBD).square().mean(2))

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        body, head = (down.body, down.head) if up is None else (up.body, up.head)
        return net.assemble(head, body, state.kept)

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(state.head, down.body, state.kept)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        found = self.collaboration(up, plan)
        # Rows and columns of the weights are in ascending order of ids, uploads in that of the plan.
        ascending = plan.ids.argsort()
        combined = mix(found.weights[0], up.head[ascending])
        return Hub(
            weighted_mean(plan.sizes, up.body),
            replace_rows(hub.head, found.ids[0], combined),
            mean_centroids(up.counts, up.centroid),
            (up.counts > 0).any(0, keepdim=True),
            *found,
        )

    def collaboration(self, up: Up, plan: Plan) -> Collaboration:
        """The participants' weights for each other's heads.

        Raises:
            RaypflError: the weights of a client cannot be certified; names it and the residual.
        """
        ascending = plan.ids.argsort()
        ids = plan.ids[ascending]
        found = combination_weights(up.mean[ascending], up.variance[ascending])
        weights_SS = require_certified(found, names=ids.tolist())
        weights_SS = without_small(weights_SS, self.config.weight_eps)
        return Collaboration(ids[None], weights_SS[None], found.objective_R[None], found.residual_R[None])

    def diagnose(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, float]:
        """How the heads were combined at the end of the round before; nothing in the first round.

        `own_weight` and `heads_combined` are means over that round's participants, of the weight on the own
        head and of the heads with a positive weight; `qp_objective` is a mean, `qp_residual` the largest.
        """
        if hub.ids.shape[1] == 0:
            return {}
        weights_SS = hub.weights[0]
        return {
            "own_weight": float(weights_SS.diagonal().mean()),
            "heads_combined": float((weights_SS > 0.0).sum(1).double().mean()),
            "qp_objective": float(hub.objective.mean()),
            "qp_residual": float(hub.residual.max()),
        }

    def relations(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, Pairs]:
        """The weights of heads at the end of the round before, between its participants."""
        if hub.ids.shape[1] == 0:
            return {}
        return {"head weight": every_pair(hub.ids[0], hub.weights[0])}

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        """Extractor, head, and the centroids of known classes."""
        sent = down._replace(centroid=down.centroid[:, down.known[0]], known=down.known[:, :0])
        return super().sent_down(net, plan, sent)

    def sent_up(self, net: Network, ids: Tensor, up: Up) -> list[Message]:
        """Extractor, head, statistics, and the centroids of the classes that the client has."""
        messages = []
        for row, client in enumerate(ids.split(1)):
            own = Up(*(field[row : row + 1] for field in up))
            own = own._replace(centroid=own.centroid[:, own.counts[0] > 0], counts=own.counts[:, :0])
            messages += super().sent_up(net, client, own)
        return messages


def without_small(weights_SS: Tensor, eps: float) -> Tensor:
    """Rows without their weights below `eps`, scaled to sum 1 again; a row's largest weights stay."""
    least_S1 = (LARGEST * weights_SS.amax(1, keepdim=True)).clamp_max(eps)
    left_SS = torch.where(weights_SS >= least_S1, weights_SS, 0.0)
    return left_SS / left_SS.sum(1, keepdim=True)
