"""APPLE: every client learns how much of every other client's core model its own model should be made of.

Luo, Wu: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, IJCAI 2022. Client i
has a core v_i and a row of directed relationships p_i. It downloads the others' cores, and trains v_i and p_i
together, the others' cores held still, on

    F_i(w_i) + mu/2 kappa(r) ||p_i - p0||^2,  w_i = sum_j p_ij v_j,  p0_j = n_j / sum n

    g = grad F_i(w_i)
    v_i  <- v_i  - eta1 p_ii g                              (by `training.optimizer`)
    p_ij <- p_ij - eta2 (<g, v_j> + mu kappa(r) (p_ij - p0_j))                (by SGD)

and uploads v_i. kappa falls from 1 to 0 over the first L rounds, r counting from 0. p starts at p0 and may
become negative. Evaluated: w_i after local training, before it w_i of the newest cores.

p_ii is about 1/N at first, so the core's gradient is N times smaller than alone: use Adam, which does not
mind, or a larger rate. All cores start at one initialisation (each at its own in the authors' code), and mu
is halved in the term (there it is not: its 0.1 is 0.2 here). PFLlib's APPLE is another method: it uploads the
personalised model as the core, and p never moves.

With `max_downloads` a client downloads so many cores a round and uses the others as it had them last. Which
ones is drawn uniformly, as the authors' code does when it is run: its preference for cores not yet seen, and
for large |p_ij|, waits for a record of downloads that is never written. Clients that do not take part keep
what they have, and their cores stay at the server.

Memory. At P = 50,890 (204 kB a row) a copy of the cores for each participant would take
    318 MB for 40 of 40 clients, 20 GB for 100 of 1,000.
All others' cores are the same for everybody, so a host holds them once: N rows, 8 MB or 204 MB. With
`max_downloads` they are of different rounds, and every client keeps N rows of its own: 326 MB for 40 clients,
204 GB for 1,000, which `raypfl plan` refuses. p has N x N numbers.

Cost: two products of the cores with a vector a batch, 4 N P operations, none where `eta2` is 0.
"""

# N clients, S participants, K clients of a cohort, k clients of a batch, P parameters, q cores downloaded.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from raypfl.algebra import replace_rows, rows_of
from raypfl.config import StrictModel
from raypfl.methods.contract import Clients, Message, Method, Pairs, Plan, same_for_all
from raypfl.methods.pools import peer_messages, pool_of
from raypfl.methods.requirements import require_fresh_momentum
from raypfl.methods.start import common_start
from raypfl.rng import key, numpy_generator
from raypfl.training import SGD, Cohort, Moments, Network, TrainingConfig, cross_entropy


class Hub(NamedTuple):
    """Held by the server."""

    v: Tensor
    """The latest core of every client, `[N, P]`: parameters, no running statistics."""
    share: Tensor
    """p0, every client's share of all training samples, `[1, N]`."""


class State(NamedTuple):
    """Held by a client."""

    v: Tensor
    """Its core, `[N, P]`."""
    p: Tensor
    """Its relationships to all clients, itself included, `[N, N]`."""
    w: Tensor
    """Its personalised model after its last training, with its own running statistics, `[N, width]`."""
    cores: Tensor
    """Everybody's core as it was downloaded last, `[N, N, P]`; `[N, 0, P]` without `max_downloads`."""


class Down(NamedTuple):
    """To a participant."""

    cores: Tensor
    """Every core that somebody receives, once, `[1, U, P]`."""
    owner: Tensor
    """Whose cores a participant receives, int64 `[S, q]`; without `max_downloads` everybody's."""
    place: Tensor
    """Where these are in `cores`, int64 `[S, q]`."""
    itself: Tensor
    """The participant's own id, int64 `[S, 1]`; known to it, not sent."""
    share: Tensor
    """p0, `[1, N]`; known from registration, not sent."""


class Up(NamedTuple):
    """From a participant."""

    v: Tensor
    """Its core after local training, `[K, P]`."""


