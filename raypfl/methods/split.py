"""What methods share in which clients share an extractor and keep a head of their own."""

# N clients, S participants, K clients of a cohort.

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, TypeVar

from torch import Tensor

from raypfl.algebra import weighted_mean
from raypfl.config import StrictModel
from raypfl.methods.contract import AS_FEDAVG, Clients, Method, Plan, same_for_all
from raypfl.methods.requirements import require_split
from raypfl.methods.start import common_start
from raypfl.training import Cohort, Network, TrainingConfig


class Hub(NamedTuple):
    """Held by the server."""

    body: Tensor
    """The shared extractor, with its running statistics where they travel, `[1, body]`."""


class State(NamedTuple):
    """Held by a client."""

    head: Tensor
    """The client's own head, `[N, head]`."""
    kept: Tensor
    """Running statistics that do not travel: the head's, or all; `[N, kept]`, usually none."""


class Down(NamedTuple):
    """To a participant."""

    body: Tensor
    """The shared extractor, the same for everyone, `[1, body]`."""


class Up(NamedTuple):
    """From a participant."""

    body: Tensor
    """The locally trained extractor, `[K, body]`."""


ConfigT = TypeVar("ConfigT", bound=StrictModel)


class SharedExtractor(Method[ConfigT, Hub, State, Down, Up]):
    """theta <- sum_i beta_i theta_i over participants, beta_i = n_i / sum n; phi_i never leaves client i.

    A client that does not take part uses its own head on the newest extractor.
    """

    hub_type = Hub
    norms_at_home = True
    state_type = State
    shared = frozenset({"body"})
    reported = ("personalised", "pre")

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_split(net, self.config.name)  # type: ignore[attr-defined]

    def cost(self) -> float:
        return AS_FEDAVG

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.body.stop - net.body.start)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        return Hub(common_start(net, self.seed)[:, net.body].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        return State(start[:, net.head].clone(), start[:, net.kept].clone())

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        return Down(hub.body)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net = cohort.net
        w = self.train(cohort, net.assemble(state.head, down.body, state.kept))
        return State(w[:, net.head].clone(), w[:, net.kept].clone()), Up(w[:, net.body].clone())

    @abstractmethod
    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Train extractor and head of every client: rows `[K, width]`."""

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return net.assemble(state.head, down.body if up is None else up.body, state.kept)

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(weighted_mean(plan.sizes, up.body))
