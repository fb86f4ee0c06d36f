"""What models of a block's clients are worth on data: which rows are tried, and how they answer."""

# n clients of a block, K evaluated clients, k clients of a batch.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.engine.messages import take
from raypfl.methods.contract import Answer, Method, Model, Point
from raypfl.training import Batch, Cohort, Network, cross_entropy_per_sample
from raypfl.training.cohort import Split

AnyMethod = Method[Any, Any, Any, Any, Any]
AnyRows = Any
"""A NamedTuple of tensors whose type the method declares."""


def tried(
    method: AnyMethod,
    net: Network,
    wanted: Sequence[Model],
    point: Point,
    away: Tensor,
    rows: Tensor,
    state: AnyRows,
    down: AnyRows,
    up: AnyRows | None,
) -> dict[Model, Tensor]:
    """The models of all clients of a block, `[n, ...]` in their order, by kind; those that the method has.

    Args:
        method: the method.
        net: its network.
        wanted: kinds of models. The global one is as received, so it has no `post`.
        point: when.
        away: places in the block of clients that do not take part.
        rows: places of the participants, `[k]`.
        state: the block's.
        down: what the participants received; clients that do not take part have its shared fields only.
        up: what the participants sent, if they have trained.
    """
    models: dict[Model, Tensor] = {}
    nobody = take(down, rows[:0], method.shared)
    for model in wanted:
        found: Tensor | None
        if model == "global":
            found = method.global_model(net, state, nobody) if point == "pre" else None
        elif model == "personalised":
            found = _together(method.personalised, method.absent, net, away, rows, state, down, nobody, up)
        else:
            found = _together(
                method.alternative, method.alternative, net, away, rows, state, down, nobody, up
            )
        if found is not None:
            models[model] = found
    return models


def _together(
    present: Callable[..., Tensor | None],
    absent: Callable[..., Tensor | None],
    net: Network,
    away: Tensor,
    rows: Tensor,
    state: AnyRows,
    down: AnyRows,
    nobody: AnyRows,
    up: AnyRows | None,
) -> Tensor | None:
    """Models of participants and of all others, each in its client's place."""
    parts = []
    if len(rows):
        parts.append((rows, present(net, take(state, rows), down, up)))
    if len(away):
        parts.append((away, absent(net, take(state, away), nobody)))
    first = parts[0][1]
    if first is None:
        return None
    if len(parts) == 1 and _is_all(parts[0][0], len(first)):
        return first
    out = first.new_empty(len(rows) + len(away), *first.shape[1:])
    for at, part in parts:
        assert part is not None
        out[at] = part
    return out


def picked(own: Tensor, chosen: Tensor) -> Tensor:
    """These rows of the models of a block; the models themselves where these are all of them in order."""
    return own if _is_all(chosen, len(own)) else own[chosen]


def _is_all(rows: Tensor, count: int) -> bool:
    return torch.equal(rows, torch.arange(count, device=rows.device))


def score(
    method: AnyMethod, cohort: Cohort, model: Model, rows: Tensor, split: Split
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accuracy in [0, 1], mean loss and samples of each model `[K, ...]` on its client's own data."""

    def bind(ids: Tensor, rows: Tensor) -> Answer:
        return method.answer(cohort.net, model, ids, rows)

    totals = cohort.pass_over(rows, _outcome, split=split, bind=bind).cpu().numpy()
    samples = totals[:, 2]
    with np.errstate(invalid="ignore"):
        return totals[:, 0] / samples, totals[:, 1] / samples, samples.astype(np.int64)


def _outcome(answer: Answer, batch: Batch) -> Tensor:
    """Correct predictions, summed loss and samples: `[k, 3]`."""
    logits = answer(batch.x)
    correct = (logits.argmax(2) == batch.y).to(logits.dtype)
    loss = cross_entropy_per_sample(logits, batch.y)
    return torch.stack([batch.sum(correct), batch.sum(loss), batch.sizes], 1)
