"""Which samples a client sees at which step: index plans, built once a round, gathered once a step.

Every client follows its own sequence of batches. Clients are ordered by the length of that sequence, so
those that still have work at a step are a prefix, and nothing is computed for the others.
"""

# K clients, T steps, B samples a batch.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.rng import numpy_generator
from raypfl.training.augmentation import Changes

Cut = TypeVar("Cut", int, Tensor)


class Samples(NamedTuple):
    """A data set on the device where clients train: inputs `[n, ...]` and labels int64 `[n]`."""

    x: Tensor
    y: Tensor


class Batch(NamedTuple):
    """One step's samples of the clients that take part in it."""

    rows: slice | Tensor
    """Which rows of the caller's tensors these clients are: a prefix, or an index tensor."""
    x: Tensor
    """Inputs `[k, B, ...]`."""
    y: Tensor
    """Labels `[k, B]`."""
    mask: Tensor | None
    """1 for a sample, 0 for padding, `[k, B]`; None where every client has B samples."""
    sizes: Tensor
    """Samples of each client in this batch, `[k]`, in the inputs' dtype."""

    def mean(self, per_sample: Tensor) -> Tensor:
        """Mean over each client's own samples of a `[k, B]` quantity: `[k]`."""
        return per_sample.mean(1) if self.mask is None else self.sum(per_sample) / self.sizes

    def sum(self, per_sample: Tensor) -> Tensor:
        """Sum over each client's own samples of a `[k, B]` quantity: `[k]`."""
        if self.mask is None:
            return per_sample.sum(1)
        # Not a product with the mask: padding may have an infinite loss (a class that a client lacks).
        return per_sample.masked_fill(self.mask == 0, 0.0).sum(1)

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Every client's samples cut into disjoint batches, as even as they come; later ones are larger.

        A client with fewer samples than parts has samples in several of them; none is ever empty.
        """
        if self.mask is None:
            length = self.y.shape[1]
            cuts = [_part(length, number, parts) for number in range(parts)]
            return tuple(
                Batch(
                    self.rows, self.x[:, lo:hi], self.y[:, lo:hi], None, torch.full_like(self.sizes, hi - lo)
                )
                for lo, hi in cuts
            )
        index_1B = torch.arange(-(-self.y.shape[1] // parts), device=self.y.device)[None]
        row_k1 = torch.arange(len(self.y), device=self.y.device)[:, None]
        found = []
        for number in range(parts):
            lo_k, hi_k = _part(self.sizes.long(), number, parts)
            size_k = hi_k - lo_k
            mask_kB = (index_1B < size_k[:, None]).to(self.sizes.dtype)
            at_kB = (lo_k[:, None] + index_1B).clamp_max(self.y.shape[1] - 1)
            x, y = self.x[row_k1, at_kB], self.y[row_k1, at_kB]
            found.append(Batch(self.rows, x, y, mask_kB, size_k.to(self.sizes.dtype)))
        return tuple(found)

    def narrow(self, tensor: Tensor) -> Tensor:
        """The rows of `tensor` `[K, ...]` that belong to this batch; a single row is shared by all."""
        return tensor if len(tensor) == 1 else tensor[self.rows]


class Schedule(NamedTuple):
    """Steps of K clients, longest sequence first."""

    rows: np.ndarray
    """Pool rows `[K, T, B]`; zeros behind a sequence's end and behind a short batch."""
    sizes: np.ndarray
    """Samples of each batch, `[K, T]`; 0 behind a sequence's end."""


@phase("batches")
def gather(pool: Samples, indices: Sequence[np.ndarray]) -> tuple[Samples, list[np.ndarray]]:
    """The samples of some clients side by side, and each client's indices into them.

    Steps that draw from a few clients' samples hit the cache; steps that draw from the pool never do (ten
    times slower for batches of 100 images).
    """
    flat = torch.from_numpy(np.concatenate(indices)).to(pool.x.device)
    ends = np.cumsum([len(own) for own in indices])
    ranges = [np.arange(end - len(own), end) for own, end in zip(indices, ends, strict=True)]
    return Samples(pool.x.index_select(0, flat), pool.y.index_select(0, flat)), ranges


