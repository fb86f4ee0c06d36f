"""UA-PDFL: peers compare answers to one constant input, and share heads, extractors or whole models by them.

"UA-PDFL: A Personalized Approach for Decentralized Federated Learning", arXiv 2412.11674, Algorithm 2. Peer
i has an extractor g and a head h, hears the peers Q_i, and in every round

    D_ij = divergence of softmax(h_j(g_j(X_u))) from its own         X_u constant, the same for everybody
    all D_ij <= tau:  (g_i, h_i) <- (g_j*, h_j*), j* one of Q_i      client-wise dropout
    otherwise:        g_i <- mean of g over Q_i and i                layer-wise personalisation
                      h_i <- mean of h over B_i and i, B_i = {j : D_ij < tau}
    abar_i = mean of g_j(X_u) over Q_i and i
    (g_i, h_i) <- LT of  F_i + mu ||g(X_u) - abar_i||^2

Means of models are by training samples (`topology.weights`), abar is uniform. What is heard is from the end
of the round before: a snapshot, not the live models that the released code averages. Answers are given in
evaluation mode. Statistics of normalisation layers go with their layer; those kept at home (`model.buffers:
local`, and `fedbn` with the layers' own parameters) are not replaced in a dropout, either.
Momentum is local training's (`training.momentum_state`), also after a model was replaced.

Where paper and released code differ, both are options and the paper is the default, except for:
- `divergence`: the paper's Eq. 6 is Jeffreys' (half the sum); its name for it, its numbers (0.61 where
  Jensen-Shannon's ends at 0.69) and the code are Jensen-Shannon's: js.
- `prox_reduce`: the paper has the sum of squares, here it is the mean over features, so that mu means the
  same for 512 features as for 16,384.
Neither gives tau or mu. In the first round after a common start all D are 0 and everyone drops, as Algorithm
2 has it: nothing changes.

What is sent: first, of everyone heard, the number of its samples and both answers (in ablations, too), then
models. Answers are sent as logarithms, in which no small probability is lost.
A peer whose model is not finite publishes no answer (NaN): it is missing for everybody, and stays broken.

Same as: `peer_fedper` with tau = -1, mu = 0; `peer_fedavg` with use_cd = false, mu = 0 and every peer
close.
Peers that train one after another within a round (`clock.order`) hear the newest models, but decide by the
answers of the round's start, as the released code does.
"""

# N peers, S of them there in a round, K of a cohort; P columns that travel, O logits, A features, Q heard.

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from raypfl.algebra import Csr, csr_from_pairs, mix_groups, mix_sparse, replace_rows
from raypfl.errors import ConfigError
from raypfl.methods.contract import Clients, Message, Pairs, Plan
from raypfl.methods.peers import (
    SIZE_BYTES,
    PeerConfig,
    Peers,
    State,
    csr_of,
    entries,
    heard,
    rows_for,
    sizes_of_all,
)
from raypfl.methods.requirements import require_split
from raypfl.methods.ua_pdfl_answers import (
    Reduction,
    Value,
    answers,
    answers_one_by_one,
    batch_term,
    unit_input,
    unit_term,
)
from raypfl.methods.ua_pdfl_decision import NOBODY, Decision, Divergence, Rule, decide, draw_peer
from raypfl.topology import Mixing, weights
from raypfl.training import Cohort, Network, TrainingConfig, cross_entropy

NEVER = -1.0
"""The threshold below which nothing is."""
NOTHING, EXTRACTOR, BOTH, MODEL = range(4)
"""What a peer asks of one it heard of: nothing more, its extractor, extractor and head, the model at once."""
TAU = {"js": 0.12, "jeffreys": 0.6}
UNITS = {"ones": 1.0, "zeros": 0.0}
MU = {"unit": 1.0, "batch": 0.01}


