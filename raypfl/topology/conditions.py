"""What the theory of a method asks of a mixing matrix, and who breaks it."""

from __future__ import annotations

import torch

from raypfl.errors import ConfigError
from raypfl.topology.connectivity import is_bipartite, pieces
from raypfl.topology.mixing import Mixing, support

_TOLERANCE = 1e-9


def require_row_stochastic(mixing: Mixing) -> None:
    """Whatever is mixed, equal models must stay as they are.

    Raises:
        ConfigError: a weight is negative or not a number, or a row does not sum to one.
    """
    bad = (~(mixing.values >= 0)).nonzero()
    if len(bad):
        entry = int(bad[0])
        raise ConfigError(
            f"the mixing matrix has {float(mixing.values[entry]):.9g} in row {int(mixing.rows[entry])}, "
            f"column {int(mixing.columns[entry])}. Weights must not be negative."
        )
    off = (mixing.row_sums() - 1).abs()
    if len(off) and float(off.max()) > _TOLERANCE:
        row = int(off.argmax())
        raise ConfigError(
            f"row {row} of the mixing matrix sums to {float(mixing.row_sums()[row]):.9g}. "
            "Every row must sum to 1."
        )


def require_symmetric_doubly_stochastic(mixing: Mixing, *, static: bool = True) -> None:
    """DFedAvgM's assumptions: A = A^T, A 1 = 1, null(I - A) = span(1), all eigenvalues above -1.

    The last two are decided by the graph: exactly if it is connected, and not two-sided with nothing kept
    of any own model. They are asked of a matrix that stays the same; one that changes must only
    connect everyone over time.

    Raises:
        ConfigError: one does not hold; says where.
    """
    require_row_stochastic(mixing)
    n, rows, columns = mixing.num_peers, mixing.rows, mixing.columns
    code, mirrored = rows * n + columns, columns * n + rows
    place = torch.searchsorted(code, mirrored).clamp(max=max(len(code) - 1, 0))
    opposite = torch.where(code[place] == mirrored, mixing.values[place], 0.0)
    gap = (mixing.values - opposite).abs()
    if len(gap) and float(gap.max()) > _TOLERANCE:
        worst = int(gap.argmax())
        i, j = int(rows[worst]), int(columns[worst])
        raise ConfigError(
            f"the mixing matrix is not symmetric: peer {i} gives peer {j}'s model the weight "
            f"{float(mixing.values[worst]):.6g}, peer {j} gives peer {i}'s {float(opposite[worst]):.6g}. "
            "Use an undirected topology with topology.weights=metropolis."
        )
    if static:
        _require_contracting(mixing)


def _require_contracting(mixing: Mixing) -> None:
    graph = support(mixing)
    part = pieces(graph)
    if part.max(initial=0) > 0:
        raise ConfigError(
            f"the mixing matrix never brings all peers together: peer {part.argmax()} is not joined to "
            "peer 0. Use a connected topology."
        )
    own = mixing.values[mixing.rows == mixing.columns]
    if mixing.num_peers > 1 and not bool(own.any()) and is_bipartite(graph):
        raise ConfigError(
            "the mixing matrix has the eigenvalue -1: the graph has two sides that only swap their models, "
            "since no peer keeps any of its own. Set topology.lazy above 0."
        )
