"""The clients that train together: everything about local data, batches, optimizers and the round's keys."""

# K clients, k clients of one batch, P trained columns, C classes.

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.errors import ClientError, RaypflError, ShapeError
from raypfl.rng import key, torch_seeded
from raypfl.training.augmentation import draw_changes
from raypfl.training.batches import (
    Batch,
    Samples,
    continued,
    gather,
    hold_out,
    in_order,
    padding,
    shuffled,
    steps_of,
    together,
)
from raypfl.training.config import Optimizer, TrainingConfig
from raypfl.training.loop import Hook, Loop, Measure, Objective
from raypfl.training.network import Network, Rows
from raypfl.training.optim import SGD, Moments

Split = Literal["train", "validation", "test"]

PASS_BATCH = 1000
"""Samples a client and batch in passes without gradients; large, since nothing is kept for a backward."""


class Fit(NamedTuple):
    """What local training leaves."""

    w: Tensor
    """Rows `[K, width]`."""
    moments: Moments
    """The optimizer's memory, rows in the same order."""
    measured: Tensor
    """What `measure` found, summed over the steps of each client, float64 `[K]`; zeros without it."""


class ClientData(NamedTuple):
    """A cohort's share of the data set: index lists into one pool, in the order of the cohort's ids."""

    pool: Samples
    num_classes: int
    train: Sequence[np.ndarray]
    validation: Sequence[np.ndarray]
    test: Sequence[np.ndarray]

    def take(self, rows: Sequence[int]) -> ClientData:
        """The share of some of these clients."""
        splits = ([split[row] for row in rows] for split in (self.train, self.validation, self.test))
        return ClientData(self.pool, self.num_classes, *splits)


