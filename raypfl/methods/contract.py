"""What a method is: client code and server code over rows, with every piece of state and message declared.

Before a run, `method.check(...)` refuses what the method cannot work with. A round, for all methods:

    plan = method.plan(...)                        who takes part
    down = method.download(net, hub, plan)         what each participant receives
           evaluation PRE                          method.personalised(net, state, down)
    state, up = method.local_update(cohort, state, down)
           evaluation POST                         method.personalised(net, state, down, up)
    hub  = method.aggregate(net, hub, up, plan)

What is evaluated as personalised is `method.adapted(cohort, rows)`, for methods whose model is a start to be
adapted; the others leave the rows as they are.

State, messages and hub are NamedTuples of tensors: all that survives a round, is sent, counted,
checkpointed and restored. Nothing that a method receives may be modified in place.
"""

# N clients, S participants of a round, K clients of a cohort.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from raypfl.config import StrictModel
from raypfl.topology import Graph, TopologyConfig
from raypfl.training.cohort import Cohort
from raypfl.training.config import TrainingConfig
from raypfl.training.network import Network

Point = Literal["pre", "post"]
Model = Literal["personalised", "global", "alternative"]
Answer = Callable[[Tensor], Tensor]
"""What models make of inputs `[k, B, ...]`: logits `[k, B, C]`, each model of its own batch."""


class Nothing(NamedTuple):
    """A state or message without content."""


class Clients(NamedTuple):
    """What a server knows of its clients from their registration."""

    ids: Tensor
    """int64 `[N]`."""
    sizes: Tensor
    """Training samples, int64 `[N]`."""
    label_counts: Tensor
    """Training samples a class, int64 `[N, C]`."""
    all_sizes: Tensor | None = None
    """Training samples of every client of the run; None where these are all of them."""

    @property
    def sizes_of_all(self) -> Tensor:
        """Training samples of every client of the run, whichever of them these are."""
        return self.sizes if self.all_sizes is None else self.all_sizes

    def take(self, rows: Tensor) -> Clients:
        """Some of these clients."""
        return Clients(self.ids[rows], self.sizes[rows], self.label_counts[rows], self.sizes_of_all)


class Plan(NamedTuple):
    """One round's decisions, made before anything is sent."""

    round: int
    """Rounds count from 1."""
    ids: Tensor
    """Participants, int64 `[S]`, ascending."""
    sizes: Tensor
    """Their training samples, int64 `[S]`."""
    peers: Tensor | None = None
    """Whose models each participant gets to hear, where it is not the server's alone: client ids, int64
    `[S, q]`, each row ascending and filled up with -1."""
    graph: Graph | None = None
    """Who hears whom, of all N clients, where there is no server; edges among participants only."""
    senders: Tensor | None = None
    """Those of `ids` who upload and are aggregated, where others only train: client ids, int64."""
    all_sizes: Tensor | None = None
    """Training samples of all N clients, where there is no server, int64 `[N]`."""

    @property
    def uploads(self) -> Tensor:
        """Who of `ids` uploads, bool `[S]`."""
        if self.senders is None:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return torch.isin(self.ids, self.senders)

    def of_senders(self) -> Plan:
        """The plan as far as it is about those who upload, in the order of `ids`."""
        if self.senders is None:
            return self
        return self.among(self.uploads)._replace(senders=None)

    def among(self, here: Tensor) -> Plan:
        """The plan as far as it is about some of `ids`, bool `[S]`; the graph still says all that it said."""
        peers = None if self.peers is None else self.peers[here]
        return self._replace(ids=self.ids[here], sizes=self.sizes[here], peers=peers)


class Message(NamedTuple):
    """One field of one message, as the real system would send it."""

    src: int
    dst: int
    kind: str
    values: int
    bytes: int


class Pairs(NamedTuple):
    """A number for each of some ordered pairs of clients, as entries of a matrix."""

    receivers: Tensor
    """The client whose row it is: whose model, head or decision the number goes into. Ids, int64 `[E]`."""
    sources: Tensor
    """The client whose column it is. Ids, int64 `[E]`."""
    values: Tensor
    """`[E]`."""


AS_FEDAVG = 1.15
"""`Method.cost` of methods that do what FedAvg does, a gradient a batch, and little beside it."""
SERVER = -1
"""The server's id in messages."""

HubT = TypeVar("HubT", bound=tuple[Tensor, ...])
StateT = TypeVar("StateT", bound=tuple[Tensor, ...])
DownT = TypeVar("DownT", bound=tuple[Tensor, ...])
UpT = TypeVar("UpT", bound=tuple[Tensor, ...])
ConfigT = TypeVar("ConfigT", bound=StrictModel)


