"""A client host: it keeps the rows of its clients, trains them and evaluates them. Knows nothing of Ray."""

# k participants of a block, K clients of a block.

from __future__ import annotations

import time
import traceback
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.engine.evaluation import picked, score, tried
from raypfl.engine.messages import put, take
from raypfl.engine.tables import columns_of, entries_of
from raypfl.engine.world import World, samples_on
from raypfl.errors import ClientError, DivergedError, RaypflError
from raypfl.methods import Message
from raypfl.methods.contract import Point
from raypfl.records import checkpoints
from raypfl.records.manifest import Part
from raypfl.records.storage import Place
from raypfl.training import Cohort
from raypfl.training.cohort import Split

LOCAL_UPDATE = "local update"
"""The phase in which only participants are worked on."""

PART_BYTES = 2**28
"""About how much of the rows is copied at once for a checkpoint."""

AnyRows = Any
"""A NamedTuple of tensors whose type the method declares."""


class Work(NamedTuple):
    """What a host is asked to do in one round."""

    round: int
    """The round of the records; rounds count from 1."""
    ids: Tensor
    """Participants among this host's clients, ascending, int64 `[k]`."""
    uploads: Tensor
    """Which of them send what they trained to the hub, bool `[k]`."""
    down: AnyRows
    """What they receive, rows in the order of `ids`; also what clients that do not take part could fetch."""
    train: bool
    """Whether to train; without it only the received models are evaluated."""
    evaluate_pre: bool
    """Whether to evaluate what was received, as PRE of the round before."""
    evaluate_post: bool
    """Whether to evaluate what was trained, as POST of this round."""
    turn: int
    """The round that participants train in by their own count: of keys and of the learning rate."""
    shown: Tensor | None
    """The clients that may be evaluated, ascending; None: all."""

    def shows(self, ids: Tensor) -> bool:
        """Whether any of these clients may be evaluated."""
        return self.shown is None or bool(torch.isin(ids, self.shown).any())


class Report(NamedTuple):
    """What the driver gets to know of a host's round: numbers, never rows."""

    clients: list[dict[str, Any]]
    """Blocks of client records, by column."""
    traffic: dict[str, Any]
    """Messages that this host's clients sent, by column."""
    evaluation_seconds: float
    seconds: float
    """All of the host's work, evaluation included."""
    pairs: list[dict[str, Any]]
    """Entries of matrices between clients that this host's clients gave, by column."""


class AtWork(NamedTuple):
    """What a host is doing, for those who ask while it does it."""

    clients: tuple[int, ...]
    """The clients that it works on together."""
    since: float
    """When it began with them, by this process's monotonic clock, in seconds."""
    phase: str


class Upload(NamedTuple):
    """What one block sends to the hub."""

    ids: Tensor
    up: AnyRows


