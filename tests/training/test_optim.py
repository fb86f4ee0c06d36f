"""Row optimizers against `torch.optim`, model by model."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from raypfl.training import SGD, Adam, AdamW, Moments

LR = 0.1
CASES = {
    "sgd": (SGD(lr=LR), lambda p: torch.optim.SGD(p, LR)),
    "decay": (SGD(lr=LR, weight_decay=0.1), lambda p: torch.optim.SGD(p, LR, weight_decay=0.1)),
    "momentum": (
        SGD(lr=LR, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        SGD(lr=LR, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, nesterov=True),
    ),
    "adam": (
        Adam(lr=LR, beta1=0.8, beta2=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, LR, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    "adamw": (AdamW(lr=LR, weight_decay=0.1), lambda p: torch.optim.AdamW(p, LR, weight_decay=0.1)),
}
each_optimizer = pytest.mark.parametrize("ours, theirs", CASES.values(), ids=CASES)


def gradients(steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[steps, 3 models, 37 weights]`; 37 is no multiple of a vector register."""
    return torch.randn(steps, 3, 37, dtype=dtype, generator=torch.Generator().manual_seed(0))


def reference(theirs, start: Tensor, steps: Tensor) -> Tensor:
    w = torch.nn.Parameter(start.clone())
    optimizer = theirs([w])
    for g in steps:
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


@each_optimizer
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_steps_equal_torch(ours, theirs, dtype, tolerance):
    start, *steps = gradients(6, dtype)
    w, moments = start.clone(), ours.moments(start)
    for g in steps:
        ours.step(w, g.clone(), moments, LR)
    for row in range(3):
        expected = reference(theirs, start[row], torch.stack(steps)[:, row])
        torch.testing.assert_close(w[row], expected, rtol=tolerance, atol=tolerance)
    assert moments.steps.tolist() == [5.0, 5.0, 5.0]


@each_optimizer
def test_column_slice_moves_alone(ours, theirs):
    # torch's fused kernels write beside a strided slice, without a word, and leave parts of it unmoved.
    start, *steps = gradients(4)
    wide = start.clone()
    columns = slice(5, 30)
    moments = ours.moments(wide[:, columns])
    for g in steps:
        ours.step(wide[:, columns], g[:, columns].clone(), moments, LR)
    beside = torch.ones(37, dtype=torch.bool)
    beside[columns] = False
    assert torch.equal(wide[:, beside], start[:, beside])
    for row in range(3):
        expected = reference(theirs, start[row, columns], torch.stack(steps)[:, row, columns])
        torch.testing.assert_close(wide[row, columns], expected, rtol=1e-12, atol=1e-12)


@each_optimizer
def test_row_that_pauses_continues_where_it_stopped(ours, theirs):
    start, *steps = gradients(5)
    w, moments = start.clone(), ours.moments(start)
    at_work = [3, 2, 2, 3]  # the last model pauses for two steps
    for g, active in zip(steps, at_work, strict=True):
        before = w[active:].clone(), *(field[active:].clone() for field in moments)
        ours.step(w[:active], g[:active].clone(), Moments(*(field[:active] for field in moments)), LR)
        after = w[active:], *(field[active:] for field in moments)
        assert all(map(torch.equal, before, after))
    expected = reference(theirs, start[2], torch.stack([steps[0][2], steps[3][2]]))
    torch.testing.assert_close(w[2], expected, rtol=1e-12, atol=1e-12)
    assert moments.steps.tolist() == [4.0, 4.0, 2.0]


@each_optimizer
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(ours, theirs):
    start, *steps = gradients(4, torch.float32)
    w, moments = start.clone(), ours.moments(start)
    alone, own = start[1:2].clone(), ours.moments(start[1:2])
    for g in steps:
        ours.step(w, g.clone(), moments, LR)
        ours.step(alone, g[1:2].clone(), own, LR)
    assert torch.equal(w[1:2], alone)


def test_moments_have_columns_only_where_they_are_used():
    w = torch.zeros(3, 37)
    widths = {
        name: tuple(field.shape[-1] for field in case[0].moments(w)[:2]) for name, case in CASES.items()
    }
    assert widths == {
        "sgd": (0, 0),
        "decay": (0, 0),
        "momentum": (37, 0),
        "nesterov": (37, 0),
        "adam": (37, 37),
        "adamw": (37, 37),
    }


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ValidationError, match="nesterov needs a momentum above 0"):
        SGD(nesterov=True)
