"""How the server's cost grows: exponents of sizes, by least squares on logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

SIZES = {"clients": "N", "participants": "S", "parameters": "P"}
"""Columns that a cost may grow with, and what they are called in formulas."""

LEAST_FOR_HALF = 6
"""A fit to the larger half is shown from so many points on."""


class Fit(NamedTuple):
    """`cost = c * size_1^e_1 * size_2^e_2 ...`."""

    exponents: dict[str, float]
    """By column of the size."""
    errors: dict[str, float]
    """Standard errors of the exponents."""
    factor: float
    """c."""
    r_squared: float
    """Of the logarithms."""
    points: int


def varying(rows: pd.DataFrame, sizes: Sequence[str] = tuple(SIZES)) -> list[str]:
    """The sizes that vary among these rows, without those that vary in proportion to one before them."""
    found: list[str] = []
    logs: list[np.ndarray] = [np.zeros(len(rows))]
    for size in sizes:
        own = np.log(rows[size].to_numpy(float))
        own -= own.mean()
        stack = np.stack([*logs, own])
        if np.linalg.matrix_rank(stack, tol=1e-6) == len(found) + 1:
            found.append(size)
            logs.append(own)
    return found


def fit(rows: pd.DataFrame, cost: str, sizes: Sequence[str]) -> Fit | None:
    """Fit one cost; None if there are no more points than unknowns, or a cost is not positive.

    Args:
        rows: one a point.
        cost: a column.
        sizes: columns that vary independently (`varying`).
    """
    y = rows[cost].to_numpy(float)
    if len(y) <= len(sizes) + 1 or not (y > 0).all():
        return None
    logs = np.column_stack([np.ones(len(y)), *(np.log(rows[size].to_numpy(float)) for size in sizes)])
    found, *_ = np.linalg.lstsq(logs, np.log(y), rcond=None)
    residual = np.log(y) - logs @ found
    spread = ((np.log(y) - np.log(y).mean()) ** 2).sum()
    variance = residual @ residual / (len(y) - logs.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(logs.T @ logs)))
    return Fit(
        dict(zip(sizes, found[1:].tolist(), strict=True)),
        dict(zip(sizes, errors[1:].tolist(), strict=True)),
        float(np.exp(found[0])),
        float(1.0 - residual @ residual / spread) if spread > 0 else float("nan"),
        len(y),
    )


def larger_half(rows: pd.DataFrame, size: str) -> pd.DataFrame:
    """The points with the larger sizes, the middle one with them; where growth has settled."""
    half: pd.DataFrame = rows.sort_values(size, kind="stable").tail((len(rows) + 1) // 2)
    return half
