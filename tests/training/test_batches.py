"""Schedules: every sample once an epoch, every client by its own key, longest sequence first."""

import numpy as np
import pytest
import torch

from raypfl.training import Samples
from raypfl.training.batches import Batch, gather, in_order, shuffled, steps_of, together

INDICES = [np.array([10, 11, 12, 13, 14, 15, 16]), np.array([20, 21, 22, 23]), np.array([30])]
"""Seven, four and one sample: with batches of 3, all leave a last batch of one."""
POOL = Samples(torch.arange(40.0).view(40, 1), torch.arange(40))


def batches(*, pad: bool, epochs: int = 2, batch_size: int = 3) -> list[Batch]:
    plan = together(shuffled(INDICES, [1, 2, 3], epochs, batch_size))
    return list(steps_of(plan, POOL, pad=pad))


def seen(steps: list[Batch]) -> list[list[int]]:
    """The labels (which are pool rows) of each client, in the order it meets them."""
    found: list[list[int]] = [[] for _ in INDICES]
    for batch in steps:
        rows = torch.arange(len(INDICES))[batch.rows]
        for row, y, size in zip(rows.tolist(), batch.y.tolist(), batch.sizes.int().tolist(), strict=True):
            found[row] += y[:size]
    return found


@pytest.mark.parametrize("pad", [True, False])
def test_every_sample_once_an_epoch(pad):
    for own, order in zip(INDICES, seen(batches(pad=pad)), strict=True):
        first, second = order[: len(own)], order[len(own) :]
        assert sorted(first) == sorted(second) == own.tolist()


def test_epochs_are_reshuffled():
    order = seen(batches(pad=True))[0]
    assert order[:7] != order[7:]


def test_padding_and_grouping_visit_the_same_samples_in_the_same_order():
    assert seen(batches(pad=True)) == seen(batches(pad=False))


def test_inputs_and_labels_stay_together():
    for batch in batches(pad=False):
        assert torch.equal(batch.x[..., 0], batch.y.to(batch.x.dtype))


def test_last_short_batch_is_kept():
    (plan,) = shuffled(INDICES[:1], [1], 2, 3)
    assert plan.sizes.tolist() == [[3, 3, 1, 3, 3, 1]]


def test_client_with_fewer_samples_than_a_batch_has_one_batch_of_all():
    (plan,) = shuffled(INDICES[1:2], [2], 1, 100)
    assert plan.sizes.tolist() == [[4]]
    assert plan.rows.shape == (1, 1, 4)


def test_clients_at_work_are_a_prefix():
    # Two epochs of 3, 2 and 1 batches: six steps for the first, four for the second, two for the third.
    assert [len(batch.x) for batch in batches(pad=True)] == [3, 3, 2, 2, 1, 1]
    assert all(batch.rows == slice(0, len(batch.x)) for batch in batches(pad=True))


def test_padding_is_masked():
    first = batches(pad=True)[0]
    assert first.sizes.tolist() == [3, 3, 1]
    assert first.mask.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    per_sample = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0], [5.0, 100.0, 100.0]])
    assert first.mean(per_sample).tolist() == [3.0, 1.0, 5.0]
    assert first.sum(per_sample).tolist() == [9.0, 3.0, 5.0]


def test_groups_have_one_batch_length_and_no_mask():
    steps = batches(pad=False)
    assert all(batch.mask is None and (batch.sizes == batch.x.shape[1]).all() for batch in steps)
    # First step: two clients with a full batch, then the one with a single sample, as a batch of its own.
    assert [batch.x.shape[:2] for batch in steps[:2]] == [(2, 3), (1, 1)]
    assert [torch.arange(3)[batch.rows].tolist() for batch in steps[:2]] == [[0, 1], [2]]


def test_narrow_takes_own_rows_and_shares_a_single_one():
    batch = batches(pad=False)[1]
    assert batch.narrow(torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [[3.0]]
    assert batch.narrow(torch.tensor([[7.0]])).tolist() == [[7.0]]


def test_schedule_depends_on_own_key_and_samples_alone():
    together_with = shuffled(INDICES, [1, 2, 3], 2, 3)
    alone = shuffled(INDICES[1:2], [2], 2, 3)[0]
    assert (together_with[1].rows == alone.rows).all()
    assert (shuffled(INDICES[1:2], [4], 2, 3)[0].rows != alone.rows).any()


def test_in_order_keeps_the_stored_order():
    plan = together(in_order(INDICES, 3))
    assert seen(list(steps_of(plan, POOL, pad=True))) == [own.tolist() for own in INDICES]


def test_client_without_samples_has_no_step():
    plan = together(in_order([INDICES[1], np.array([], np.int64)], 3))
    assert plan.sizes.tolist() == [[3, 1], [0, 0]]
    assert [len(batch.x) for batch in steps_of(plan, POOL, pad=True)] == [1, 1]


def test_gather_puts_clients_side_by_side():
    own, indices = gather(POOL, INDICES[1:])
    assert own.y.tolist() == [20, 21, 22, 23, 30]
    assert [part.tolist() for part in indices] == [[0, 1, 2, 3], [4]]
