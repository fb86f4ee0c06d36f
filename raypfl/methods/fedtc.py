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
here: whether the shared classifier is frozen during a round or a copy of it learns too (`shared_head`), and
whether the extractor also hears the own classifier's loss; whether momentum survives a round is
`training.momentum_state`. Weighting by samples and decay of rates per round (`training.lr_decay`) are the
defaults of its code base's line.
"""

# N clients, k clients of a batch.

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.methods.contract import AS_FEDAVG, Clients
from raypfl.methods.global_model import Down, GlobalModel, Up, private, upload
from raypfl.methods.requirements import require_linear_head
from raypfl.methods.start import common_start
from raypfl.training import (
    Batch,
    Cohort,
    Network,
    Rows,
    TrainingConfig,
    cross_entropy_per_sample,
    fit_two_heads,
)


class State(NamedTuple):
    """Held by a client."""

    head: Tensor
    """The client's own classifier, never overwritten, `[N, head]`."""
    private: Tensor
    """Running statistics that do not travel, `[N, private]`; usually none."""


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


class FedTC(GlobalModel[Config, State]):
    """phi_i learns on z, theta_i through the shared classifier psi; the server averages both."""

    Config = Config
    state_type = State
    summary = "FedTC: own classifier, extractor guided by the shared one"
    variants = {"live": {"shared_head": "live"}}

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_linear_head(net, self.config.name)

    def cost(self) -> float:
        return AS_FEDAVG

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        return State(start[:, net.head].clone(), private(net, start))

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
        )
        return State(fit.w[:, net.head].clone(), private(net, fit.w)), upload(net, fit.w)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        w, statistics = down if up is None else up
        return net.assemble(state.head, w[:, net.extractor], statistics, state.private)


def through_shared(m: Rows, batch: Batch, shared: Tensor) -> Tensor:
    """`CE(g(sg(z); phi_i), y) + CE(g(z; psi), y)`: the extractor learns through psi alone."""
    own, guide = m.logits_of_two(batch.x, shared, detach="own")
    return batch.mean(cross_entropy_per_sample(own, batch.y) + cross_entropy_per_sample(guide, batch.y))


def through_both(m: Rows, batch: Batch, shared: Tensor) -> Tensor:
    """`CE(g(z; phi_i), y) + CE(g(z; psi), y)`: the extractor learns through both classifiers."""
    own, guide = m.logits_of_two(batch.x, shared)
    return batch.mean(cross_entropy_per_sample(own, batch.y) + cross_entropy_per_sample(guide, batch.y))
