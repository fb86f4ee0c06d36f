"""Divergences between pairs of probability vectors, exactly zero for equal ones.

Both are sums of terms that vanish one by one where two vectors agree in every bit. Differences of entropies
or products of matrices do not: in float32 they err by 3e-7, also below zero.
"""

# N vectors, O outcomes, E pairs, B pairs of one block.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypfl.algebra.phases import phase
from raypfl.errors import ShapeError

PAIR_ENTRIES = 2**20
"""Entries of a block of pairs: 8 MiB of float64."""

SMALLEST = 1e-300
"""What a mean probability is raised to, so that 0 / 0 does not arise."""


@phase("distances")
def jensen_shannon(log_p_NO: Tensor, receivers_E: Tensor, sources_E: Tensor) -> Tensor:
    """`KL(p_i || m) / 2 + KL(p_j || m) / 2` with `m = (p_i + p_j) / 2`, natural logarithm: in `[0, ln 2]`.

    Args:
        log_p_NO: logarithms of the probabilities, float64 `[N, O]`, `log_softmax` of logits in float64.
        receivers_E: i of each pair, int64 `[E]`.
        sources_E: j of each pair, int64 `[E]`.

    Returns:
        float64 `[E]`; NaN where one of the two is not a number.

    Raises:
        ShapeError: the logarithms are not float64 `[N, O]`.
    """
    return _pairwise(_jensen_shannon, log_p_NO, receivers_E, sources_E)


@phase("distances")
def jeffreys(log_p_NO: Tensor, receivers_E: Tensor, sources_E: Tensor) -> Tensor:
    """`KL(p_i || p_j) / 2 + KL(p_j || p_i) / 2`, natural logarithm: in `[0, inf]`.

    Arguments, result and errors as `jensen_shannon`.
    """
    return _pairwise(_jeffreys, log_p_NO, receivers_E, sources_E)


def every_pair(num_vectors: int) -> tuple[Tensor, Tensor]:
    """All ordered pairs, row by row: a divergence of them is a matrix after `.view(N, N)`; for small N."""
    everyone = torch.arange(num_vectors)
    return everyone.repeat_interleave(num_vectors), everyone.repeat(num_vectors)


def _jensen_shannon(log_p_BO: Tensor, log_q_BO: Tensor) -> Tensor:
    p_BO, q_BO = log_p_BO.exp(), log_q_BO.exp()
    mean_BO = ((p_BO + q_BO) / 2).clamp_min(SMALLEST)
    return (p_BO.xlogy(p_BO / mean_BO) + q_BO.xlogy(q_BO / mean_BO)).sum(1)


def _jeffreys(log_p_BO: Tensor, log_q_BO: Tensor) -> Tensor:
    # Outcomes that neither has: -inf - -inf is not a number.
    gap_BO = (log_p_BO - log_q_BO).masked_fill_(log_p_BO == log_q_BO, 0.0)
    return ((log_p_BO.exp() - log_q_BO.exp()) * gap_BO).sum(1)


def _pairwise(
    doubled: Callable[[Tensor, Tensor], Tensor], log_p_NO: Tensor, receivers_E: Tensor, sources_E: Tensor
) -> Tensor:
    if log_p_NO.dtype != torch.float64 or log_p_NO.dim() != 2:
        found = f"{log_p_NO.dtype} {list(log_p_NO.shape)}"
        raise ShapeError(f"Log-probabilities {found}. Take log_softmax(logits.double()) of rows of logits.")
    width = max(PAIR_ENTRIES // max(log_p_NO.shape[1], 1), 1)
    out_E = log_p_NO.new_empty(len(receivers_E))
    for start in range(0, len(receivers_E), width):
        block = slice(start, start + width)
        out_E[block] = doubled(log_p_NO[receivers_E[block]], log_p_NO[sources_E[block]]) / 2
    return out_E.clamp_min_(0.0)
