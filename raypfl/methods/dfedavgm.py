"""DFedAvgM: peers train with heavy-ball momentum and average over an undirected graph.

T. Sun, D. Li, B. Wang, "Decentralized Federated Averaging", IEEE Transactions on Pattern Analysis and Machine
Intelligence 45(4), 2023; arXiv 2104.11375. Algorithm 1, and the quantised Algorithm 2, in the comparison of
UA-PDFL, arXiv 2412.11674:

    y^0 = y^-1 = theta_i,   y^{k+1} = y^k - eta grad_k(y^k) + theta_m (y^k - y^{k-1}),   z_i = y^K
    theta_i <- sum_j A_ij z_j,   A = A^T, A 1 = 1, null(I - A) = span(1), -I < A <= I

A round here mixes what was published in the round before and then trains: the sequences are the same up to
where the round is cut, and PRE evaluates theta. Momentum is the method's own and fresh every round; the
learning rate and weight decay are those of `training.optimizer`, constant within a round.

What is sent of the parameters:

* none: z_j.
* paper: q_j = Q(z_j - theta_j); theta_i <- theta_i + sum_j A_ij q_j. With an exact Q this is
  A Z + (I - A) Theta: peers that have come apart stay apart.
* replica: q_j = Q(z_j - x_j), x_j <- x_j + q_j; theta_i <- sum_j A_ij x_j. Everyone keeps a copy x_j of each
  neighbour's model; all copies start from the common model. With an exact Q this is A Z. Who was away gets
  the messages that it has missed of a neighbour when both are there again.

Q rounds to b bits, unbiased, with one scale a message (`algebra.quantizer`), drawn at the sender. Running
statistics of normalisation travel as they are: a variance that is rounded may become negative.

Not from the paper, whose experiments keep one graph, a ring, and theta_m = 0.9: a new 5-regular graph every
round, theta_m = 0.5 and twice the local epochs, as in the comparison of UA-PDFL, which halves the rounds.

Same as: `peer_fedavg` with theta_m = 0, as many epochs and the same matrix.
"""

# N peers, S of them there, K of a cohort, P parameters, W whatever travels of a model, D neighbours at most.

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl import topology
from raypfl.algebra import dequantize, quantize, replace_rows, rows_of
from raypfl.errors import ConfigError
from raypfl.methods.contract import Clients, Message, Plan
from raypfl.methods.peers import PeerConfig, Peers, gossip, heard
from raypfl.rng import numpy_generator
from raypfl.topology import Graph, Mixing, Regular, require_symmetric_doubly_stochastic
from raypfl.training import SGD, Cohort, Network, TrainingConfig, cross_entropy


class Hub(NamedTuple):
    """Held by the network between peers."""

    w: Tensor
    """What is mixed, `[N, W]`: z, or in the columns of parameters q (paper) or x (replica)."""
    sent: Tensor
    """replica: messages each peer has published, the start included, int64 `[N, 1]`; else `[N, 0]`."""
    heard: Tensor
    """replica: how many of them each peer has, neighbours in the graph's order, int64 `[N, D]`; else
    `[N, 0]`."""


class State(NamedTuple):
    """Held by a peer."""

    w: Tensor
    """z with the statistics that stay at home, `[N, width]`."""
    reference: Tensor
    """What the next difference is taken from: theta (paper) or the peer's own x (replica), `[N, P]`; else
    `[N, 0]`."""


class Down(NamedTuple):
    """What a peer makes of what it hears; not a message."""

    w: Tensor
    """`A` times what was published, `[S, W]`."""
    missed: Tensor
    """replica: messages of each neighbour that arrive, this round's included, int64 `[S, D]`; else
    `[S, 0]`."""


class Up(NamedTuple):
    """What a peer publishes; sent when somebody hears it."""

    w: Tensor
    """What is not quantised: z `[K, W]`, or its travelling statistics alone."""
    integers: Tensor
    """Q of the difference, within b bits, `[K, P]`; or `[K, 0]`."""
    scale: Tensor
    """Of the integers, `[K]`; or `[K, 0]`."""