class Cohort:
    """K clients that hold rows of one network and train on their own data.

    Args:
        net: the network of the clients' rows.
        data: index lists in the order of `ids`.
        ids: client ids, `[K]`.
        round: the round these clients train in; the keys of shuffles and noise depend on it.
        training: epochs, batch size and optimizer, unless a method asks for others.
        width: rows a forward pass; the cohort is worked off in chunks of that many.
        on_chunk: told the clients of each chunk before they are worked on.

    Attributes:
        losses: mean training loss of each client over the samples of its last `fit`, `[K]`; None before.
    """

    def __init__(
        self,
        net: Network,
        data: ClientData,
        ids: Tensor,
        *,
        round: int,
        seed: int,
        training: TrainingConfig,
        width: int = 1,
        on_chunk: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.net, self.data, self.ids = net, data, ids
        self.on_chunk = on_chunk
        self.round, self.seed, self.training, self.width = round, seed, training, width
        self.losses: Tensor | None = None
        # A list, since a cohort and those that are made from it go on from one velocity.
        self._velocity: list[Tensor | None] = [None]

    @property
    def velocity(self) -> Tensor | None:
        """Each client's momentum from round to round `[K, weights]`, which every `fit` goes on from.

        None where momentum is fresh every round.
        """
        return self._velocity[0]

    @velocity.setter
    def velocity(self, velocity: Tensor | None) -> None:
        self._velocity[0] = velocity

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> Tensor:
        """Training samples of each client, int64 `[K]`."""
        return torch.tensor([len(own) for own in self.data.train], device=self.net.device)

    @property
    def features_differ(self) -> bool:
        """A sample's features differ from step to step: batch normalisation, dropout, changed images."""
        return self.net.coupled or self.net.random or self.training.augment is not None

    @property
    def label_counts(self) -> Tensor:
        """Training samples of each client and class, int64 `[K, C]`."""
        labels, classes = self.data.pool.y, self.data.num_classes
        own_labels = (labels[torch.tensor(own)] for own in self.data.train)
        return torch.stack([torch.bincount(own, minlength=classes) for own in own_labels])

    def fit(
        self,
        w: Tensor,
        objective: Objective,
        *rows: Tensor,
        epochs: int | None = None,
        optimizer: Optimizer | None = None,
        columns: slice | None = None,
        pull: tuple[float, Tensor] | None = None,
        moments: Moments | None = None,
        on_gradient: Hook | None = None,
        after_step: Hook | None = None,
        measure: Measure | None = None,
        purpose: str = "batches",
    ) -> Fit:
        """Train every client from its row of `w` by mini-batch steps on `objective`.

        Args:
            w: rows `[K, width]`, not modified.
            objective: `objective(m, batch, *rows) -> [k]`, the loss of each client in the batch. The gradient
                of a client's loss moves that client alone.
            rows: extra tensors `[K, ...]` (or `[1, ...]`, shared), narrowed to the batch for objective
                and hooks.
            epochs: local passes; the configuration's `epochs` or `steps` if absent.
            optimizer: the configuration's if absent; both follow the configured decay over rounds.
            columns: `net.weights` (default), `net.head` or `net.extractor`: what is trained. The other
                parameters enter as data.
            pull: `(rho, anchor)` adds `rho / 2 ||w - anchor||^2` over the trained columns by its gradient
                `rho (w - anchor)`; the anchor is `[K, trained columns]`, or `[1, ...]` shared.
            moments: the optimizer's memory; if absent it is fresh, or the clients' kept velocity.
            on_gradient: `on_gradient(g, batch, *rows)` before a step; may change the gradients `[k, P]`.
            after_step: `after_step(w, batch, *rows)` after a step; may change the trained columns `[k, P]`.
            measure: `measure(g, batch) -> [k]`, a number of each client's gradient at every step, as it is
                before `on_gradient`; the sums are in the result.
            purpose: name of the keys of shuffles and random layers.
        """
        net = self.net
        chosen = self.training.optimizer if optimizer is None else optimizer
        loop = Loop(
            objective=objective,
            optimizer=chosen,
            lr=chosen.lr * self.training.decay(self.round),
            epochs=epochs,
            columns=net.weights if columns is None else columns,
            rho=0.0 if pull is None else pull[0],
            on_gradient=on_gradient,
            after_step=after_step,
            measure=measure,
            purpose=purpose,
        )
        kept = self.velocity if moments is None and isinstance(chosen, SGD) and chosen.momentum else None
        if kept is not None:
            moments = chosen.moments(w[:, loop.columns])._replace(first=kept[:, loop.columns])
        nothing = w.new_zeros(1, 0)
        anchor = nothing if pull is None else pull[1]
        # Each chunk makes its own where they are fresh.
        before = [nothing] * len(Moments._fields) if moments is None else moments
        loop = loop._replace(fresh=moments is None)
        w, *memory, losses, measured = self.run(loop.train, w, *before, anchor, *rows, purpose=purpose)
        self.losses = losses
        if kept is not None:
            self.velocity = kept.clone()
            self.velocity[:, loop.columns] = memory[0]
        return Fit(w, Moments(*memory), measured)

    def run(
        self,
        work: Callable[..., tuple[Tensor, ...]],
        *rows: Tensor,
        purpose: str = "work",
        kinds: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Work the cohort off in chunks of `width` clients, longest sequence of batches first.

        Args:
            work: `work(chunk, *rows) -> tensors [k, ...]`; the chunk is a cohort of its own whose `batches`
                may be drawn. Methods with their own inner loops enter here.
            rows: tensors `[K, ...]`, handed over narrowed to the chunk; a single row is shared.
            purpose: name of the keys of random layers; another one for each pass of a round.
            kinds: a number a client, `[K]`; clients of different kinds are never in one chunk.

        Returns:
            The tensors of all chunks, rows in the order of this cohort.

        Raises:
            ClientError: `work` raised; names the clients and the round and carries the traceback.
        """
        steps = [len(own) for own in self.data.train]
        kind = [0] * len(self) if kinds is None else kinds.tolist()
        order = sorted(range(len(self)), key=lambda row: (kind[row], -steps[row]))
        chunks = list(self._cut(order, kind))
        # Rows that one chunk takes as they stand are not copied; nor is what it makes of them.
        whole = len(chunks) == 1 and order == list(range(len(self)))
        joined: list[Tensor] | None = None
        for chosen in chunks:
            chunk = self._chunk(chosen)
            # Copies, not slices: a row that does not start aligned has other last bits.
            at = torch.tensor(chosen, device=self.net.device)
            if self.on_chunk is not None:
                self.on_chunk(chunk.ids)
            try:
                with chunk._noise(purpose):
                    own = (tensor if whole or len(tensor) == 1 else tensor[at] for tensor in rows)
                    found = work(chunk, *own)
            except RaypflError:
                raise
            except Exception:
                raise ClientError(
                    f"client(s) {chunk.ids.tolist()}, round {self.round}:\n{traceback.format_exc()}",
                    chunk.ids.tolist(),
                ) from None
            if whole:
                given = {tensor.untyped_storage().data_ptr() for tensor in rows}
                return tuple(
                    piece.clone() if piece.untyped_storage().data_ptr() in given else piece for piece in found
                )
            if joined is None:
                joined = [piece.new_empty(len(self), *piece.shape[1:]) for piece in found]
            for pieces, piece in zip(joined, found, strict=True):
                pieces[at] = piece
        return tuple(joined or ())

    def batches(
        self,
        epochs: int | None = None,
        purpose: str = "batches",
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        drop_short: bool = False,
        first: Tensor | None = None,
    ) -> Iterator[Batch]:
        """This round's batches, reshuffled every epoch; only inside `run`, where sequences are sorted.

        `batch.rows` says which rows of the chunk take part; a step may come as several batches where batch
        statistics forbid padding.

        Args:
            epochs: passes; the configuration's `epochs` or `steps` if absent.
            purpose: name of the shuffles' keys.
            steps: so many batches for every client, in place of `epochs`.
            batch_size: samples a step; the configuration's if absent.
            drop_short: leave out a last short batch, unless it is the only one of its pass.
            first: batches that each client has met before, int64 `[K]`: the next `steps` of one stream of
                passes that goes on from round to round, in place of this round's own shuffles.
        """
        ids = self.ids.tolist()
        if epochs is None and steps is None:
            steps = self.training.steps
        count = self.training.epochs if epochs is None else epochs
        own, indices = gather(self.data.pool, self.data.train)
        size = self.training.batch_size if batch_size is None else batch_size
        if first is None:
            schedules = shuffled(indices, self.keys(purpose), count, size, steps=steps, drop_short=drop_short)
        else:
            assert steps is not None and not drop_short
            schedules = continued(
                indices,
                lambda place, epoch: key(self.seed, f"stream of {purpose}", epoch, ids[place]),
                first.tolist(),
                steps,
                size,
            )
        coupled = any(net.coupled for net in (self.net, *self.net.personal))
        changes = None
        if self.training.augment is not None:
            shapes = [plan.rows.shape[1:] for plan in schedules]
            draws = self.keys(f"changes of {purpose}")
            changes = draw_changes(self.training.augment, shapes, draws)
        return steps_of(together(schedules), own, pad=not coupled, changes=changes)

    def keys(self, purpose: str) -> list[int]:
        """The key of each client's draws for a purpose in this round."""
        return [key(self.seed, purpose, self.round, client) for client in self.ids.tolist()]

    def pass_over(
        self,
        w: Tensor,
        measure: Callable[[Any, Batch], Tensor],
        *,
        split: Split = "train",
        bind: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Tensor:
        """Sum `measure(m, batch) -> [k, ...]` over one pass in evaluation mode: `[K, ...]`, no gradients.

        Sums are kept in float64. A client without samples in the split contributes zero. `m` is the `Rows`
        of `w`, or whatever `bind(ids, rows)` makes of rows that are not models of this network.
        """
        made = bind or (lambda ids, rows: self.net.bind(rows))

        def work(chunk: Cohort, w: Tensor) -> tuple[Tensor]:
            indices: Sequence[np.ndarray] = getattr(chunk.data, split)
            order = sorted(range(len(chunk)), key=lambda row: -len(indices[row]))
            plan = together(in_order([indices[row] for row in order], PASS_BATCH))
            total: Tensor | None = None
            at = torch.tensor(order, device=self.net.device)
            everyone = order == list(range(len(chunk)))
            for batch in steps_of(plan, chunk.data.pool, pad=True):
                rows = at[batch.rows]
                own = w[batch.rows] if everyone else w[rows]
                value = measure(made(chunk.ids[rows.cpu()], own), batch).double()
                if total is None:
                    total = value.new_zeros(len(chunk), *value.shape[1:])
                total[rows] += value
            if total is None:
                # Nobody has samples: a batch of padding tells what shape the zeros have.
                value = measure(made(chunk.ids, w), padding(chunk.data.pool, len(chunk)))
                total = torch.zeros_like(value, dtype=torch.float64)
            return (total,)

        with torch.no_grad():
            return self.run(work, w)[0]

    def on_features(self, w: Tensor) -> Cohort:
        """These clients with the features of their training samples in place of the samples.

        Every client's features are those of its own row of `w` `[K, width]`, in evaluation mode. What trains
        heads alone may be given this cohort, with `m.classify(batch.x)`, and runs the extractor once a sample
        instead of once an epoch; its batches are the same.

        Raises:
            ShapeError: features differ from step to step (`features_differ`).
        """
        if self.features_differ:
            raise ShapeError("features that differ from step to step cannot be kept")
        pool, sizes = self.data.pool, [len(own) for own in self.data.train]
        flat = torch.from_numpy(np.concatenate(self.data.train)).to(pool.x.device)
        with torch.no_grad():
            parts = [
                self.net.bind(w[row : row + 1]).features(pool.x[part][None])[0]
                for row, own in enumerate(flat.split(sizes))
                for part in own.split(PASS_BATCH)
            ]
        ranges = np.split(np.arange(len(flat)), np.cumsum(sizes)[:-1])
        nothing = [own[:0] for own in ranges]
        features = Samples(torch.cat(parts), pool.y[flat])
        data = ClientData(features, self.data.num_classes, ranges, nothing, nothing)
        cohort = self._with(data, self.ids, self.width)
        cohort._velocity = self._velocity
        return cohort

    def held_out(self, fraction: float, purpose: str) -> Cohort:
        """These clients with a part of their training samples as validation samples, in place of those given.

        A client's split is the same in every round: floor(fraction * n) of its training samples, at least
        one and not all, drawn by the seed and `purpose`. A client with a single sample trains and validates
        on it.

        Args:
            fraction: above 0 and below 1.
            purpose: name of the split's keys.
        """
        draws = (key(self.seed, purpose, 0, client) for client in self.ids.tolist())
        splits = [hold_out(own, fraction, draw) for own, draw in zip(self.data.train, draws, strict=True)]
        train, validation = map(list, zip(*splits, strict=True))
        data = self.data._replace(train=train, validation=validation)
        cohort = self._with(data, self.ids, self.width)
        cohort._velocity = self._velocity
        return cohort

    def each(self, w: Tensor, fn: Callable[[Rows], Tensor]) -> Tensor:
        """`fn(m) -> [k, ...]` on all models in evaluation mode, without gradients: `[K, ...]`."""
        with torch.no_grad():
            return self.run(lambda chunk, w: (fn(self.net.bind(w)),), w)[0]

    def _cut(self, order: list[int], kind: list[int]) -> Iterator[list[int]]:
        for _, group in itertools.groupby(order, key=kind.__getitem__):
            alike = list(group)
            yield from (alike[start : start + self.width] for start in range(0, len(alike), self.width))

    def _chunk(self, rows: list[int]) -> Cohort:
        return self._with(self.data.take(rows), self.ids[rows], len(rows))

    def _with(self, data: ClientData, ids: Tensor, width: int) -> Cohort:
        return Cohort(
            self.net,
            data,
            ids,
            round=self.round,
            seed=self.seed,
            training=self.training,
            width=width,
            on_chunk=self.on_chunk,
        )

    def _noise(self, purpose: str) -> AbstractContextManager[None]:
        """Dropout can only draw from torch's generators: seeded by the round and the chunk's first client."""
        draw = key(self.seed, f"noise of {purpose}", self.round, int(self.ids[0]))
        return torch_seeded(draw, self.net.device)