class Config(PeerConfig):
    """tau, mu, and what paper and released code leave open or do differently."""

    name: Literal["ua_pdfl"] = "ua_pdfl"
    tau: float | None = Field(
        None,
        description="th_I: closer peers share heads; -1 never, js 0 to 1 (0.7 always), jeffreys from 0; "
        "absent: 0.12 for js, 0.6 for jeffreys, set between the label divergences of beta 0.5 and 5",
    )
    mu: Annotated[float, Field(ge=0)] | None = Field(
        None, description="weight of the proximal term; not published; absent: 1 for unit, 0.01 for batch"
    )
    divergence: Divergence = Field("js", description="Jensen-Shannon (code) or Jeffreys (Eq. 6)")
    unit: str | list[Any] = Field(
        "ones",
        description="X_u, in normalised space: ones (code), zeros, const:NUMBER, or nested lists of numbers, "
        "as many as a sample has or repeated to its shape: [[[0.4]], [[0.5]], [[0.3]]] for three channels",
    )
    drop_strict: bool = Field(False, description="dropout where all D < tau (code) and not <= (Algorithm 2)")
    heads_strict: bool = Field(True, description="heads of D < tau (Algorithm 2) and not <= (code)")
    prox_input: Literal["unit", "batch"] = Field(
        "unit", description="term on the unit input (paper), or on each batch's own features (code)"
    )
    prox_reduce: Reduction = Field("mean", description="over features: mean (code) or sum (paper)")
    aux_avg: Literal["uniform_self", "samplesize_peers"] = Field(
        "uniform_self",
        description="abar: uniform with its own (paper), or of the peers alone by training samples (code), "
        "found by running their extractors, so that these are sent in a dropout, too",
    )
    use_cd: bool = Field(True, description="client-wise dropout")
    use_lp: bool = Field(True, description="layer-wise personalisation; without it whole models, and mu = 0")

    @field_validator("unit")
    @classmethod
    def _unit(cls, unit: str | list[Any]) -> str | list[Any]:
        if isinstance(unit, list):
            return _finite_lists(unit)
        try:
            known = unit in UNITS or (unit.startswith("const:") and abs(float(unit[6:])) < inf)
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"{unit!r} is none of ones, zeros and const:NUMBER, such as const:0.5")
        return unit

    @model_validator(mode="after")
    def _tau_in_range(self) -> Config:
        highest, span = (1.0, "0 to 1") if self.divergence == "js" else (inf, "0 or more")
        if self.threshold != NEVER and not 0 <= self.threshold <= highest:
            raise ValueError(
                f"tau = {self.threshold:g} is no threshold of {self.divergence}; use {span}, or -1 for never"
            )
        return self

    @property
    def threshold(self) -> float:
        """What divergences are compared with."""
        return TAU[self.divergence] if self.tau is None else self.tau

    @property
    def weight(self) -> float:
        """Of the proximal term in training; without layer-wise personalisation there is none."""
        if not self.use_lp:
            return 0.0
        return MU[self.prox_input] if self.mu is None else self.mu

    @property
    def unit_value(self) -> Value:
        """Every entry of X_u, or nested lists of them."""
        if isinstance(self.unit, list):
            return self.unit
        return UNITS[self.unit] if self.unit in UNITS else float(self.unit.removeprefix("const:"))


class Published(NamedTuple):
    """Held by the network between peers: what every peer published last."""

    w: Tensor
    """The columns of models that travel, `[N, P]`."""
    u: Tensor
    """Unit representations, logarithms `[N, O]`."""
    a: Tensor
    """Auxiliary representations, `[N, A]`."""


class Down(NamedTuple):
    """What each peer makes of what it hears; not a message."""

    w: Tensor
    """The columns that travel: mixed, or another peer's, `[S, P]`."""
    abar: Tensor
    """Target of the proximal term, `[S, A]`."""
    pick: Tensor
    """Whose model it took, int64 `[S]`; -1: dropped nothing."""
    asked: Tensor
    """What it asks of each peer that the plan's graph lets it hear, in that order, int8 `[S, Q]`."""


class Up(NamedTuple):
    """What a peer publishes; sent when somebody hears it."""

    w: Tensor
    """`[K, P]`."""
    u: Tensor
    """`[K, O]`."""
    a: Tensor
    """`[K, A]`."""