class Config(StrictModel):
    """Options of APPLE; the core's rate eta1 is the optimizer's (code: SGD 0.01 with momentum 0.9)."""

    name: Literal["apple"] = "apple"
    eta2: float = Field(1e-3, ge=0.0, description="step size of p (code: 0.001; PFLlib: 0)")
    p_momentum: float = Field(0.0, ge=0.0, lt=1.0, description="momentum of p in a round (code: 0.9)")
    mu: float = Field(0.1, ge=0.0, description="weight of the pull to p0 (code: 0.1, which is 0.2 here)")
    schedule: Literal["exp", "cos"] = Field(
        "exp", description="kappa: eps^(r/L), or (1 + cos(pi r/L)) / 2 (code: exp)"
    )
    L: int = Field(16, ge=0, description="rounds until kappa is 0 (code: a tenth of its 160)")
    eps: float = Field(1e-3, gt=0.0, le=1.0, description="where an exponential kappa ends (code: 0.001)")
    max_downloads: int | None = Field(
        None, ge=1, description="M, cores a client downloads a round; absent: all others"
    )


class APPLE(Method[Config, Hub, State, Down, Up]):
    """w_i = sum_j p_ij v_j, of which client i trains v_i and p_i."""

    Config = Config
    hub_type = Hub
    state_type = State
    shared = frozenset({"cores", "share"})
    pools = {"cores": "place"}
    summary = "APPLE: a learned mixture of all clients' core models"

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        require_fresh_momentum(training, self.config.name)

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor:
        return same_for_all(net, clients, net.num_weights)

    def init_hub(self, net: Network, clients: Clients) -> Hub:
        start = common_start(net, self.seed)[:, net.weights]
        return Hub(start.expand(len(clients.ids), -1), share_of(clients.sizes, net))

    def init_state(self, net: Network, clients: Clients) -> State:
        start = common_start(net, self.seed, len(clients.ids))
        share = share_of(clients.sizes_of_all, net)
        v, known = start[:, net.weights], 0 if self.config.max_downloads is None else share.shape[1]
        # A view: until the first download all caches are one row.
        cores = v[:1, None].expand(len(v), known, -1)
        return State(v.clone(), share.repeat(len(v), 1), start, cores)

    def plan(
        self, net: Network, hub: Hub, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        ids = sample(round)
        num = len(clients.ids) - 1
        wanted = num if self.config.max_downloads is None else min(self.config.max_downloads, num)
        # Places among the others; those from the client's own on are one further.
        chosen = torch.arange(num, device=ids.device).expand(len(ids), -1)
        if wanted < num:
            draws = [key(self.seed, "apple downloads", round, client) for client in ids.tolist()]
            picks = [numpy_generator(draw).choice(num, wanted, replace=False).tolist() for draw in draws]
            chosen = torch.tensor(picks, device=ids.device).sort(1).values
        return Plan(round, ids, clients.sizes[ids], chosen + (chosen >= ids[:, None]))

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        if self.config.max_downloads is None:
            # Everybody's, so that a product with the cores is the same on any number of hosts.
            everyone = torch.arange(len(hub.v), device=hub.v.device)
            ids, owner = everyone, everyone.expand(len(plan.ids), -1)
            place = owner
        else:
            assert plan.peers is not None
            (ids, place), owner = pool_of(plan), plan.peers
        return Down(rows_of(hub.v, ids)[None], owner, place, plan.ids[:, None], hub.share)

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        cores = self._cores(state, down)
        v, p, w, cohort.losses = cohort.run(
            self._train, state.v, state.p, state.w, down.itself, down.share, cores
        )
        return State(v, p, w, state.cores if self.config.max_downloads is None else cores), Up(v.clone())

    def _cores(self, state: State, down: Down) -> Tensor:
        """The cores that clients mix, as they have them now: `[K, N, P]`, or `[1, N, P]` for everybody."""
        if self.config.max_downloads is None:
            return down.cores
        cores = state.cores.clone(memory_format=torch.contiguous_format)
        for row, (owner, place) in enumerate(zip(down.owner, down.place, strict=True)):
            cores[row, owner] = down.cores[0, place]
        return cores

    def _train(
        self, chunk: Cohort, v: Tensor, p: Tensor, w: Tensor, itself: Tensor, share: Tensor, cores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """v, p, the personalised model, and the mean of F_i over all batches."""
        net, config, training = chunk.net, self.config, chunk.training
        optimizer, relating = training.optimizer, SGD(momentum=config.p_momentum)
        decay = training.decay(chunk.round)
        pull = config.mu * kappa(chunk.round - 1, config)
        v, p, buffers = v.clone(), p.clone(), w[:, net.statistics].clone()
        others = others_part(p, itself, cores)
        v_moments, p_moments = optimizer.moments(v), relating.moments(p)
        loss_sum, samples = v.new_zeros(len(v)), v.new_zeros(len(v))
        for batch in chunk.batches():
            at = batch.rows
            mine, row, me, statistics = v[at], p[at], itself[at], buffers[at]
            leaf = (row.gather(1, me) * mine + others[at]).requires_grad_()
            loss = cross_entropy(net.bind(leaf, statistics, leaf=leaf), batch)
            (g,) = net.slopes(loss, [leaf])
            own, related = (Moments(*(field[at] for field in kept)) for kept in (v_moments, p_moments))
            with torch.no_grad():
                g_v = row.gather(1, me) * g
                if config.eta2:
                    g_p = products(g, mine, me, batch.narrow(cores)).add_(row - share, alpha=pull)
                    relating.step(row, g_p, related, config.eta2 * decay)
                    others[at] = others_part(row, me, batch.narrow(cores))
                optimizer.step(mine, g_v, own, optimizer.lr * decay)
                if not isinstance(at, slice):
                    # An index tensor gathers copies; a prefix is a view, and already in place.
                    v[at], p[at], buffers[at] = mine, row, statistics
                    for kept, part in zip((*v_moments, *p_moments), (*own, *related), strict=True):
                        kept[at] = part
                loss_sum[at] += loss.detach() * batch.sizes
                samples[at] += batch.sizes
        w = net.assemble(p.gather(1, itself) * v + others, buffers)
        return v, p, w, loss_sum / samples

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        if up is not None:
            return state.w
        cores = self._cores(state, down)
        w = state.w.clone()
        # One at a time: bits of a product depend on how many rows it has.
        for row in range(len(w)):
            one = slice(row, row + 1)
            p, itself = state.p[one], down.itself[one]
            rest = others_part(p, itself, cores if len(cores) == 1 else cores[one])
            w[one, net.weights] = p.gather(1, itself) * state.v[one] + rest
        return w

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def own_relations(self, net: Network, ids: Tensor, state: State) -> dict[str, Pairs]:
        """p, which the server never sees."""
        everyone = torch.arange(state.p.shape[1], device=ids.device)
        receivers = ids.repeat_interleave(len(everyone))
        return {"relationship": Pairs(receivers, everyone.repeat(len(ids)), state.p.reshape(-1))}

    def aggregate(self, net: Network, hub: Hub, up: Up, plan: Plan) -> Hub:
        return hub._replace(v=replace_rows(hub.v, plan.ids, up.v))

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        return peer_messages(plan, cores=down.cores)


def share_of(sizes: Tensor, net: Network) -> Tensor:
    """p0: `[1, N]` in the precision of the models."""
    return (sizes.double() / sizes.sum()).to(net.dtype)[None]


def kappa(r: int, config: Config) -> float:
    """How strongly p is pulled to p0 in round r, which counts from 0: from 1 to 0 in L rounds."""
    if r >= config.L:
        return 0.0
    if config.schedule == "cos":
        return (math.cos(math.pi * r / config.L) + 1.0) / 2.0
    return math.exp(math.log(config.eps) * r / config.L)


def others_part(p_kN: Tensor, itself_k1: Tensor, cores: Tensor) -> Tensor:
    """`sum_{j != i} p_ij v_j`: `[k, P]`; cores `[k, N, P]`, or `[1, N, P]` for everybody."""
    others_kN = p_kN.scatter(1, itself_k1, 0.0)
    if len(cores) == 1:
        return others_kN @ cores[0]
    return torch.bmm(others_kN[:, None], cores)[:, 0]


def products(g_kP: Tensor, own_kP: Tensor, itself_k1: Tensor, cores: Tensor) -> Tensor:
    """`<g_i, v_j>` with all cores, and in the client's own place with its core as it is now: `[k, N]`."""
    all_kN = g_kP @ cores[0].T if len(cores) == 1 else torch.bmm(cores, g_kP[:, :, None])[:, :, 0]
    return all_kN.scatter(1, itself_k1, (g_kP * own_kP).sum(1, keepdim=True))
