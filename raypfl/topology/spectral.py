"""How fast mixing brings models together: norms and eigenvalues of `A - J`, with `J` the mean of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from raypfl.rng import key, numpy_generator
from raypfl.topology.connectivity import pieces
from raypfl.topology.mixing import Mixing, support

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

_DENSE = 500
"""Up to this many peers a dense decomposition is a matter of a second."""
_ITERATIONS = 3_000


class Gap(NamedTuple):
    """What is left of disagreement after a round is `1 - value`."""

    value: float
    """NaN where an iteration over a large sparse matrix did not converge."""
    doubly_stochastic: bool
    """True: `1 - ||A - J||_2`, a bound for every round. False: one minus the modulus of the second
    eigenvalue, the rate in the long run if A stays the same."""


def spectral_gap(mixing: Mixing) -> Gap:
    """The spectral gap, or what comes nearest to it where the weights are not doubly stochastic."""
    if mixing.is_doubly_stochastic():
        return Gap(1 - contraction([mixing]), True)
    # J A = J fails here, but A - J still has the eigenvalues of A with the 1 of equal models replaced by 0.
    return Gap(1 - _second_modulus(mixing), False)


def contraction(mixings: Sequence[Mixing]) -> float:
    """`||A_r ... A_1 - J||_2` of doubly stochastic matrices in the order of their rounds; NaN as in `Gap`."""
    num_peers = mixings[0].num_peers
    if len(mixings) == 1 and (row := _circulant_row(mixings[0])) is not None:
        # Circulant matrices are normal, and the transform of a row is their spectrum.
        return float(np.abs(np.fft.fft(row)[1:]).max(initial=0.0))
    if num_peers <= _DENSE:
        product = torch.eye(num_peers, dtype=torch.float64)
        for mixing in mixings:
            product = mixing.dense() @ product
        return float(torch.linalg.matrix_norm(product - 1 / num_peers, 2))
    if len(mixings) == 1 and pieces(support(mixings[0])).any():
        return 1.0
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, svds

    matrix, start = _centred(mixings), _start(num_peers)
    try:
        (largest,) = svds(matrix, k=1, v0=start, maxiter=_ITERATIONS, tol=1e-9, return_singular_vectors=False)
        return float(largest)
    except ArpackNoConvergence:
        return math.nan
    except ArpackError:
        # It breaks down where there are a few distinct singular values only, which are easy to iterate to.
        return _largest_singular_value(matrix, start)


def _second_modulus(mixing: Mixing) -> float:
    if mixing.num_peers <= _DENSE:
        eigenvalues = torch.linalg.eigvals(mixing.dense() - 1 / mixing.num_peers)
        return float(eigenvalues.abs().max())
    from scipy.sparse.linalg import ArpackError, eigs

    # Random directed graphs have many eigenvalues of nearly this modulus; asked for one alone, the
    # iteration settles on any of them.
    options = {"k": 4, "ncv": 40, "maxiter": _ITERATIONS, "tol": 1e-6, "return_eigenvectors": False}
    try:
        largest = eigs(_centred([mixing]), v0=_start(mixing.num_peers), **options)
    except ArpackError:
        return math.nan
    return float(np.abs(largest).max())


def _start(num_peers: int) -> np.ndarray:
    vector: np.ndarray = numpy_generator(key(0, "spectral gap")).standard_normal(num_peers)
    return vector


def _largest_singular_value(matrix: LinearOperator, x: np.ndarray) -> float:
    """By power iteration; NaN if it is slow."""
    value, length = math.inf, np.linalg.norm(x)
    for _ in range(_ITERATIONS):
        x = matrix.rmatvec(matrix.matvec(x / length))
        length = np.linalg.norm(x)
        before, value = value, float(np.sqrt(length))
        if abs(value - before) <= 1e-12 or length == 0:
            return value
    return math.nan


def _centred(mixings: Sequence[Mixing]) -> LinearOperator:
    """`A_r ... A_1 - J` by its products with vectors, so that nothing dense is formed."""
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import LinearOperator

    shape = (mixings[0].num_peers,) * 2
    matrices = [
        csr_array((a.values.numpy(), a.columns.numpy(), a.offsets.numpy()), shape=shape) for a in mixings
    ]
    transposed = [matrix.T.tocsr() for matrix in reversed(matrices)]

    def apply(factors: list[csr_array], x: np.ndarray) -> np.ndarray:
        mean = x.mean()
        for factor in factors:
            x = factor @ x
        centred: np.ndarray = x - mean
        return centred

    return LinearOperator(
        shape,
        matvec=lambda x: apply(matrices, x.reshape(-1)),
        rmatvec=lambda x: apply(transposed, x.reshape(-1)),
        dtype=np.float64,
    )


def _circulant_row(mixing: Mixing) -> np.ndarray | None:
    """The first row [N], if every row is the one before it moved by one place."""
    n, entries = mixing.num_peers, mixing.offsets.diff()
    if not bool((entries == entries[0]).all()):
        return None
    shifts = ((mixing.columns - mixing.rows) % n).reshape(n, -1)
    order = shifts.argsort(1)
    shifts, values = shifts.gather(1, order), mixing.values.reshape(n, -1).gather(1, order)
    if not (bool((shifts == shifts[:1]).all()) and bool((values == values[:1]).all())):
        return None
    row = torch.zeros(n, dtype=torch.float64)
    row[shifts[0]] = values[0]
    array: np.ndarray = row.numpy()
    return array