class UAPDFL(Peers[Config, Published, State, Down, Up]):
    """Phi <- A_g Phi, H <- A_h H with rows decided by divergences; LT with a pull at the unit input."""

    Config = Config
    hub_type = Published
    state_type = State
    norms_at_home = True
    by_turns = True
    summary = "UA-PDFL: peers share heads, extractors or whole models by answers to one input"

    @property
    def snapshot(self) -> frozenset[str]:
        """Answers, and so all decisions; with `samplesize_peers` peers run each other's newest extractors."""
        return frozenset({"u", "a"} if self.config.aux_avg == "uniform_self" else {"u"})

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        super().check(net, clients, training)
        require_split(net, self.config.name)
        try:
            unit_input(net, self.config.unit_value, 1)
        except RuntimeError:
            shape = list(torch.tensor(self.config.unit_value).shape)
            raise ConfigError(
                f"method ua_pdfl: unit has the shape {shape}, which cannot be repeated to that of a sample, "
                f"{list(net.input_shape)}."
            ) from None

    def init_hub(self, net: Network, clients: Clients) -> Published:
        w = self.starts(net, clients.ids)
        common = self.config.init == "common"
        start = answers_one_by_one(net, w[:1] if common else w, self.config.unit_value)
        return Published(w[:, net.shared].clone(), *(rows.expand(len(w), -1).clone() for rows in start))

    def init_state(self, net: Network, clients: Clients) -> State:
        return State(self.starts(net, clients.ids))

    def decide(self, hub: Published, plan: Plan) -> Decision:
        """Who drops its model, and whose heads the others take: edges of the plan only."""
        assert plan.graph is not None
        config = self.config
        tau = config.threshold
        rule = Rule(tau, config.divergence, config.drop_strict, config.heads_strict, config.use_cd)
        return decide(
            hub.u.double().log_softmax(1).cpu(),
            _finite(hub).cpu(),
            plan.graph,
            rule,
            lambda peer, candidates: draw_peer(self.seed, plan.round, peer, candidates),
        )

    def download(self, net: Network, hub: Published, plan: Plan) -> Down:
        decided, ids = self.decide(hub, plan), plan.ids.to(hub.w.device)
        extractor, head = (rows_for(matrix, ids) for matrix in self._mixings(decided, plan))
        # Running statistics travel with the layer they sit in; those of the head come last.
        groups = [(net.head, head), (net.body, extractor), (slice(net.body.stop, net.shared.stop), head)]
        return Down(
            mix_groups(groups, hub.w),
            mix_sparse(rows_for(self._average(decided, plan), ids), hub.a),
            decided.pick.to(ids.device)[ids],
            self._asked(net, decided, plan).to(ids.device),
        )

    def _mixings(self, decided: Decision, plan: Plan) -> tuple[Csr, Csr]:
        """A_g and A_h, rows of all N peers."""
        extractor = _with_picks(self.weights(plan, decided.graph), decided.pick)
        if not self.config.use_lp:
            return extractor, extractor
        return extractor, _with_picks(self.weights(plan, decided.heads), decided.pick)

    def _average(self, decided: Decision, plan: Plan) -> Csr:
        """The weights of abar."""
        graph = decided.graph
        if self.config.aux_avg == "uniform_self":
            return csr_of(weights(graph, "uniform"))
        sizes = sizes_of_all(plan).double()
        total = torch.zeros_like(sizes).index_add_(0, graph.receivers, sizes[graph.sources])
        alone = (graph.degree == 0).nonzero()[:, 0]
        return csr_from_pairs(
            torch.cat((graph.receivers, alone)),
            torch.cat((graph.sources, alone)),
            torch.cat((sizes[graph.sources] / total[graph.receivers], torch.ones(len(alone)))),
            graph.num_peers,
        )

    def _runs_models(self, net: Network) -> bool:
        """Whether peers find `a_j` by running extractors; they cannot where statistics stay at home."""
        return self.config.aux_avg == "samplesize_peers" and net.private.start == net.private.stop

    def _asked(self, net: Network, decided: Decision, plan: Plan) -> Tensor:
        assert plan.graph is not None
        graph, pick = decided.graph, decided.pick
        dropped, mixed = torch.full((2, graph.num_edges), EXTRACTOR)
        mixed[decided.close] = BOTH
        if not self.config.use_lp:
            mixed[:] = MODEL
        if not self._runs_models(net):
            dropped[:] = NOTHING
        dropped[graph.sources == pick[graph.receivers]] = BOTH if self._runs_models(net) else MODEL
        wanted_E = torch.where(pick[graph.receivers] == NOBODY, mixed, dropped)

        # Missing peers keep their places in the plan's graph, with nothing asked of them.
        num_peers = plan.graph.num_peers
        edges = plan.graph.receivers * num_peers + plan.graph.sources
        at = torch.searchsorted(edges, graph.receivers * num_peers + graph.sources)
        within = at - plan.graph.offsets[graph.receivers]
        asked = torch.zeros(num_peers, int(plan.graph.degree.max()), dtype=torch.int8)
        asked[graph.receivers, within] = wanted_E.to(torch.int8)
        return asked[plan.ids.cpu()]

    def diagnose(self, net: Network, hub: Published, plan: Plan, down: Down) -> dict[str, float]:
        """What was decided, from the second round on: in the first, models have not learnt anything.

        `frac_drop` is the share of peers that took another's model, `mean_heads` the mean of `|B_i|` over
        all peers there, `missing_peers` how many of them are broken.
        """
        if plan.round == 1:
            return {}
        decided, ids = self.decide(hub, plan), plan.ids
        found = {
            "frac_drop": float((down.pick != NOBODY).double().mean()),
            "mean_heads": float(decided.num_heads[ids.cpu()].double().mean()),
            "missing_peers": float((~_finite(hub)[ids]).sum()),
        }
        if len(decided.divergences):
            # Not `quantile`, which refuses more than 16 million: 4,100 peers that hear everyone.
            ordered = decided.divergences.sort().values
            for percent in (5, 50, 95):
                found[f"divergence_{percent:02d}"] = float(ordered[(len(ordered) - 1) * percent // 100])
        return found

    def relations(self, net: Network, hub: Published, plan: Plan, down: Down) -> dict[str, Pairs]:
        """D of everyone heard, and both mixing matrices; from the second round on, as `diagnose`."""
        if plan.round == 1:
            return {}
        decided, ids = self.decide(hub, plan), plan.ids.to(hub.w.device)
        graph = decided.graph
        heard_E = torch.isin(graph.receivers, plan.ids.cpu())
        extractor, head = (rows_for(matrix, ids) for matrix in self._mixings(decided, plan))
        return {
            "divergence": Pairs(*(x[heard_E] for x in (graph.receivers, graph.sources, decided.divergences))),
            "extractor weight": entries(extractor, ids),
            "head weight": entries(head, ids),
        }

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        config, net = self.config, cohort.net
        start = self.personalised(net, state, down)
        mu, value, reduction = config.weight, config.unit_value, config.prox_reduce
        if mu == 0:
            w = cohort.fit(start, cross_entropy).w
        elif config.prox_input == "unit":
            w = cohort.fit(start, unit_term(value, mu, reduction), down.abar).w
        else:
            w = cohort.fit(start, batch_term(mu, reduction), down.abar).w
        u, a = cohort.run(lambda chunk, rows: answers(net, rows, value), w, purpose="answers")
        return State(w), Up(w[:, net.shared].clone(), u, a)

    def personalised(self, net: Network, state: State, down: Down, up: Up | None = None) -> Tensor:
        if up is not None:
            return state.w
        w = state.w.clone()
        w[:, net.shared] = down.w
        return w

    def absent(self, net: Network, state: State, down: Down) -> Tensor:
        return state.w

    def aggregate(self, net: Network, hub: Published, up: Up, plan: Plan) -> Published:
        return Published(*(replace_rows(old, plan.ids, new) for old, new in zip(hub, up, strict=True)))

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        """Answers from everyone that is heard, before any model; then the models that are asked for."""
        assert plan.graph is not None
        size = down.w.element_size()
        first = {"unit_rep": net.num_outputs, "aux_rep": down.abar.shape[1]}
        if self._runs_models(net):
            del first["aux_rep"]
        content = {kind: (values, values * size) for kind, values in first.items()}
        messages = heard(plan, {**content, "meta": (1, SIZE_BYTES)})
        body = net.body.stop - net.body.start
        pieces = {"extractor": body, "head": net.shared.stop - body, "full": net.shared.stop}
        kinds = {NOTHING: (), EXTRACTOR: ("extractor",), BOTH: ("extractor", "head"), MODEL: ("full",)}
        for peer, row in zip(plan.ids.tolist(), down.asked.tolist(), strict=True):
            for source, asked in zip(plan.graph.sources_of(peer).tolist(), row, strict=False):
                messages += [
                    Message(source, peer, kind, pieces[kind], pieces[kind] * size) for kind in kinds[asked]
                ]
        return messages


def _finite_lists(unit: list[Any]) -> list[Any]:
    try:
        known = bool(torch.tensor(unit, dtype=torch.float64).isfinite().all()) and unit != []
    except (TypeError, ValueError):
        known = False
    if not known:
        raise ValueError("lists for unit hold finite numbers and have one length at each depth")
    return unit


def _with_picks(mixing: Mixing, pick_N: Tensor) -> Csr:
    """The matrix with the rows of those that drop their model replaced by a copy of the picked row."""
    dropped = (pick_N != NOBODY).nonzero()[:, 0]
    kept = pick_N[mixing.rows] == NOBODY
    return csr_from_pairs(
        torch.cat((mixing.rows[kept], dropped)),
        torch.cat((mixing.columns[kept], pick_N[dropped])),
        torch.cat((mixing.values[kept], torch.ones(len(dropped), dtype=torch.float64))),
        mixing.num_peers,
    )


def _finite(hub: Published) -> Tensor:
    """Which peers gave finite answers, bool `[N]`."""
    return hub.u.isfinite().all(1) & hub.a.isfinite().all(1)
