"""DisPFL: every peer has a sparse model of its own, and averages each weight with the peers that train it.

Dai, Shen, He, Tian, Tao: DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training, ICML 2022. For peer i, the peers V_i that it hears and itself, the mask mhat_j
that j's published model was trained under, and i's new mask m_i, in every coordinate alone:

    w_i  <-  m_i * sum over V_i of w_j / sum over V_i of mhat_j        (0 where nobody of V_i has it)
    w_i  <-  SGD within m_i, and is published with mhat_i = m_i
    m_i  <-  in every tensor without the alpha_t nnz smallest weights, with as many others

alpha_t = alpha_0 (1 + cos(pi t / T)) / 2 for t = 0, 1, ...; the others are those with the largest gradients
(of one mini-batch in evaluation mode, where training ended) or random ones; weights just left out may come
back. Masks are over all parameters, their densities by Erdos-Renyi-Kernel (ERK). Training samples do not
weigh, so `topology.weights` is not used.

From the authors' code: clipping, initial masks of each peer's own, unequal densities, and that a peer which
cannot be reached trains on (`unreachable`). Its scripts regrow at random; the paper, and the default here, by
gradient. There, what is pruned is still in the published model; so it is here.
Chosen here: gradients and kept momentum are masked, which is the same as masking the model and its momentum
after every step (the code masks the model alone, and has no momentum). Running statistics that travel are
averaged uniformly over V_i (the code has none). T is `anneal_rounds`, not the run's number of rounds, so that
a run that is prolonged goes on with the same schedule; after T rounds masks stay. A peer sends its trained
weights and its mask, a bit a weight, to everyone who hears it. Reported: after mixing, before training (PRE),
as in the comparison of UA-PDFL.

Same as: `peer_fedavg` with uniform weights, at density 1 and without clipping.
"""

# N peers, S of them there in a round, K of a cohort, P parameters.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from raypfl.algebra import (
    Csr,
    csr_take,
    erk_counts,
    exchange_counts,
    largest,
    masked_mean,
    prune_and_regrow,
    replace_rows,
)
from raypfl.errors import ConfigError
from raypfl.methods.contract import Clients, Message, Pairs, Plan
from raypfl.methods.peers import Down, PeerConfig, Peers, entries
from raypfl.rng import NOBODY, key, numpy_generator
from raypfl.topology import weights
from raypfl.training import Batch, Cohort, Network, Rows, TrainingConfig, cross_entropy
from raypfl.training.clipping import clip_by_norm

Density = Annotated[float, Field(gt=0.0, le=1.0)]


class Hub(NamedTuple):
    """Held by the network between peers."""

    w: Tensor
    """What every peer published last, zero outside its mask, `[N, published]`."""
    mhat: Tensor
    """The masks these models were trained under, bool `[N, P]`."""


class State(NamedTuple):
    """Held by a peer."""

    w: Tensor
    """Its own model after its last training, `[N, width]`."""
    mask: Tensor
    """m, the weights it trains next, bool `[N, P]`."""


class Up(NamedTuple):
    """What a peer publishes; sent when somebody hears it."""

    w: Tensor
    """The published columns of its trained model, `[K, published]`."""
    mhat: Tensor
    """The mask it was trained under, bool `[K, P]`."""


class Config(PeerConfig):
    """Options of DisPFL; defaults of the paper, or of the authors' code where the paper has none."""

    name: Literal["dispfl"] = "dispfl"
    density: Density | Annotated[tuple[Density, ...], Field(min_length=1)] = Field(
        0.5, description="share of weights a peer trains; of a list, peers take one each in turn"
    )
    erk_power: float = Field(1.0, ge=0.0, description="s of the tensors' densities; 0: all alike (code: 1)")
    alpha0: float = Field(
        0.5, ge=0.0, le=1.0, description="share of each tensor exchanged in round 1; 0: masks never change"
    )
    anneal_rounds: PositiveInt | None = Field(
        None, description="T, rounds until masks stay as they are; the run's `rounds` in the paper; required"
    )
    regrow: Literal["grad", "random"] = Field("grad", description="paper: grad; the code's scripts: random")
    init_mask: Literal["independent", "common"] = Field(
        "independent", description="each peer draws its first mask, or all have one (scripts: independent)"
    )
    clip: float | None = Field(
        10.0, gt=0.0, description="largest norm of a step's gradient (code: 10); null: none"
    )
    unreachable: Literal["train", "rest"] = Field(
        "train",
        description="what peers do in rounds that `topology.p_active` takes them out of (code: train alone)",
    )

    @model_validator(mode="after")
    def _rounds_to_anneal(self) -> Config:
        if self.alpha0 > 0 and self.anneal_rounds is None:
            raise ValueError(
                f"alpha0 = {self.alpha0:g} falls to 0 over `anneal_rounds`, which is missing. Set it to the "
                "number of rounds that the run is to have in the end, or alpha0 to 0 for masks that stay."
            )
        return self

    @property
    def densities(self) -> tuple[float, ...]:
        """Peer i has the one at i modulo their number."""
        return self.density if isinstance(self.density, tuple) else (self.density,)

    def exchanged(self, round: int) -> float:
        """`alpha_t`, the share of weights exchanged after the training of round t + 1."""
        if self.anneal_rounds is None or round > self.anneal_rounds:
            return 0.0
        return self.alpha0 / 2 * (1 + math.cos(math.pi * (round - 1) / self.anneal_rounds))


