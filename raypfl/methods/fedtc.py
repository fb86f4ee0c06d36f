"""FedTC: a personal classifier at home, the server's classifier as a frozen guide for the extractor.

Liu et al.: FedTC, CMC 76(3):3013-3027, 2023. A client downloads the whole global model: the extractor
overwrites its own, the classifier becomes a second, shared one (psi), and its own classifier phi_i stays.
With z = f(x; theta_i), computed once a batch:

    phi_i   <- SGD( phi_i,   grad CE(g(sg(z); phi_i), y) )        rate `classifier_lr`
    theta_i <- SGD( theta_i, grad CE(g(z; psi), y) )              rate `training.optimizer.lr`; psi is frozen

Step 1 does not touch theta_i and step 2 does not read phi_i, so their order cannot matter and both are
one step here. Extractor and own classifier are uploaded and averaged as in FedAvg. Reported: the newest
extractor with the client's own classifier, before training (PRE).

**Reconstructed**: the readable copy of the paper has no formulas, tables or code. Open in it, and options
here: whether the shared classifier is frozen during a round or a copy of it learns too (`shared_head`),
whether the extractor also hears the own classifier's loss, and whether momentum survives a round. Weighting
by samples and decay of rates per round (`training.lr_decay`) are the defaults of its code base's line.
"""

# N clients, S participants, K clients of a cohort.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.errors import ConfigError
from raypfl.methods.contract import AS_FEDAVG, Clients, Method, Plan
from raypfl.methods.requirements import require_linear_head
from raypfl.methods.start import common_start
from raypfl.training import (
    SGD,
    Batch,
    Cohort,
    Moments,
    Network,
    Rows,
    TrainingConfig,
    cross_entropy_per_sample,
    fit_two_heads,
)


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """The global extractor and classifier, the travelling columns, `[1, shared]`."""


class State(NamedTuple):
    """Held by a client."""

    head: Tensor
    """The client's own classifier, never overwritten, `[N, head]`."""
    private: Tensor
    """Running statistics that do not travel, `[N, private]`; usually none."""
    velocity: Tensor
    """Momentum of extractor and own classifier, `[N, weights]`; no columns where it is reset every round."""


class Down(NamedTuple):
    """To a participant."""

    w: Tensor
    """The global extractor and classifier, the same for everyone, `[1, shared]`."""


class Up(NamedTuple):
    """From a participant."""

    w: Tensor
    """The locally trained extractor and the client's own classifier, `[K, shared]`."""


class Config(StrictModel):
    """Options of FedTC; the extractor's rate is `training.optimizer.lr` (paper: 0.01)."""

    name: Literal["fedtc"] = "fedtc"
    classifier_lr: float = Field(1e-4, ge=0.0, description="rate of the classifiers; paper: 1e-4")
    shared_head: Literal["frozen", "live"] = Field(
        "frozen", description="live: a copy of the shared classifier learns in step 2, and is thrown away"
    )
    local_loss_to_extractor: bool = Field(
        False, description="the own classifier's loss moves the extractor, too (not stated in the paper)"
    )
    momentum_state: Literal["keep", "reset"] = Field(
        "keep", description="over rounds; open in the paper, its code base builds the optimizer once"
    )


class FedTC(Method[Config, Hub, State, Down, Up]):
    """phi_i learns on z, theta_i through the shared classifier psi; the server averages both."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"w"})
    reported = ("personalised", "pre")
    summary = "FedTC: own classifier, extractor guided by the shared one"
    variants = {"live": {"shared_head": "live"}}

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_linear_head(net, self.config.name)
        if self.config.momentum_state == "keep" and not isinstance(training.optimizer, SGD):
            raise ConfigError(
                f"method.momentum_state = 'keep' keeps the momentum of SGD, but training.optimizer is "
                f"{training.optimizer.name}. Use optimizer sgd (paper), or momentum_state 'reset'."
            )

    def cost(self) -> float:
        return AS_FEDAVG

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.shared].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        # A velocity of zero is a fresh one: v <- rho 0 + g.
        columns = net.num_weights if self.config.momentum_state == "keep" else 0
        velocity = start.new_zeros(len(start), columns)
        return State(start[:, net.head].clone(), start[:, net.private].clone(), velocity)

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, config = cohort.net, self.config
        fit = fit_two_heads(
            cohort,
            self.personalised(net, state, down),
            down.w[:, net.head],
            through_both if config.local_loss_to_extractor else through_shared,
            head_lr=config.classifier_lr,
            second_lr=config.classifier_lr,
            freeze_second=config.shared_head == "frozen",
            moments=self._kept(cohort, state),
        )
        velocity = fit.moments.first if self._keeps(cohort) else state.velocity
        own = State(fit.w[:, net.head].clone(), fit.w[:, net.private].clone(), velocity)
        return own, Up(fit.w[:, net.shared].clone())

    def _keeps(self, cohort: Cohort) -> bool:
        optimizer = cohort.training.optimizer
        return self.config.momentum_state == "keep" and isinstance(optimizer, SGD) and optimizer.momentum > 0

    def _kept(self, cohort: Cohort, state: State) -> Moments | None:
        if not self._keeps(cohort):
            return None
        steps = torch.zeros(len(cohort), dtype=torch.float32, device=cohort.net.device)
        return Moments(state.velocity, state.velocity[:, :0], steps)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        received = down.w if up is None else up.w
        return net.assemble(state.head, received[:, net.extractor.start :], state.private)

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(down.w, state.private)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(weighted_mean(plan.sizes, up.w))


def through_shared(m: Rows, batch: Batch, shared: Tensor) -> Tensor:
    """`CE(g(sg(z); phi_i), y) + CE(g(z; psi), y)`: the extractor learns through psi alone."""
    own, guide = m.logits_of_two(batch.x, shared, detach="own")
    return batch.mean(cross_entropy_per_sample(own, batch.y) + cross_entropy_per_sample(guide, batch.y))


def through_both(m: Rows, batch: Batch, shared: Tensor) -> Tensor:
    """`CE(g(z; phi_i), y) + CE(g(z; psi), y)`: the extractor learns through both classifiers."""
    own, guide = m.logits_of_two(batch.x, shared)
    return batch.mean(cross_entropy_per_sample(own, batch.y) + cross_entropy_per_sample(guide, batch.y))
