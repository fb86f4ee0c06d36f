"""Schedules: every sample once an epoch, every client by its own key, longest sequence first."""

import numpy as np
import pytest
import torch

from raypfl.training import Samples
from raypfl.training.batches import Batch, continued, gather, in_order, shuffled, steps_of, together

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


def stream(first: list[int], steps: int) -> list[list[tuple[int, ...]]]:
    """The batches that each client meets from a place in its stream on, as sets of samples in order."""
    plans = continued(INDICES, lambda place, epoch: 100 * place + epoch, first, steps, 3)
    return [
        [tuple(row[:size].tolist()) for row, size in zip(plan.rows[0], plan.sizes[0], strict=True)]
        for plan in plans
    ]


def test_a_stream_goes_on_where_it_ended():
    """Two rounds of two batches are one of four, for clients at different places; so are four of one."""
    whole = stream([0, 1, 5], 4)
    parts = [stream([0, 1, 5], 2), stream([2, 3, 7], 2)]
    assert [one + two for one, two in zip(*parts, strict=True)] == whole
    single = [stream([step, 1 + step, 5 + step], 1) for step in range(4)]
    assert [sum(ones, []) for ones in zip(*single, strict=True)] == whole


def test_a_stream_is_reshuffled_passes():
    """Each client's first passes, of three, two and one batches, hold every sample once, in new orders."""
    for own, met, length in zip(INDICES, stream([0, 0, 0], 6), (3, 2, 1), strict=True):
        passes = [sum(met[start : start + length], ()) for start in range(0, 6, length)]
        assert all(sorted(order) == own.tolist() for order in passes)
        assert len(own) == 1 or len(set(passes)) == len(passes)


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


def test_padding_with_an_infinite_loss_stays_out_of_sums_and_gradients():
    """A class that a client lacks may have minus infinity as its logit; padding may have that class."""
    mask, sizes = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([2.0, 1.0])
    batch = Batch(slice(0, 2), torch.zeros(2, 2, 1), torch.zeros(2, 2, dtype=torch.int64), mask, sizes)
    scale = torch.ones(2, 2, requires_grad=True)
    per_sample = scale * torch.tensor([[1.0, 5.0], [4.0, torch.inf]])
    assert batch.sum(per_sample).tolist() == [6.0, 4.0]
    assert batch.mean(per_sample).tolist() == [3.0, 4.0]
    logits = torch.tensor([0.5, -torch.inf], requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        logits.expand(2, 2, -1).flatten(0, 1), torch.tensor([0, 0, 0, 1]), reduction="none"
    )
    (g,) = torch.autograd.grad(batch.mean(loss.view(2, 2)).sum(), logits)
    assert g.isfinite().all()


def test_as_many_steps_for_everybody_as_are_asked_for():
    """Out of reshuffled passes: the client of one sample sees it at each of five steps."""
    plans = shuffled(INDICES, [1, 2, 3], 1, 3, steps=5)
    assert [plan.sizes.tolist() for plan in plans] == [[[3, 3, 1, 3, 3]], [[3, 1, 3, 1, 3]], [[1] * 5]]
    found = seen(list(steps_of(together(plans), POOL, pad=True)))
    assert sorted(found[0][:7]) == INDICES[0].tolist() and len(set(found[0][7:])) == 6
    assert sorted(found[1][:4]) == sorted(found[1][4:8]) == INDICES[1].tolist()


def test_steps_within_a_pass_are_its_first():
    (whole,), (some,) = shuffled(INDICES[:1], [1], 1, 3), shuffled(INDICES[:1], [1], 9, 3, steps=2)
    assert some.rows.tolist() == whole.rows[:, :2].tolist() and some.sizes.tolist() == [[3, 3]]


def test_short_batches_are_left_out_unless_there_is_no_other():
    plans = shuffled(INDICES, [1, 2, 3], 2, 3, drop_short=True)
    assert [plan.sizes.tolist() for plan in plans] == [[[3, 3, 3, 3]], [[3, 3]], [[1, 1]]]
    assert len(set(plans[0].rows[0, :2].flatten().tolist())) == 6


@pytest.mark.parametrize("steps", [None, 4])
def test_client_without_samples_has_no_step_however_many_are_asked_for(steps):
    (plan,) = shuffled([np.array([], dtype=np.int64)], [1], 2, 3, steps=steps, drop_short=True)
    assert plan.sizes.shape == (1, 0)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_of_a_batch_are_disjoint_and_all_of_it(parts, pad):
    """A client with fewer samples than parts meets some twice, none of the parts is empty."""
    for batch in batches(pad=pad, batch_size=5):
        pieces = batch.split(parts)
        for row, size in enumerate(batch.sizes.int().tolist()):
            own = [piece.y[row, : int(piece.sizes[row])].tolist() for piece in pieces]
            assert all(own) and set(sum(own, [])) == set(batch.y[row, :size].tolist())
            assert max(map(len, own)) - min(map(len, own)) <= 1
            if size >= parts:
                assert sum(own, []) == batch.y[row, :size].tolist()
        for piece in pieces:
            assert torch.equal(piece.x[..., 0], piece.y.to(piece.x.dtype))
            assert piece.rows is batch.rows
            ones = torch.ones(piece.y.shape)
            assert torch.equal(piece.sum(ones), piece.sizes)
