"""CriticalFL between peers: each pulls from more peers while gradient norms grow, from fewer afterwards.

G. Yan, H. Wang, X. Yuan, J. Li, "CriticalFL: A Critical Learning Periods Augmented Client Selection
Framework for Efficient Federated Learning", KDD 2023; the rule of the released code
(GYan58/KDD-2023-CriticalFL). In the own-server form of the comparison of UA-PDFL, arXiv 2412.11674: a peer
hears statistics only from those that it pulls models from.

    f_j = eta * mean over epochs of sum over batches of min(||gradient||, 10)^2     (after local training)
    w_i <- sum_j A_ij w_j over K_i random peers and i itself;   F_i <- F_i, mean of f_j over the same
    code:   critical if the mean of the newest 10 of F_i grew by more than delta, or in the first 5 checks
            K_i <- min(2 K_i, K_max) if so, unless K_max was reached before; max(K_i / 2, K_min) if not
    paper:  critical if F_i grew by delta or more; K_i <- min(2 K_i, K_max) or max(K_i / 2, K_min)

A check of round r looks at what was trained in round r - 1, and its K_i is that of round r + 1. Peers that
have been away count their own rounds. K_min is `topology.k` and the queues of different K are nested, so the
method is `peer_fedavg`, bit for bit, where K_max = K_min.

With `sparse_upload`, a peer in its critical period sends the top fifth of coordinates by what training
changed, as values, and receivers average each coordinate over those that sent it and their own model. Running
statistics are sent whole. Before its first training, all of a peer's model counts as changed. Exactly a
fifth: the released code also sends all that equal the smallest of them, which may be everything.

The rule named paper is the form that other implementations give it; the paper's text was not at hand. The
released code trains with gradients clipped at 10; here only f sees that, unless `clip` is set, so that
training is that of the other methods.
"""

# N peers, S of them there, K of a cohort, P parameters, W whatever travels of a model, H values of history.

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl import topology
from raypfl.algebra import (
    Csr,
    csr_from_pairs,
    csr_take,
    largest,
    masked_mean,
    pack_bits,
    replace_rows,
    unpack_bits,
)
from raypfl.errors import ConfigError
from raypfl.methods.contract import Clients, Message, Plan
from raypfl.methods.peers import SIZE_BYTES, PeerConfig, Peers, gossip
from raypfl.topology import Graph, KOut
from raypfl.training import Batch, Cohort, Network, TrainingConfig, cross_entropy
from raypfl.training.clipping import clip_by_norm

NORM_CAP = 10.0
"""At which f cuts gradient norms off (released code)."""
SMALLEST = 1e-7
"""Of what growth is measured against (released code)."""


class Hub(NamedTuple):
    """Held by the network between peers, and each row but that of `w` and `f` by its peer alone."""

    w: Tensor
    """What every peer published last, `[N, W]`."""
    f: Tensor
    """Its statistic of that training, dtype of `w` `[N]`; 0 before the first."""
    mask: Tensor
    """Which parameters it sends while it is critical, as bits, uint8 `[N, B]`; or `[N, 0]`."""
    turns: Tensor
    """Rounds that the peer took part in, int64 `[N]`."""
    k: Tensor
    """How many peers it pulls from in its next round, int64 `[N]`."""
    history: Tensor
    """The newest means of f that it heard, zeros before the first, float64 `[N, H]`."""
    checks: Tensor
    """How many there were, int64 `[N]`."""
    latched: Tensor
    """Whether K has been at its maximum, bool `[N]`."""
    critical: Tensor
    """Whether its last check found it in the critical period, as it is before the first; bool `[N]`."""


class State(NamedTuple):
    """Held by a peer."""

    w: Tensor
    """Its own model after its last training, `[N, width]`."""


class Down(NamedTuple):
    """What a peer makes of what it hears; not a message."""

    w: Tensor
    """Whatever travels of models, mixed, `[S, W]`."""
    sparse: Tensor
    """Which peers sent a part of their model only, bool `[1, N]`; or `[1, 0]`."""


class Up(NamedTuple):
    """What a peer publishes; sent when somebody hears it."""

    w: Tensor
    """Whatever travels of its trained model, `[K, W]`."""
    f: Tensor
    """`eta * mean over epochs of sum of min(||gradient||, 10)^2`, `[K]`."""
    mask: Tensor
    """The parameters that changed most, as bits, uint8 `[K, B]`; or `[K, 0]`."""