class DisPFL(Peers[Config, Hub, State, Down, Up]):
    """w_i <- SGD(m_i * masked mean of the w_j that i hears); m_i <- prune and regrow."""

    Config = Config
    hub_type = Hub
    state_type = State
    by_turns = True
    needed = {"anneal_rounds": 500}
    summary = "DisPFL: personal sparse models, averaged weight by weight where peers train it"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        super().check(net, clients, training)
        if self.topology.lazy:
            raise ConfigError(
                f"method dispfl averages without weights, so topology.lazy = {self.topology.lazy:g} would do "
                "nothing. Set it to 0, or give the method a `topology` of its own."
            )
        for density in self.config.densities:
            for count, shape in zip(self.counts(net, density), net.shapes, strict=True):
                if count == 0:
                    raise ConfigError(
                        f"method.density = {density:g} leaves a tensor of {'x'.join(map(str, shape))} "
                        "weights without any. Use a higher density, or a lower method.erk_power."
                    )

    def counts(self, net: Network, density: float) -> list[int]:
        """How many weights of each tensor a peer trains, in every round."""
        return erk_counts(net.shapes, density, self.config.erk_power)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        state = self.init_state(net, clients)
        return Hub(state.w[:, net.shared].clone(), state.mask)

    def init_state(self, net: Network, clients: Clients) -> State:
        mask, start = self.first_masks(net, clients.ids), self.starts(net, clients.ids)
        return State(net.assemble(within(mask, start[:, net.weights]), start[:, net.statistics]), mask)

    def first_masks(self, net: Network, ids: Tensor) -> Tensor:
        """The ERK count of each tensor's weights, at random places: bool `[len(ids), P]`."""
        common, densities = self.config.init_mask == "common", self.config.densities
        mask = torch.zeros(len(ids), net.num_weights, dtype=torch.bool, device=net.device)
        for row, client in enumerate(ids.tolist()):
            draw = key(self.seed, "dispfl mask", client=NOBODY if common else client)
            score = random_numbers(draw, net.num_weights)
            counts = self.counts(net, densities[client % len(densities)])
            for columns, count in zip(net.tensors, counts, strict=True):
                mask[row, columns] = largest(score[None, columns], count)[0].to(mask.device)
        return mask

    def plan(
        self, net: Network, hub: Hub, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        plan = super().plan(net, hub, clients, round, sample)
        if self.config.unreachable == "rest":
            return plan
        ids = sample(round)
        return plan._replace(ids=ids, sizes=clients.sizes[ids])

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        senders = heard_and_own(plan, hub.w.device)
        mean = masked_mean(senders, hub.w[:, net.weights], hub.mhat)
        statistics = hub.w[:, net.travelling]
        everywhere = torch.ones_like(statistics, dtype=torch.bool)
        return Down(torch.cat((mean, masked_mean(senders, statistics, everywhere)), 1))

    def relations(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, Pairs]:
        """What share of a participant's trained weights those that it hears, and itself, had published."""
        senders = heard_and_own(plan, hub.w.device)
        heard = senders.columns.split(senders.offsets.diff().tolist())
        shares = [
            (hub.mhat[others] & hub.mhat[own]).sum(1).double() / hub.mhat[own].sum()
            for own, others in zip(plan.ids, heard, strict=True)
        ]
        return {"mask overlap": entries(senders._replace(values=torch.cat(shares)), plan.ids)}

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, mhat = cohort.net, state.mask
        if cohort.velocity is not None:
            # Else what a weight had gathered before it was pruned would move it when it is regrown.
            cohort.velocity = cohort.velocity * mhat
        start = self.personalised(net, state, down)
        w = cohort.fit(start, loss_within, mhat, on_gradient=self.keep_within).w
        share = self.config.exchanged(cohort.round)
        mask = self.next_masks(cohort, w, mhat, share) if share else mhat
        return State(w, mask), Up(w[:, net.shared].clone(), mhat)

    def keep_within(self, g: Tensor, batch: Batch, mask: Tensor) -> None:
        """Clip by the norm over all weights, then leave only what moves the trained ones."""
        if self.config.clip is not None:
            clip_by_norm(g, self.config.clip)
        g.mul_(mask)

    def next_masks(self, cohort: Cohort, w: Tensor, mask: Tensor, share: float) -> Tensor:
        """Prune and regrow a share of every tensor's trained weights: bool `[K, P]`."""

        def work(chunk: Cohort, w: Tensor, mask: Tensor) -> tuple[Tensor]:
            promise = self.promise(chunk, w)
            new = torch.empty_like(mask)
            for columns in chunk.net.tensors:
                old = mask[:, columns]
                counts = exchange_counts(old, share)
                new[:, columns] = prune_and_regrow(w[:, columns], old, promise[:, columns], counts)
            return (new,)

        return cohort.run(work, w, mask, purpose="dispfl masks")[0]

    def promise(self, chunk: Cohort, w: Tensor) -> Tensor:
        """What speaks for training a weight: its gradient's magnitude, or chance: `[k, P]`."""
        if self.config.regrow == "grad":
            return first_gradient(chunk, w).abs()
        draws = [key(self.seed, "dispfl regrow", chunk.round, client) for client in chunk.ids.tolist()]
        return torch.stack([random_numbers(draw, chunk.net.num_weights) for draw in draws]).to(w.device)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        if up is not None:
            return state.w
        received = within(state.mask, down.w[:, net.weights])
        return net.assemble(received, down.w[:, net.travelling], state.w[:, net.private])

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return Hub(*(replace_rows(old, plan.ids, new) for old, new in zip(hub, up, strict=True)))

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        """A published model's trained weights and running statistics, and its mask as bits."""
        assert plan.graph is not None
        statistics = net.travelling.stop - net.travelling.start
        sizes = [sum(self.counts(net, density)) + statistics for density in self.config.densities]
        bitmap = math.ceil(net.num_weights / 8)
        edges = zip(plan.graph.sources.tolist(), plan.graph.receivers.tolist(), strict=True)
        return [
            Message(source, receiver, kind, values, values * width)
            for source, receiver in edges
            for kind, values, width in (
                ("full", sizes[source % len(sizes)], down.w.element_size()),
                ("mask", bitmap, 1),
            )
        ]


def heard_and_own(plan: Plan, device: torch.device) -> Csr:
    """Weight 1 for each participant itself and for those it hears, `[S, N]`."""
    assert plan.graph is not None
    mixing = weights(plan.graph, "uniform")
    everyone = Csr(mixing.offsets, mixing.columns, torch.ones_like(mixing.values))
    return Csr(*(field.to(device) for field in csr_take(everyone, plan.ids.cpu())))


def within(mask: Tensor, w: Tensor) -> Tensor:
    """Weights `[K, P]` with zeros outside of masks `[K, P]`."""
    return w.masked_fill(~mask, 0.0)


def loss_within(m: Rows, batch: Batch, mask: Tensor) -> Tensor:
    """The objective; the mask is for the step."""
    return cross_entropy(m, batch)


def first_gradient(chunk: Cohort, w: Tensor) -> Tensor:
    """Each client's gradient in all weights on one of its mini-batches, in evaluation mode: `[k, P]`."""
    net = chunk.net
    out = torch.empty_like(w[:, net.weights])
    for batch in chunk.batches(purpose="dispfl regrow", steps=1):
        rows = w[batch.rows]
        leaf = rows[:, net.weights].detach().requires_grad_()
        loss = cross_entropy(net.bind(rows, leaf=leaf), batch)
        out[batch.rows] = net.slopes(loss, [leaf])[0]
    return out


def random_numbers(draw: int, count: int) -> Tensor:
    """Uniform in [0, 1), float64 on the CPU, `[count]`."""
    return torch.from_numpy(numpy_generator(draw).random(count))
