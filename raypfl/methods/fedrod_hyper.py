"""FedRoD with a hypernetwork: one shared network makes every client's personal head from its label shares.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022,
arXiv 2107.00778; the variant "hyper" of `raypfl.methods.fedrod`, whose two losses are used unchanged. The
personal head is `phi_i = nu(p_i; omega)` with `p_i(k) = n_ik / n_i` and a two-layer perceptron nu with ReLU;
omega is trained by L_p alone and averaged like the extractor. Label shares never leave their client. A client
that never trained has a personal head, too. PFLlib has no such variant and the text could not be read again:
**reconstructed** are the width of nu, its start (framework initialisation) and its learning rate (the same).
"""

# N clients, S participants, K clients of a cohort, C classes, U hidden units, H parameters of a head.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Method, Plan, same_for_all
from raypfl.methods.fedrod import log_prior, two_losses
from raypfl.methods.requirements import require_fresh_momentum, require_linear_head
from raypfl.methods.start import common_start
from raypfl.rng import key, torch_seeded
from raypfl.training import Batch, Cohort, Network, Rows, TrainingConfig, fit_two_heads


class Hub(NamedTuple):
    """Held by the server."""

    w: Tensor
    """Extractor and generic head, the travelling columns, `[1, shared]`."""
    omega: Tensor
    """The hypernetwork, `[1, U C + U + H U + H]`."""


class State(NamedTuple):
    """Held by a client."""

    label_shares: Tensor
    """p_i, of its training samples, `[N, C]`; constant."""
    private: Tensor
    """Running statistics that do not travel, `[N, private]`; usually none."""


class Down(NamedTuple):
    """To a participant; the same for everyone."""

    w: Tensor
    """Extractor and generic head, `[1, shared]`."""
    omega: Tensor
    """The hypernetwork, `[1, ...]`."""


class Up(NamedTuple):
    """From a participant, both locally trained."""

    w: Tensor
    """Extractor and generic head, `[K, shared]`."""
    omega: Tensor
    """The hypernetwork, `[K, ...]`."""


class Config(StrictModel):
    """Options of FedRoD's hypernetwork variant."""

    name: Literal["fedrod_hyper"] = "fedrod_hyper"
    gamma: float = Field(1.0, ge=0.0, description="exponent of class counts in balanced softmax; paper: 1")
    hidden: int = Field(16, ge=1, description="hidden units of the hypernetwork (reconstructed)")


class FedRoDHyper(Method[Config, Hub, State, Down, Up]):
    """(theta, phi_g) as FedRoD; phi_i = nu(p_i; omega), omega <- mean of LT on L_p."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"w", "omega"})
    columns = frozenset({"w", "omega"})
    reported = ("personalised", "pre")
    summary = "FedRoD hyper: personal heads from a shared hypernetwork"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_linear_head(net, self.config.name)
        require_fresh_momentum(training, self.config.name)

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        hidden, head = self.config.hidden, net.head.stop - net.head.start
        omega = hidden * (clients.label_counts.shape[1] + 1) + head * (hidden + 1)
        return same_for_all(net, clients, net.shared.stop + omega)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        hidden, num_classes = self.config.hidden, clients.label_counts.shape[1]
        with torch_seeded(key(self.seed, "hypernetwork")):
            layers = nn.Linear(num_classes, hidden), nn.Linear(hidden, net.head.stop - net.head.start)
        parts = [tensor.detach().flatten() for layer in layers for tensor in (layer.weight, layer.bias)]
        omega = torch.cat(parts)[None].to(net.device, net.dtype)
        return Hub(common_start(net, self.seed)[:, net.shared].clone(), omega)

    def init_state(self, net: Network, clients: Clients) -> State:
        shares = clients.label_counts.double() / clients.sizes[:, None]
        private = common_start(net, self.seed, len(clients.ids))[:, net.private].clone()
        return State(shares.to(net.dtype), private)

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.w, hub.omega)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, hidden = cohort.net, self.config.hidden
        prior_KC = log_prior(cohort.label_counts, self.config.gamma).to(net.dtype)

        def objective(m: Rows, batch: Batch, omega: Tensor, prior_kC: Tensor, share_kC: Tensor) -> Tensor:
            return two_losses(m, batch, heads(omega, share_kC, hidden), prior_kC)

        start = net.assemble(down.w, state.private)
        fit = fit_two_heads(cohort, start, down.omega, objective, prior_KC, state.label_shares)
        up = Up(fit.w[:, net.shared].clone(), fit.second)
        return State(state.label_shares, fit.w[:, net.private].clone()), up

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        """One model whose linear head is the sum of both heads, so its logits are the sum of theirs."""
        w, omega = down if up is None else up
        rows = net.assemble(w, state.private)
        rows[:, net.head] += heads(omega, state.label_shares, self.config.hidden)
        return rows

    def global_model(self, net: Network, state: State, down: Down) -> Tensor:
        return net.assemble(down.w, state.private)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(weighted_mean(plan.sizes, up.w), weighted_mean(plan.sizes, up.omega))


def heads(omega: Tensor, share_KC: Tensor, hidden: int) -> Tensor:
    """`W_2 relu(W_1 p_i + b_1) + b_2` for every client: `[K, H]`; one row of `omega` serves all."""
    num, num_classes = share_KC.shape
    outputs = (omega.shape[1] - hidden * (num_classes + 1)) // (hidden + 1)
    sizes = [hidden * num_classes, hidden, outputs * hidden, outputs]
    w1, b1, w2, b2 = omega.expand(num, -1).split(sizes, 1)
    inner = torch.baddbmm(b1[:, :, None], w1.reshape(num, hidden, num_classes), share_KC[:, :, None]).relu()
    return torch.baddbmm(b2[:, :, None], w2.reshape(num, outputs, hidden), inner)[:, :, 0]