class Method(ABC, Generic[ConfigT, HubT, StateT, DownT, UpT]):
    """A federated method, written once for any number of clients.

    Class attributes:
        Config: the options, beside the method; each default with its source.
        hub_type, state_type: the types of what server and clients keep.
        shared: names of fields of the downloaded message that are the same for everyone; they have a leading
            axis of 1, every other field has one row a participant.
        pools: shared fields `[1, U, ...]` of whose U rows a participant receives only some, each with the
            field of row numbers `[S, q]` that says which (-1: none). A host is handed the rows that its own
            participants receive.
        columns: fields of hub, download and upload `[..., C]` on whose last axis the server works column by
            column, so that several servers can hold it together; all other fields stand at each of them.
            `download` and `diagnose` may use what `algebra` sums over columns; `aggregate` may not. Empty:
            the server's step needs whole rows.
        reported: which model is evaluated at which point in the papers' tables.
        personal_models: clients may keep models of another architecture, `net.personal`.
        without_server: messages go from client to client, and `aggregate` only publishes.
        norms_at_home: the method sends what `net.shared` has and nothing else, so that parameters of
            normalisation layers may stay at their client, too (`model.buffers: fedbn`).
        by_turns: participants may also have their turns one after another (Gauss-Seidel, own pace): a plan
            may then have fewer `ids` than its graph has receivers, `download` gives their rows of what it
            would give to all, and `aggregate` publishes theirs alone.
        summary: one line for lists.
        needed: options that have no default, with values that will do for a trial.
        variants: options under which other code runs, by a short name; `raypfl bench methods` measures them
            beside the defaults.
    """

    Config: ClassVar[type[Any]]
    hub_type: ClassVar[type[Any]] = Nothing
    state_type: ClassVar[type[Any]] = Nothing
    shared: ClassVar[frozenset[str]] = frozenset()
    pools: ClassVar[dict[str, str]] = {}
    columns: ClassVar[frozenset[str]] = frozenset()
    reported: ClassVar[tuple[Model, Point]] = ("personalised", "post")
    personal_models: ClassVar[bool] = False
    without_server: ClassVar[bool] = False
    norms_at_home: ClassVar[bool] = False
    by_turns: ClassVar[bool] = False
    summary: ClassVar[str]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    needed: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: ConfigT, seed: int = 0, topology: TopologyConfig | None = None) -> None:
        self.config = config
        self.seed = seed
        self.run_topology = topology
        """Who hears whom in this run, for methods without a server, unless they have one of their own."""

    def check(self, net: Network, clients: Clients, training: TrainingConfig) -> None:
        """Refuse a network, clients or training that the method cannot work with; called before a run starts.

        Raises:
            ConfigError: says which setting, its value, and what to do.
        """

    def cost(self) -> float | None:
        """What an epoch of local training costs at most beside one of FedAvg; None if nothing is promised.

        By the arithmetic of the method, a gradient of one model on one batch being 1, with what the simulator
        adds. `raypfl bench methods` measures it.
        """
        return None

    def passes(self, training: TrainingConfig, samples: int) -> float:
        """How often a local update goes over a client's `samples`: the epochs that `cost` speaks of."""
        if training.steps is None:
            return training.epochs
        return training.steps / ceil(samples / training.batch_size)

    def upload_bytes(self, net: Network, clients: Clients) -> Tensor | None:
        """Bytes that each of some clients uploads in a round, int64 `[K]`; None if only training tells.

        What `sent_up` will count; a server's dead-line has to know it before anybody trains.
        """
        return None

    @property
    def snapshot(self) -> frozenset[str]:
        """Fields of the hub that are read as they were when the round began.

        For participants who have their turns one after another (Gauss-Seidel); of other fields they get what
        is newest.
        """
        return frozenset()

    @abstractmethod
    def init_hub(self, net: Network, clients: Clients) -> HubT:
        """What the server holds before the first round."""

    @abstractmethod
    def init_state(self, net: Network, clients: Clients) -> StateT:
        """What some clients hold before the first round, one row a client.

        Called wherever those clients live, with them alone; so it may depend on nothing but keys and what
        `clients` says of all.
        """

    def plan(
        self, net: Network, hub: HubT, clients: Clients, round: int, sample: Callable[[int], Tensor]
    ) -> Plan:
        """Who takes part; by default the uniform sample `sample(round)` of the configuration."""
        ids = sample(round)
        return Plan(round, ids, clients.sizes[ids])

    @abstractmethod
    def download(self, net: Network, hub: HubT, plan: Plan) -> DownT:
        """What the participants receive, rows in the order of `plan.ids`."""

    def diagnose(self, net: Network, hub: HubT, plan: Plan, down: DownT) -> dict[str, float]:
        """Numbers about the server's step of this round, by name; asked for by `evaluation.diagnostics`."""
        return {}

    def relations(self, net: Network, hub: HubT, plan: Plan, down: DownT) -> dict[str, Pairs]:
        """Who collaborates with whom in this round, by the name of the matrix; rows of `plan.ids`.

        Recorded in rounds that are evaluated, where `evaluation.diagnostics` asks for it. Reports pair the
        names `coefficient`, positive where the source pulls and negative where it pushes, and `distance`.
        """
        return {}

    def own_relations(self, net: Network, ids: Tensor, state: StateT) -> dict[str, Pairs]:
        """As `relations`, where clients know what the server does not.

        Args:
            net: the network.
            ids: participants, `[K]`.
            state: what they keep after training, rows in that order.
        """
        return {}

    @abstractmethod
    def local_update(self, cohort: Cohort, state: StateT, down: DownT) -> tuple[StateT, UpT]:
        """Train the clients of a cohort; rows of all arguments and results are the cohort's clients."""

    @abstractmethod
    def personalised(self, net: Network, state: StateT, down: DownT, up: UpT | None = None) -> Tensor:
        """The rows `[K, width]` a client would use: as received (PRE) or, with its upload, trained (POST)."""

    def absent(self, net: Network, state: StateT, down: DownT) -> Tensor:
        """The rows a client would use that does not take part; of `down` it has the shared fields only."""
        return self.personalised(net, state, down)

    def adapted(self, cohort: Cohort, w: Tensor) -> Tensor:
        """What clients make of their models `[K, width]` with training data, just for being evaluated.

        Called at every evaluation with the rows of `personalised` or `absent` of whoever is evaluated, and a
        cohort of these clients, whose round is the round of the record. Nothing of it is kept.
        """
        return w

    def alternative(self, net: Network, state: StateT, down: DownT, up: UpT | None = None) -> Tensor | None:
        """Rows of another model of each client that papers or their code report beside the personalised one.

        For clients that do not take part `down` has the shared fields only.
        """
        return None

    def answer(self, net: Network, model: Model, ids: Tensor, rows: Tensor) -> Answer:
        """How rows of `personalised`, `alternative` or `global_model` answer in an evaluation.

        By default they are models of `net` in evaluation mode. A method whose clients decide otherwise, or
        have networks of another architecture, may give rows of any length and read them here.

        Args:
            net: the network of the run.
            model: which of them the rows are.
            ids: the clients whose rows these are, int64 `[k]`.
            rows: `[k, ...]`.
        """
        return net.bind(rows).__call__

    def global_model(self, net: Network, state: StateT, down: DownT) -> Tensor | None:
        """Rows of the server's one model as each client would run it, if the method has one."""
        return None

    @abstractmethod
    def aggregate(self, net: Network, hub: HubT, up: UpT, plan: Plan) -> HubT:
        """What the server holds after the round; `plan` is about those who upload, in its order."""

    def sent_down(self, net: Network, plan: Plan, down: DownT) -> list[Message]:
        """The messages to participants; by default every field of `down`, once a participant."""
        return [
            message
            for row, client in enumerate(plan.ids.tolist())
            for message in _fields(down, SERVER, client, row, self.shared)
        ]

    def sent_up(self, net: Network, ids: Tensor, up: UpT) -> list[Message]:
        """The messages from clients `ids`; by default every field of `up`."""
        return [
            message for row, client in enumerate(ids.tolist()) for message in _fields(up, client, SERVER, row)
        ]


def every_pair(ids: Tensor, values_SS: Tensor) -> Pairs:
    """All entries of a matrix whose rows and columns are the clients `ids`."""
    return Pairs(ids.repeat_interleave(len(ids)), ids.repeat(len(ids)), values_SS.reshape(-1))


def same_for_all(net: Network, clients: Clients, values: int) -> Tensor:
    """`upload_bytes` of methods whose clients all upload so many numbers of the network's dtype."""
    return torch.full_like(clients.ids, values * net.dtype.itemsize)


def _fields(
    message: tuple[Tensor, ...], src: int, dst: int, row: int, shared: frozenset[str] = frozenset()
) -> list[Message]:
    names: tuple[str, ...] = message._fields  # type: ignore[attr-defined]
    out = []
    for name, field in zip(names, message, strict=True):
        own = field[0 if name in shared else row]
        if own.numel():
            out.append(Message(src, dst, name, own.numel(), own.numel() * own.element_size()))
    return out
