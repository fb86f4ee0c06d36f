"""What methods without a server share: who hears whom in a round, what peers publish, who is away.

A round: every peer that is there hears the models that others published after their last local training
(a snapshot: nobody hears what is trained in this round), makes its own of them, trains it, and publishes the
result. The hub of a run stands for the network between peers: it holds what is published, and
prepares what each peer makes of what it hears; messages are counted from peer to peer.

A peer that is away neither sends, hears nor trains, keeps its model, and is still evaluated.
"""

# N peers, S of them there in a round, K of a cohort.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from raypfl import topology
from raypfl.algebra import Csr, csr_from_pairs, csr_take, mix_sparse, replace_rows
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Message, Method, Pairs, Plan
from raypfl.methods.start import common_start, own_starts
from raypfl.topology import Graph, KOut, Mixing, TopologyConfig
from raypfl.training import Cohort, Network, TrainingConfig, cross_entropy

SIZE_BYTES = 8
"""Of the number of training samples, which travels with a model as one int64."""


class PeerConfig(StrictModel):
    """Options of every method without a server."""

    topology: TopologyConfig | None = Field(
        None, description="who hears whom; absent: the run's `topology`, or else the paper's"
    )
    init: Literal["common", "independent"] = Field(
        "common", description="peers start from one model, or each from its own (code of UA-PDFL)"
    )


class Published(NamedTuple):
    """Held by the network between peers."""

    w: Tensor
    """What every peer published last, `[N, published]`."""


class State(NamedTuple):
    """Held by a peer."""

    w: Tensor
    """Its own model after its last training, `[N, width]`."""


class Down(NamedTuple):
    """What a peer makes of its own model and of those it hears; not a message."""

    w: Tensor
    """The published columns, mixed, `[S, published]`."""


class Up(NamedTuple):
    """What a peer publishes; sent when somebody hears it."""

    w: Tensor
    """The published columns of its trained model, `[K, published]`."""


ConfigT = TypeVar("ConfigT", bound=PeerConfig)
HubT = TypeVar("HubT", bound=tuple[Tensor, ...])
StateT = TypeVar("StateT", bound=tuple[Tensor, ...])
DownT = TypeVar("DownT", bound=tuple[Tensor, ...])
UpT = TypeVar("UpT", bound=tuple[Tensor, ...])