@phase("batches")
def shuffled(
    indices: Sequence[np.ndarray],
    draws: Sequence[int],
    epochs: int,
    batch_size: int,
    *,
    steps: int | None = None,
    drop_short: bool = False,
) -> list[Schedule]:
    """Every client's own schedule: `epochs` reshuffled passes, the last short batch of a pass kept.

    Args:
        indices: pool rows of each client's samples.
        draws: one key a client; the schedule of a client depends on its key and samples alone.
        epochs: passes.
        batch_size: samples a step.
        steps: so many batches for everybody, out of as many reshuffled passes as they take, in place of
            `epochs`.
        drop_short: leave out a last short batch, unless it is the only one of its pass.
    """
    plans = []
    for own, draw in zip(indices, draws, strict=True):
        count = len(own)
        whole = batch_size if drop_short and count > batch_size else 1
        used = count // whole * whole
        passes = epochs if steps is None else -(-steps // max(1, -(-used // batch_size)))
        order = numpy_generator(draw).permuted(np.broadcast_to(own, (passes, count)), axis=1)
        plan = _cut(order[:, :used], batch_size)
        plans.append(plan if steps is None else Schedule(plan.rows[:, :steps], plan.sizes[:, :steps]))
    return plans


@phase("batches")
def continued(
    indices: Sequence[np.ndarray],
    draws: Callable[[int, int], int],
    first: Sequence[int],
    steps: int,
    batch_size: int,
) -> list[Schedule]:
    """Every client's next batches of one endless stream of reshuffled passes; short last batches kept.

    Args:
        indices: pool rows of each client's samples.
        draws: `draws(place, epoch)` is the key of a pass (from 0) of the client in that place.
        first: batches that each client has met before.
        steps: batches for everybody.
        batch_size: samples a step.
    """
    plans = []
    for place, (own, begin) in enumerate(zip(indices, first, strict=True)):
        pass_steps = max(1, -(-len(own) // batch_size))
        epochs = range(begin // pass_steps, -(-(begin + steps) // pass_steps))
        orders = [numpy_generator(draws(place, epoch)).permutation(own) for epoch in epochs]
        plan, skipped = _cut(np.stack(orders), batch_size), begin - epochs.start * pass_steps
        wanted = slice(skipped, skipped + steps)
        plans.append(Schedule(plan.rows[:, wanted], plan.sizes[:, wanted]))
    return plans


def hold_out(own: np.ndarray, fraction: float, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """One client's samples that remain and those that are held out, both in stored order.

    Args:
        own: pool rows of its samples; a single one is in both.
        fraction: of them are held out, rounded down, but at least one and not all.
        draw: the key that says which.
    """
    if len(own) == 1:
        return own, own
    # 0.29 * 100 is 28.999999999999996 in binary, and means 29.
    count = min(max(int(fraction * len(own) + 1e-9), 1), len(own) - 1)
    held = np.zeros(len(own), dtype=bool)
    held[numpy_generator(draw).permutation(len(own))[:count]] = True
    return own[~held], own[held]


def in_order(indices: Sequence[np.ndarray], batch_size: int) -> list[Schedule]:
    """One pass over every client's samples in stored order."""
    return [_cut(own[None], batch_size) for own in indices]


def _cut(passes: np.ndarray, batch_size: int) -> Schedule:
    epochs, num_samples = passes.shape
    if num_samples == 0:
        return Schedule(np.zeros((1, 0, 1), np.int64), np.zeros((1, 0), np.int64))
    size = min(batch_size, num_samples)
    steps = -(-num_samples // size)
    index = np.zeros((epochs, steps * size), np.int64)
    index[:, :num_samples] = passes
    sizes = np.full((epochs, steps), size, np.int64)
    sizes[:, -1] = num_samples - (steps - 1) * size
    return Schedule(index.reshape(1, epochs * steps, size), sizes.reshape(1, -1))


@phase("batches")
def together(schedules: Sequence[Schedule]) -> Schedule:
    """Stack schedules, padded to the longest and widest."""
    steps = max(plan.rows.shape[1] for plan in schedules)
    size = max(plan.rows.shape[2] for plan in schedules)
    index = np.zeros((len(schedules), steps, size), np.int64)
    sizes = np.zeros((len(schedules), steps), np.int64)
    for row, plan in enumerate(schedules):
        index[row, : plan.rows.shape[1], : plan.rows.shape[2]] = plan.rows[0]
        sizes[row, : plan.sizes.shape[1]] = plan.sizes[0]
    return Schedule(index, sizes)


def steps_of(
    schedule: Schedule, data: Samples, *, pad: bool, changes: Changes | None = None
) -> Iterator[Batch]:
    """The batches, step by step; several a step only where lengths differ and `pad` is False.

    Args:
        schedule: longest sequence first.
        data: what the schedule's rows refer to.
        pad: fill short batches up and mask them. Networks with batch statistics must not be padded: their
            clients are grouped by batch length instead.
        changes: what happens to each sample.
    """
    for step, batch in _steps(schedule, data, pad):
        yield batch if changes is None else batch._replace(x=changes.apply(batch.x, batch.rows, step))


def _steps(schedule: Schedule, data: Samples, pad: bool) -> Iterator[tuple[int, Batch]]:
    plan = _Plan.of(schedule, data)
    longest, shortest = schedule.sizes.max(0), plan.shortest
    for step, active in enumerate(plan.active):
        if pad or longest[step] == shortest[step]:
            yield step, plan.gather(data, step, slice(0, active), int(longest[step]))
        else:
            sizes = schedule.sizes[:active, step]
            for length in np.unique(sizes)[::-1]:
                rows = torch.from_numpy(np.flatnonzero(sizes == length)).to(data.x.device)
                yield step, plan.gather(data, step, rows, int(length))


class _Plan(NamedTuple):
    """Everything of a schedule that a step reads, where the samples are."""

    places: Tensor
    """Rows of the samples `[T, K, B]`."""
    y: Tensor
    """Their labels `[T, K, B]`."""
    sizes: Tensor
    """Samples of each batch `[T, K]`, in the inputs' dtype."""
    active: list[int]
    """Clients of each step."""
    shortest: np.ndarray
    """Samples of the shortest batch of each step."""

    @classmethod
    @phase("batches")
    def of(cls, schedule: Schedule, data: Samples) -> _Plan:
        """Made once for all steps."""
        places = torch.from_numpy(schedule.rows.swapaxes(0, 1).copy()).to(data.x.device)
        sizes = torch.from_numpy(schedule.sizes.T.copy()).to(device=data.x.device, dtype=data.x.dtype)
        shortest = np.where(schedule.sizes > 0, schedule.sizes, schedule.rows.shape[2]).min(0)
        active = np.count_nonzero(schedule.sizes, axis=0).tolist()
        return cls(places, data.y[places], sizes, active, shortest)

    @phase("batches")
    def gather(self, data: Samples, step: int, rows: slice | Tensor, length: int) -> Batch:
        """The batch of some clients, so many samples wide."""
        places, y, sizes = (part[step, rows] for part in (self.places, self.y, self.sizes))
        places, y = places[:, :length], y[:, :length]
        x = data.x.index_select(0, places.reshape(-1)).view(*places.shape, *data.x.shape[1:])
        mask = None
        # Where lengths differ and rows are a group of one length, that is the length.
        if isinstance(rows, slice) and self.shortest[step] < length:
            mask = (torch.arange(length, device=x.device) < sizes[:, None]).to(x.dtype)
        return Batch(rows, x, y.contiguous(), mask, sizes)


def padding(data: Samples, num_clients: int) -> Batch:
    """A batch of clients none of whom has a sample."""
    nothing = torch.zeros(num_clients, dtype=torch.int64, device=data.x.device)
    none = data.x.new_zeros(num_clients)
    return Batch(
        slice(0, num_clients), data.x[nothing][:, None], data.y[nothing][:, None], none[:, None], none
    )


def _part(count: Cut, number: int, parts: int) -> tuple[Cut, Cut]:
    """Where one of so many parts of `count` samples begins and ends; at least one sample."""
    lo, hi = count * number // parts, count * (number + 1) // parts
    return lo, hi + (hi == lo)