class Config(PeerConfig):
    """Options of DFedAvgM; defaults of the comparison in UA-PDFL where it has any."""

    name: Literal["dfedavgm"] = "dfedavgm"
    momentum: float = Field(
        0.5, ge=0.0, lt=1.0, description="theta_m; 0.9 in the paper, 0.5 beside methods that train with 0.5"
    )
    epochs_mult: int = Field(
        2, ge=1, description="local passes, as a multiple of training.epochs (UA-PDFL: 2, in half the rounds)"
    )
    quant: Literal["none", "paper", "replica"] = Field(
        "none", description="what is sent: models, quantised updates, or quantised changes of a public copy"
    )
    bits: int = Field(8, ge=2, le=32, description="b of the quantiser")


class DFedAvgM(Peers[Config, Hub, State, Down, Up]):
    """Z <- heavy ball(Theta), Theta <- A Z."""

    Config = Config
    hub_type = Hub
    state_type = State
    default_topology: ClassVar[topology.TopologyConfig] = Regular(k=5, weights="metropolis")
    summary = "DFedAvgM: heavy-ball momentum, averages over an undirected graph, quantised or not"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        """See `Method.check`; refuses matrices that break the paper's assumptions, and says where."""
        super().check(net, clients, training)
        if not isinstance(training.optimizer, SGD):
            raise ConfigError(
                "method dfedavgm trains with heavy-ball momentum, but training.optimizer.name = "
                f"{training.optimizer.name}. Use sgd, whose momentum is method.momentum here."
            )
        chosen, num_peers = self.topology, len(clients.ids)
        graph = chosen.draw(num_peers, 1, self.seed)
        sizes = clients.sizes.cpu()
        matrix = topology.mixing(chosen, graph, sizes)
        require_symmetric_doubly_stochastic(matrix, static=not chosen.changes)
        if chosen.p_active < 1.0:
            # Uniform weights of a regular graph are symmetric only while everyone is there.
            here = torch.arange(num_peers) > 0
            matrix = topology.mixing(chosen, graph.induced(here), sizes)
            require_symmetric_doubly_stochastic(matrix, static=False)
        if self.config.quant == "replica":
            self._check_copies()

    def _check_copies(self) -> None:
        chosen = self.topology
        why = "method.quant = replica keeps a copy of every neighbour's model, but "
        if chosen.changes:
            raise ConfigError(
                f"{why}topology {chosen.name} draws other neighbours every round. "
                "Use topology.refresh=static, a fixed topology, or method.quant=paper."
            )
        if chosen.p_active < 1.0:
            raise ConfigError(
                f"{why}topology.p_active = {chosen.p_active} takes neighbours away at random. "
                "Use topology.p_active=1 or method.quant=paper."
            )
        if self.config.init == "independent":
            raise ConfigError(
                f"{why}method.init = independent leaves nothing to start the copies from. Use init common."
            )

    def weights(self, plan: Plan, graph: Graph | None = None) -> Mixing:
        """`A`; asked again whenever the graph differs or peers are away.

        Raises:
            ConfigError: the weights are not symmetric among those who are there.
        """
        matrix = super().weights(plan, graph)
        require_symmetric_doubly_stochastic(matrix, static=False)
        return matrix

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        num_peers, device = len(clients.ids), net.device
        w = self.starts(net, clients.ids)[:, net.shared].clone()
        if self.config.quant == "paper":
            w[:, net.weights] = 0.0
        if self.config.quant != "replica":
            nothing = torch.zeros(num_peers, 0, dtype=torch.int64, device=device)
            return Hub(w, nothing, nothing)
        neighbours = int(self._all_edges(num_peers).degree.max())
        sent = torch.ones(num_peers, 1, dtype=torch.int64, device=device)
        return Hub(w, sent, torch.zeros(num_peers, neighbours, dtype=torch.int64, device=device))

    def init_state(self, net: Network, clients: Clients) -> State:
        w = self.starts(net, clients.ids)
        return State(w, w[:, self._quantised(net)].clone())

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        missed = torch.zeros_like(hub.heard)
        if self.config.quant == "replica":
            receivers, sources, slots = self._edges(plan)
            missed[receivers, slots] = hub.sent[sources, 0] - hub.heard[receivers, slots]
        return Down(gossip(self.weights(plan), hub.w, plan.ids), missed[plan.ids])

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, config = cohort.net, self.config
        theta = self.personalised(net, state, down)
        w = self.train(cohort, theta)
        columns = self._quantised(net)
        dense = w[:, columns.stop : net.shared.stop].clone()
        if config.quant == "none":
            nothing = w.new_zeros(len(w), 0)
            return State(w, nothing), Up(dense, nothing.to(torch.int8), nothing)
        reference = theta[:, columns].clone() if config.quant == "paper" else state.reference
        integers, scale = quantised(w[:, columns] - reference, config.bits, cohort.keys("quantizer"))
        if config.quant == "replica":
            reference = reference + dequantize(integers, scale)
        return State(w, reference), Up(dense, integers, scale)

    def train(self, cohort: Cohort, w: Tensor) -> Tensor:
        """K heavy-ball steps, momentum zero at the start: SGD without dampening or Nesterov's."""
        optimizer = cohort.training.optimizer.model_copy(
            update={"momentum": self.config.momentum, "nesterov": False}
        )
        fresh = optimizer.moments(w[:, cohort.net.weights])
        epochs = self.config.epochs_mult * cohort.training.epochs
        return cohort.fit(w, cross_entropy, epochs=epochs, optimizer=optimizer, moments=fresh).w

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        if up is not None:
            return state.w
        theta = down.w[:, net.weights]
        if self.config.quant == "paper":
            theta = state.reference + theta
        return net.assemble(theta, down.w[:, net.travelling], state.w[:, net.private])

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        if self.config.quant == "none":
            return hub._replace(w=replace_rows(hub.w, plan.ids, up.w))
        q = dequantize(up.integers, up.scale)
        if self.config.quant == "paper":
            return hub._replace(w=replace_rows(hub.w, plan.ids, torch.cat((q, up.w), 1)))
        x = rows_of(hub.w, plan.ids)[:, net.weights] + q
        heard, (receivers, sources, slots) = hub.heard.clone(), self._edges(plan)
        heard[receivers, slots] = hub.sent[sources, 0]
        w = replace_rows(hub.w, plan.ids, torch.cat((x, up.w), 1))
        return Hub(w, hub.sent.index_add(0, plan.ids, torch.ones_like(hub.sent[plan.ids])), heard)

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        size, statistics = down.w.element_size(), net.shared.stop - net.num_weights
        if self.config.quant == "none":
            return heard(plan, {"full": (net.shared.stop, net.shared.stop * size)})
        one = (1 + net.num_weights, quantised_bytes(net.num_weights, self.config.bits, size))
        messages = heard(plan, {"full": (statistics, statistics * size)})
        if self.config.quant == "paper":
            return messages + heard(plan, {"quant": one})
        row = {client: at for at, client in enumerate(plan.ids.tolist())}
        edges = zip(*(ends.tolist() for ends in self._edges(plan)), strict=True)
        return messages + [
            Message(source, receiver, "quant", *one)
            for receiver, source, slot in edges
            for _ in range(int(down.missed[row[receiver], slot]))
        ]

    def _quantised(self, net: Network) -> slice:
        """The columns whose changes are quantised."""
        return slice(0, 0) if self.config.quant == "none" else net.weights

    def _all_edges(self, num_peers: int) -> Graph:
        return self.topology.draw(num_peers, 1, self.seed)

    def _edges(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Receiver and source of this round's edges, and the place of the source among all neighbours."""
        assert plan.graph is not None
        graph, n = self._all_edges(plan.graph.num_peers), plan.graph.num_peers
        receivers, sources = plan.graph.receivers, plan.graph.sources
        place = torch.searchsorted(graph.receivers * n + graph.sources, receivers * n + sources)
        ends = (receivers, sources, place - graph.offsets[receivers])
        return tuple(end.to(plan.ids.device) for end in ends)  # type: ignore[return-value]


def quantised(x_KP: Tensor, bits: int, keys: list[int]) -> tuple[Tensor, Tensor]:
    """`algebra.quantize` with the noise of each row from its own key, one row at a time to save memory."""
    parts = []
    for row, draw in enumerate(keys):
        noise = torch.from_numpy(numpy_generator(draw).random(x_KP.shape[1]))[None].to(x_KP.device)
        parts.append(quantize(x_KP[row : row + 1], bits, noise))
    integers, scales = zip(*parts, strict=True)
    return torch.cat(integers), torch.cat(scales)


def quantised_bytes(values: int, bits: int, scale_bytes: int = 4) -> int:
    """Of one message: its scale, and its integers packed to b bits each."""
    return scale_bytes + -(-bits * values // 8)