class Config(PeerConfig):
    """Options of CriticalFL; defaults of its released code, but for `sparse_upload` and `clip`."""

    name: Literal["criticalfl"] = "criticalfl"
    rule: Literal["code", "paper"] = Field("code", description="how a critical period is told")
    delta: float = Field(0.01, ge=0.0, description="growth of f above which a period is critical")
    window: int = Field(10, ge=1, description="values of f whose mean is compared (rule code)")
    every: int = Field(2, ge=1, description="rounds from check to check (rule code)")
    warmup: int = Field(5, ge=0, description="first checks that are critical in any case (rule code)")
    kmax_frac: float = Field(0.75, ge=0.0, le=1.0, description="K_max as a share of all peers")
    sparse_upload: bool = Field(
        False, description="send a part of the model in critical periods (code: yes; UA-PDFL: not mentioned)"
    )
    keep: float = Field(0.2, gt=0.0, le=1.0, description="that part, of all parameters")
    clip: float | None = Field(
        None, gt=0.0, description="gradient norm that training is clipped at (code: 10; UA-PDFL: not at all)"
    )


class CriticalFL(Peers[Config, Hub, State, Down, Up]):
    """W <- LT(A(K) W); K doubles in critical periods and halves after them."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"sparse"})
    summary = "CriticalFL without a server: peers pull from more others in critical learning periods"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        """See `Method.check`; the method draws its own peers, so it needs a topology that says how."""
        super().check(net, clients, training)
        chosen = self.topology
        if not isinstance(chosen, KOut) or not chosen.changes or chosen.k == 0:
            given = f"{chosen.name} with k = {chosen.k}" if isinstance(chosen, KOut) else chosen.name
            raise ConfigError(
                "method criticalfl pulls from as many random peers as it decides, from topology.k on, but "
                f"topology is {given}{' that stays the same' if not chosen.changes else ''}. Set "
                "method.topology.name=kout with refresh=every_round and k of at least 1."
            )

    def bounds(self, num_peers: int) -> tuple[int, int]:
        """K_min and K_max."""
        assert isinstance(self.topology, KOut)
        fewest = min(self.topology.k, num_peers - 1)
        # 0.29 * 100 is 28.999999999999996 in binary, and means 29.
        share = int(self.config.kmax_frac * num_peers + 1e-9)
        return fewest, max(fewest, min(share, num_peers - 1))

    def graph(self, hub: Hub, num_peers: int, round: int) -> Graph:
        return topology.pulls(num_peers, hub.k, round, self.seed)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        n, device = len(clients.ids), net.device
        w = self.starts(net, clients.ids)[:, net.shared].clone()

        def whole(value: int) -> Tensor:
            return torch.full((n,), value, dtype=torch.int64, device=device)

        return Hub(
            w,
            f=w.new_zeros(n),
            mask=self._mask(w[:, net.weights]),
            turns=whole(0),
            k=whole(self.bounds(n)[0]),
            history=w.new_zeros(n, self.config.window + 1, dtype=torch.float64),
            checks=whole(0),
            latched=whole(0).bool(),
            critical=whole(1).bool(),
        )

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(self.starts(net, clients.ids))

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        matrix = self.weights(plan)
        if not self.config.sparse_upload:
            return Down(gossip(matrix, hub.w, plan.ids), hub.critical[None, :0])
        sent = hub.w.new_ones(hub.w.shape, dtype=torch.bool)
        sent[:, net.weights] = unpack_bits(hub.mask, net.num_weights) | ~hub.critical[:, None]
        own = matrix.rows == matrix.columns

        def part(chosen: Tensor) -> Csr:
            rows, columns, values = (
                field[chosen].to(hub.w.device) for field in (matrix.rows, matrix.columns, matrix.values)
            )
            return csr_take(csr_from_pairs(rows, columns, values, matrix.num_peers), plan.ids)

        return Down(masked_mean(part(~own), hub.w, sent, whole=part(own)), hub.critical[None])

    def diagnose(self, net: Network, hub: Hub, plan: Plan, down: Down) -> dict[str, float]:
        """Mean K of those who are there, and the share of them in a critical period."""
        k, critical = hub.k[plan.ids].double(), hub.critical[plan.ids].double()
        return {"peers_pulled": float(k.mean()), "critical_share": float(critical.mean())}

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        net, training = cohort.net, cohort.training
        before = self.personalised(net, state, down)
        clip = math.inf if self.config.clip is None else self.config.clip
        cap = min(clip, NORM_CAP)

        def measure(g_kP: Tensor, batch: Batch) -> Tensor:
            return norms(g_kP).clamp(max=cap).square()

        def cut(g_kP: Tensor, batch: Batch) -> None:
            clip_by_norm(g_kP, clip)

        hook = cut if clip < math.inf else None
        w, _, total = cohort.fit(before, cross_entropy, measure=measure, on_gradient=hook)
        passes = [self.passes(training, samples) for samples in cohort.sizes.tolist()]
        f = training.optimizer.lr * training.decay(cohort.round) * total / total.new_tensor(passes)
        published = w[:, net.shared].clone()
        return State(w), Up(published, f.to(w.dtype), self._mask((w - before)[:, net.weights]))

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        return state.w if up is not None else net.assemble(down.w, state.w[:, net.private])

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        ids = plan.ids
        turns = hub.turns.index_add(0, ids, torch.ones_like(ids))
        every = self.config.every if self.config.rule == "code" else 1
        # In its first round a peer hears of nobody's training.
        due = ids[(turns[ids] >= 2) & (turns[ids] % every == 0)]
        before = Detector(hub.k[due], hub.history[due], hub.checks[due], hub.latched[due], hub.critical[due])
        rule = by_code if self.config.rule == "code" else by_paper
        after = rule(before, heard_mean(hub.f, plan)[due], self.config, *self.bounds(len(hub.w)))
        return Hub(
            replace_rows(hub.w, ids, up.w),
            replace_rows(hub.f, ids, up.f),
            replace_rows(hub.mask, ids, up.mask),
            turns,
            k=hub.k.index_copy(0, due, after.k),
            history=hub.history.index_copy(0, due, after.history),
            checks=hub.checks.index_copy(0, due, after.checks),
            latched=hub.latched.index_copy(0, due, after.latched),
            critical=hub.critical.index_copy(0, due, after.critical),
        )

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        assert plan.graph is not None
        size, values = down.w.element_size(), net.shared.stop
        kept, bits = values - net.num_weights + self._kept(net.num_weights), -(-net.num_weights // 8)
        besides = {"meta": (1, SIZE_BYTES), "fgn": (1, size)}
        whole = {"full": (values, values * size), **besides}
        part = {"full": (kept, kept * size), "mask": (bits, bits), **besides}
        sparse = set(down.sparse[0].nonzero()[:, 0].tolist())
        return [
            Message(source, receiver, kind, *content)
            for source, receiver in zip(
                plan.graph.sources.tolist(), plan.graph.receivers.tolist(), strict=True
            )
            for kind, content in (part if source in sparse else whole).items()
        ]

    def _kept(self, num_weights: int) -> int:
        """How many entries reach the (1 - keep) quantile of all, interpolated linearly, if none are equal."""
        return num_weights - math.ceil((1 - self.config.keep) * (num_weights - 1) - 1e-9)

    def _mask(self, change_KP: Tensor) -> Tensor:
        if not self.config.sparse_upload:
            return change_KP.new_zeros(len(change_KP), 0, dtype=torch.uint8)
        return pack_bits(largest(change_KP.abs(), self._kept(change_KP.shape[1])))


class Detector(NamedTuple):
    """What some peers remember to tell their critical period; fields as in `Hub`."""

    k: Tensor
    history: Tensor
    checks: Tensor
    latched: Tensor
    critical: Tensor


def by_code(detector: Detector, statistic_S: Tensor, config: Config, fewest: int, most: int) -> Detector:
    """One check by the released code's rule, with a new mean of f for each peer."""
    history = torch.cat((detector.history[:, 1:], statistic_S[:, None]), 1)
    new, old = history[:, 1:].mean(1), history[:, :-1].mean(1).clamp(min=SMALLEST)
    checks = detector.checks + 1
    critical = ((new - old) / old > config.delta) | (checks <= config.warmup)
    latched = detector.latched | (detector.k == most)
    raised = torch.where(latched, detector.k, (2 * detector.k).clamp(max=most))
    lowered = (detector.k - (detector.k // 2).clamp(min=1)).clamp(min=fewest)
    return Detector(torch.where(critical, raised, lowered), history, checks, latched, critical)


def by_paper(detector: Detector, statistic_S: Tensor, config: Config, fewest: int, most: int) -> Detector:
    """One check by the paper's rule; until there are two values nothing is decided."""
    history = torch.cat((detector.history[:, 1:], statistic_S[:, None]), 1)
    old = history[:, -2].clamp(min=SMALLEST)
    decided = detector.checks > 0
    growing = (statistic_S - history[:, -2]) / old >= config.delta
    k = torch.where(growing, (2 * detector.k).clamp(max=most), (detector.k // 2).clamp(min=fewest))
    return Detector(
        torch.where(decided, k, detector.k),
        history,
        detector.checks + 1,
        detector.latched,
        torch.where(decided, growing, detector.critical),
    )


def heard_mean(f_N: Tensor, plan: Plan) -> Tensor:
    """The mean of f over each peer and those it hears in this round, float64 `[N]`."""
    assert plan.graph is not None
    graph, f_N = plan.graph, f_N.double()
    receivers, sources = graph.receivers.to(f_N.device), graph.sources.to(f_N.device)
    return f_N.index_add(0, receivers, f_N[sources]) / (1 + graph.degree.to(f_N.device))


def norms(g_kP: Tensor) -> Tensor:
    """Of each client's gradient, float64 `[k]`."""
    found: Tensor = torch.linalg.vector_norm(g_kP, dim=1, dtype=torch.float64)
    return found