class ClientHost:
    """Owns some blocks of clients: their state, their data and all work on them.

    Args:
        world: the run.
        blocks: indices of the blocks that live here.
        x, y: the data set, shared by every host of a node; not written.
    """

    def __init__(
        self, world: World, blocks: Sequence[int], x: np.ndarray, y: np.ndarray, device: torch.device
    ) -> None:
        self.world, self.device = world, device
        self.net, self.method = world.network(device), world.method()
        self.samples = samples_on(device, x, y)
        cut = world.blocks()
        self.blocks = {block: cut[block] for block in blocks}
        self.splits: tuple[Split, ...] = ("test",)
        if any(len(client.validation) for client in world.federation.clients):
            self.splits = ("validation", "test")
        # What a client keeps besides the method's state: momentum, where the configuration has it kept.
        self.kept_columns = self.net.num_weights if world.config.training.keeps_momentum else 0
        self.stored_type = stored_type(self.method.state_type)
        self.at_work: AtWork | None = None
        self.restore(None)

    def restore(self, checkpoint: Place | None) -> None:
        """Go back to a checkpoint, or to the state before the first round."""
        self.state: dict[int, AnyRows] = {}
        self.velocity: dict[int, Tensor] = {}
        self._ours: set[int] = set()
        """Blocks whose rows are in memory that nothing else refers to."""
        if checkpoint is not None:
            with checkpoints.at_hand(checkpoint, of_clients=True) as folder:
                for block, ids in self.blocks.items():
                    rows = checkpoints.read_rows(folder, ids, self.stored_type)
                    *own, self.velocity[block] = (field.to(self.device) for field in rows)
                    self.state[block] = self.method.state_type(*own)
            return
        clients = self.world.clients(self.device)
        for block, ids in self.blocks.items():
            self.state[block] = self.method.init_state(self.net, clients.take(ids.to(self.device)))
            # A velocity of zero is a fresh one: v <- rho 0 + g.
            self.velocity[block] = torch.zeros(len(ids), self.kept_columns, device=self.device)

    def save(self, building: Place, name: str) -> list[Part]:
        """Write this host's rows as parts of a checkpoint: one, or several where it is large."""
        groups = self._groups()
        names = [name] if len(groups) == 1 else [f"{name}-{number:03d}" for number in range(len(groups))]
        parts = []
        for called, blocks in zip(names, groups, strict=True):
            stored = [(*self.state[block], self.velocity[block]) for block in blocks]
            rows = self.stored_type(*(torch.cat(fields) for fields in zip(*stored, strict=True)))
            ids = torch.cat([self.blocks[block] for block in blocks])
            parts.append(checkpoints.write_part(building, called, rows, ids))
        return parts

    def _groups(self) -> list[list[int]]:
        """This host's blocks, as many together as may be copied at once."""
        groups: list[list[int]] = [[]]
        size = 0
        for block, state in self.state.items():
            own = sum(field.nbytes for field in (*state, self.velocity[block]))
            if groups[-1] and size + own > PART_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(block)
            size += own
        return groups

    def work(self, work: Work, send: Callable[[Upload], None] | None = None) -> tuple[list[Upload], Report]:
        """One round of this host's clients.

        Args:
            work: what the hub asks for.
            send: takes each block's upload as soon as it is there; it is then not returned.

        Raises:
            ClientError: code of the method or model raised at a client.
            DivergedError: a client's loss is not finite.
        """
        start = time.perf_counter()
        uploads: list[Upload] = []
        records: list[dict[str, Any]] = []
        messages: list[Message] = []
        pairs: list[dict[str, Any]] = []
        evaluation_seconds = 0.0
        trained: dict[int, tuple[Tensor, AnyRows]] = {}
        velocity: dict[int, Tensor] = {}
        for block, ids in self.blocks.items():
            here = torch.isin(work.ids, ids)
            participants = work.ids[here]
            if not (len(participants) or work.shows(ids)):
                continue
            rows = torch.searchsorted(ids, participants).to(self.device)
            down = take(work.down, here.nonzero()[:, 0].to(self.device), self.method.shared)
            state = self.state[block]
            if work.evaluate_pre:
                begin = time.perf_counter()
                with self._phase("evaluation", ids, work.round):
                    records += self._evaluate(work, "pre", block, rows, state, down, None)
                evaluation_seconds += time.perf_counter() - begin
            if not work.train:
                continue
            up = None
            if len(participants):
                cohort = self._cohort(participants, work.turn)
                if self.kept_columns:
                    cohort.velocity = self.velocity[block][rows]
                own, up = self._train(cohort, work.round, rows, state, down, records)
                trained[block] = rows, own
                if work.evaluate_post and self.world.config.evaluation.diagnostics:
                    found = self.method.own_relations(self.net, participants.to(self.device), own)
                    pairs += [entries_of(name, matrix) for name, matrix in found.items()]
                if cohort.velocity is not None:
                    velocity[block] = cohort.velocity
                sends = work.uploads[here]
                if sends.any():
                    upload = _upload(participants, up, sends)
                    (send or uploads.append)(upload)
                    messages += self.method.sent_up(self.net, upload.ids, upload.up)
            if work.evaluate_post:
                begin = time.perf_counter()
                with self._phase("evaluation", ids, work.round):
                    if len(participants):
                        state = put(state, rows, own)
                    records += self._evaluate(work, "post", block, rows, state, down, up)
                evaluation_seconds += time.perf_counter() - begin
        # Only now, so that a client that fails leaves every row of the host as it was.
        for block, (rows, own) in trained.items():
            self._keep(block, rows, own)
            if block in velocity:
                self.velocity[block].index_copy_(0, rows, velocity[block])
        seconds = time.perf_counter() - start
        return uploads, Report(records, columns_of(messages), evaluation_seconds, seconds, pairs)

    def _train(
        self,
        cohort: Cohort,
        round: int,
        rows: Tensor,
        state: AnyRows,
        down: AnyRows,
        records: list[dict[str, Any]],
    ) -> tuple[AnyRows, AnyRows]:
        participants = cohort.ids
        with self._phase(LOCAL_UPDATE, participants, round):
            own, up = self.method.local_update(cohort, take(state, rows), down)
        self._check_finite(round, participants, cohort.losses, (*own, *up))
        records.append(
            {
                "round": round,
                "client": participants.numpy(),
                "point": "post",
                "model": "personalised",
                "split": "train",
                "accuracy": float("nan"),
                "loss": float("nan") if cohort.losses is None else cohort.losses.double().cpu().numpy(),
                "samples": cohort.sizes.cpu().numpy(),
                "participant": True,
            }
        )
        return own, up

    def _keep(self, block: int, rows: Tensor, own: AnyRows) -> None:
        """Put what some clients of a block keep in its place.

        Where it stands, once no one else can hold the block's rows: few of many clients then cost no copy.
        """
        kept = put(self.state[block], rows, own, in_place=block in self._ours)
        self.state[block] = kept
        if kept is own:
            self._ours.discard(block)
        else:
            self._ours.add(block)

    @contextmanager
    def _phase(self, phase: str, ids: Tensor, round: int) -> Iterator[None]:
        """Name what was done, for whom and when, if code of the method or the model raises."""
        where = f"method {self.world.config.method.name}, phase {phase}"
        self._note(phase, ids)
        try:
            yield
        except ClientError as error:
            raise ClientError(f"{where}, {error}", without(error.clients, phase)) from None
        except RaypflError:
            raise
        except Exception:
            raise ClientError(
                f"{where}, client(s) {ids.tolist()}, round {round}:\n{traceback.format_exc()}",
                without(ids.tolist(), phase),
            ) from None
        finally:
            self.at_work = None

    def _note(self, phase: str, ids: Tensor) -> None:
        self.at_work = AtWork(tuple(ids.tolist()), time.monotonic(), phase)

    def _check_finite(
        self, round: int, participants: Tensor, losses: Tensor | None, fields: Sequence[Tensor]
    ) -> None:
        finite = torch.ones(len(participants), dtype=torch.bool, device=self.device)
        # What a client keeps and what it sends are often one tensor.
        distinct = {(rows.data_ptr(), rows.shape, rows.stride()): rows for rows in fields}
        for rows in (*distinct.values(), *(() if losses is None else (losses,))):
            if rows.is_floating_point() and rows.numel():
                finite &= all_finite(rows)
        if not finite.all():
            bad = (~finite).cpu()
            shown = "" if losses is None else f" (training loss {losses.cpu()[bad].tolist()})"
            raise DivergedError(
                f"round {round}: the model of client(s) {participants[bad].tolist()} is no longer "
                f"finite{shown}. "
                "Lower training.optimizer.lr or the method's step sizes."
            )

    @phase("evaluation")
    def _evaluate(
        self,
        work: Work,
        point: Point,
        block: int,
        rows: Tensor,
        state: AnyRows,
        down: AnyRows,
        up: AnyRows | None,
    ) -> list[dict[str, Any]]:
        """Records of the block's evaluated clients; those that are absent have the shared fields only."""
        ids = self.blocks[block]
        round = work.round - 1 if point == "pre" else work.round
        wanted = torch.isin(ids, self.world.evaluated(round))
        if work.shown is not None:
            wanted &= torch.isin(ids, work.shown)
        config = self.world.config.evaluation
        if not wanted.any() or point not in config.points:
            return []
        taking_part = torch.zeros(len(ids), dtype=torch.bool)
        taking_part[rows.cpu()] = True
        cohort = self._cohort(ids[wanted], round)
        chosen = wanted.nonzero()[:, 0].to(self.device)
        away = (~taking_part).nonzero()[:, 0].to(self.device)
        models = tried(self.method, self.net, config.models, point, away, rows, state, down, up)
        return [
            {
                "round": round,
                "client": ids[wanted].numpy(),
                "point": point,
                "model": model,
                "split": split,
                "accuracy": accuracy,
                "loss": loss,
                "samples": samples,
                "participant": taking_part[wanted].numpy(),
            }
            for model, own in models.items()
            for tested in [
                self.method.adapted(cohort, picked(own, chosen))
                if model == "personalised"
                else picked(own, chosen)
            ]
            for split in self.splits
            for accuracy, loss, samples in [score(self.method, cohort, model, tested, split)]
        ]

    def _cohort(self, ids: Tensor, round: int) -> Cohort:
        config = self.world.config
        return Cohort(
            self.net,
            self.world.client_data(self.samples, ids),
            ids,
            round=round,
            seed=config.seed,
            training=config.training,
            width=self.world.width,
            on_chunk=self._on_chunk,
        )

    def _on_chunk(self, ids: Tensor) -> None:
        if self.at_work is not None:
            self._note(self.at_work.phase, ids)


def without(clients: Sequence[int], phase: str) -> tuple[int, ...]:
    """Those of some clients that failed without whom a round may succeed.

    Whoever fails in an evaluation is evaluated also when it does not take part.
    """
    return tuple(clients) if phase == LOCAL_UPDATE else ()


def _upload(participants: Tensor, up: AnyRows, sends: Tensor) -> Upload:
    """What those send who do; nothing is copied where all do."""
    if sends.all():
        return Upload(participants, up)
    rows = sends.nonzero()[:, 0]
    return Upload(participants[rows], type(up)(*(field[rows.to(field.device)] for field in up)))


def all_finite(rows: Tensor) -> Tensor:
    """Which of some rows `[K, ...]` have nothing but finite numbers, bool `[K]`."""
    # Of the extremes: NaN is one, too, and a pass over memory takes a tenth of what `isfinite` does.
    flat = rows.reshape(len(rows), -1)
    return flat.amax(1).isfinite() & flat.amin(1).isfinite()


def stored_type(state_type: Any) -> Any:
    """A client's rows in a checkpoint: the method's state, and momentum (no columns unless it is kept)."""
    return namedtuple("Stored", (*state_type._fields, "momentum"))
