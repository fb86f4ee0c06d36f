"""A graph of the user's own, from a text file.

    # receiver  sender  [weight]
    0 1 0.25
    1 2 0.25
    0 0 0.75

One edge a line: `i j w` means that peer i receives from peer j and gives its model the weight w; without
`directed`, also the other way. Peers are numbered from 0. Either all lines have a weight or none has. What
a peer's weights leave of one is the weight of its own model, unless a line `i i w` states that.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import field_validator
from torch import Tensor

from raypfl.errors import ConfigError
from raypfl.topology.base import Topology
from raypfl.topology.connectivity import pieces
from raypfl.topology.graph import Graph, graph_of
from raypfl.topology.mixing import Kind, Mixing, assemble, restrict, weights

_ROUNDING = 1e-6
"""How far a row of written decimals may be from one; the own model's weight takes the difference."""


class EdgeList(NamedTuple):
    """What a file says."""

    graph: Graph
    mixing: Mixing | None
    """Where it has weights."""


class _Lines(NamedTuple):
    """A file's lines by what they are about."""

    edges: dict[tuple[int, int], int]
    """Line number of each edge, as written."""
    weights: dict[tuple[int, int], float]
    """Of edges, both ways where undirected; and of own models. Empty without weights."""


class EdgeListFile(Topology):
    """The edges of a file, with its weights or others."""

    name: Literal["file"] = "file"
    file: Path
    directed: bool = False
    """Whether a line stands for one direction only."""
    weights: Kind | Literal["given"] | None = None
    """Left out: the file's where it has some, else metropolis, or uniform if directed."""

    @field_validator("file")
    @classmethod
    def _absolute(cls, file: Path) -> Path:
        """A saved configuration means the same file in whatever folder it is read."""
        return file.expanduser().absolute()

    def read(self, num_peers: int) -> EdgeList:
        """What the file says; read again only after it was changed."""
        try:
            stamp = self.file.stat().st_mtime_ns
            return _read(self.file, self.directed, num_peers, stamp)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ConfigError(f"topology.file = {self.file}: cannot be read: {reason}.") from error

    def check(self, num_peers: int) -> None:
        """See `Topology.check`."""
        if self.weights == "given" and self.read(num_peers).mixing is None:
            raise ConfigError(
                f"topology.weights = given: {self.file} has no weights. Write a third number in each line, "
                "or use another topology.weights."
            )

    def draw(self, num_peers: int, round: int, seed: int) -> Graph:
        """See `Topology.draw`."""
        return self.read(num_peers).graph

    def mixing(self, graph: Graph, sizes: Tensor | None) -> Mixing:
        """See `Topology.mixing`; the file's own weights go to the own model where a peer is away."""
        given = self.read(graph.num_peers).mixing
        if self.weights == "given" or (self.weights is None and given is not None):
            assert given is not None
            return restrict(given, graph, self.lazy)
        return weights(
            graph, self.weights or ("uniform" if self.directed else "metropolis"), sizes, self.lazy
        )


@lru_cache(maxsize=4)
def _read(path: Path, directed: bool, num_peers: int, stamp: int) -> EdgeList:
    lines = _parse(path, directed, num_peers)
    pairs = torch.tensor(list(lines.edges), dtype=torch.int64).reshape(-1, 2)
    graph = graph_of(num_peers, pairs[:, 0], pairs[:, 1], both_ways=not directed)
    part = pieces(graph)
    if part.max(initial=0) > 0:
        raise ConfigError(
            f"{path}: the graph falls apart into {part.max() + 1} pieces: peer {part.argmax()} is not joined "
            "to peer 0. Add edges between them."
        )
    return EdgeList(graph, _matrix(path, graph, lines.weights) if lines.weights else None)


def _parse(path: Path, directed: bool, num_peers: int) -> _Lines:
    edges: dict[tuple[int, int], int] = {}
    weight: dict[tuple[int, int], float] = {}
    columns = 0
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        i, j, w = _numbers(where, line, words)
        for peer in (i, j):
            if not 0 <= peer < num_peers:
                raise ConfigError(
                    f"{where}: there is no peer {peer}; the {num_peers} peers are numbered from 0 to "
                    f"{num_peers - 1}."
                )
        if columns and columns != len(words):
            raise ConfigError(f"{where}: {line.strip()!r}: either all lines have a weight or none has.")
        columns = len(words)
        if i == j and w is None:
            raise ConfigError(f"{where}: peer {i} is joined to itself. Leave the line out.")
        first = edges.get((i, j), None if directed else edges.get((j, i)))
        if first is not None:
            raise ConfigError(f"{where}: the edge {i} {j} is already in line {first}. Leave one out.")
        edges[i, j] = number
        if w is not None:
            weight[i, j] = w
            if not directed:
                weight[j, i] = w
    return _Lines(edges, weight)


def _numbers(where: str, line: str, words: list[str]) -> tuple[int, int, float | None]:
    try:
        if not 2 <= len(words) <= 3:
            raise ValueError
        i, j = int(words[0]), int(words[1])
        w = float(words[2]) if len(words) == 3 else None
    except ValueError:
        raise ConfigError(
            f"{where}: {line.strip()!r}: must be two peers and perhaps a weight, such as '0 1' or '0 1 0.25'."
        ) from None
    # A weight that is not a number fails both comparisons.
    if w is not None and not (0 < w <= 1 or (i == j and w == 0)):
        raise ConfigError(f"{where}: the weight {words[2]} must be above 0 and at most 1.")
    return i, j, w


def _matrix(path: Path, graph: Graph, weight: dict[tuple[int, int], float]) -> Mixing:
    pairs = zip(graph.receivers.tolist(), graph.sources.tolist(), strict=True)
    edges = torch.tensor([weight[pair] for pair in pairs], dtype=torch.float64)
    heard = torch.zeros(graph.num_peers, dtype=torch.float64).index_add_(0, graph.receivers, edges)
    for i, others in enumerate(heard.tolist()):
        own = weight.get((i, i))
        total = others + (own or 0.0)
        if own is not None and abs(total - 1) > _ROUNDING:
            raise ConfigError(
                f"{path}: the weights of row {i} sum to {total:.9g}, not to 1. Change the line '{i} {i} "
                f"{own:g}' or leave it out, which gives peer {i}'s own model the rest."
            )
        if total > 1 + _ROUNDING:
            raise ConfigError(
                f"{path}: the weights of row {i} sum to {total:.9g}, more than 1, before its own model has "
                "any. Lower them."
            )
    # Where rounding took a row above one, all are scaled alike: a symmetric matrix stays symmetric.
    excess = heard.max().clamp(min=1)
    return assemble(graph, edges / excess, (1 - heard / excess).clamp(min=0))