class Peers(Method[ConfigT, HubT, StateT, DownT, UpT]):
    """A method without a server.

    Class attributes:
        default_topology: of the paper's comparison.
    """

    default_topology: ClassVar[TopologyConfig] = KOut()
    without_server = True
    reported = ("personalised", "pre")

    @property
    def topology(self) -> TopologyConfig:
        """The method's own, the run's, or the paper's."""
        return self.config.topology or self.run_topology or self.default_topology

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        """See `Method.check`; a graph that there is not over so many peers is refused."""
        topology.check(self.topology, len(clients.ids), self.seed, clients.sizes.cpu())

    def plan(
        self, net: Network, hub: HubT, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        """Who is there, both by `participation` and by the topology's `p_active`, and whom they hear."""
        num_peers = len(clients.ids)
        there = torch.zeros(num_peers, dtype=torch.bool)
        there[sample(round).cpu()] = True
        there &= topology.active(self.topology, num_peers, round, self.seed)
        ids = there.nonzero()[:, 0].to(clients.ids.device)
        graph = self.graph(hub, num_peers, round).induced(there)
        return Plan(round, ids, clients.sizes[ids], graph=graph, all_sizes=clients.sizes)

    def graph(self, hub: HubT, num_peers: int, round: int) -> Graph:
        """Who would hear whom if everyone were there."""
        return topology.sample(self.topology, num_peers, round, self.seed)

    def weights(self, plan: Plan, graph: Graph | None = None) -> Mixing:
        """`A` over the plan's graph or a part of it, rows of all N peers; who hears nobody keeps its own."""
        graph = graph or plan.graph
        assert graph is not None
        return topology.mixing(self.topology, graph, sizes_of_all(plan))

    def relations(self, net: Network, hub: HubT, plan: Plan, down: DownT) -> dict[str, Pairs]:
        """A, as far as it is not zero."""
        return {"weight": entries(rows_for(csr_of(self.weights(plan)), plan.ids), plan.ids)}

    def starts(self, net: Network, ids: Tensor) -> Tensor:
        """The models of some peers before the first round, `[len(ids), width]`."""
        if self.config.init == "common":
            return common_start(net, self.seed, len(ids))
        return own_starts(net, self.seed, ids)

    def sent_up(self, net: Network, ids: Tensor, up: UpT) -> list[Message]:
        """Nothing: what is published is sent, and counted, when it is heard."""
        return []


class Gossip(Peers[ConfigT, Published, State, Down, Up]):
    """Peers that average what they hear with what is theirs, column group by column group.

    `w_i <- sum_j A_ij w_j` over the peers that i hears and itself; the columns that are not published stay.
    """

    hub_type = Published
    state_type = State
    norms_at_home = True
    columns = frozenset({"w"})
    by_turns = True

    @abstractmethod
    def published(self, net: Network) -> slice:
        """The columns that peers publish."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What the ledger calls a message of these columns."""

    def init_hub(self, net: Network, clients: Clients) -> Published:
        return Published(self.starts(net, clients.ids)[:, self.published(net)].clone())

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(self.starts(net, clients.ids))

    def download(self, net: Network, hub: Published, plan: Plan) -> Down:
        return Down(gossip(self.weights(plan), hub.w, plan.ids))

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        w = self.train(cohort, self.personalised(cohort.net, state, down))
        return State(w), Up(w[:, self.published(cohort.net)].clone())

    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Local training of rows `[K, width]`."""
        return cohort.fit(w, cross_entropy).w

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        if up is not None:
            return state.w
        w = state.w.clone()
        w[:, self.published(net)] = down.w
        return w

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Published, up: Up, plan: Plan) -> Published:
        return Published(replace_rows(hub.w, plan.ids, up.w))

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        values = down.w.shape[1]
        return heard(plan, {self.kind: (values, values * down.w.element_size()), "meta": (1, SIZE_BYTES)})


def sizes_of_all(plan: Plan) -> Tensor:
    """Training samples of each of N peers, int64 `[N]` on the CPU; 1 where the plan does not say."""
    assert plan.graph is not None
    if plan.all_sizes is not None:
        return plan.all_sizes.cpu()
    sizes = torch.ones(plan.graph.num_peers, dtype=torch.int64)
    sizes[plan.ids.cpu()] = plan.sizes.cpu()
    return sizes


def csr_of(mixing: Mixing) -> Csr:
    """The same matrix without the diagonal entries that are zero."""
    return csr_from_pairs(mixing.rows, mixing.columns, mixing.values, mixing.num_peers)


def rows_for(matrix: Csr, ids: Tensor) -> Csr:
    """The rows of some receivers, on the device of their ids."""
    return Csr(*(field.to(ids.device) for field in csr_take(matrix, ids.cpu())))


def entries(matrix: Csr, ids: Tensor) -> Pairs:
    """What is stored of a matrix whose rows are the clients `ids` and whose columns are all clients."""
    return Pairs(ids.repeat_interleave(matrix.offsets.diff()), matrix.columns, matrix.values)


def gossip(mixing: Mixing, w: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` of `A w`, `[len(ids), P]`; of a row of `w` that nobody names, nothing is read."""
    return mix_sparse(rows_for(csr_of(mixing), ids.to(w.device)), w)


def heard(plan: Plan, content: dict[str, tuple[int, int]]) -> list[Message]:
    """A message of each kind, with its values and bytes, for everyone that somebody hears."""
    assert plan.graph is not None
    edges = zip(plan.graph.sources.tolist(), plan.graph.receivers.tolist(), strict=True)
    return [
        Message(source, receiver, kind, values, size)
        for source, receiver in edges
        for kind, (values, size) in content.items()
        if values
    ]
