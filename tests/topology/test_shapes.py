"""Neighbours and spectral gaps of the topologies that nothing is drawn for, against closed forms."""

import math

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.topology import Topology, check, contraction, mixing, sample, spectral_gap
from raypfl.topology.shapes import Exponential, Full, OnePeerExponential, Ring, Star, Torus


def neighbours(config: Topology, num_peers: int, peer: int, round: int = 1) -> list[int]:
    return sample(config, num_peers, round, seed=0).sources_of(peer).tolist()


def matrix(config: Topology, num_peers: int, round: int = 1) -> torch.Tensor:
    return mixing(config, sample(config, num_peers, round, seed=0)).dense()


def test_neighbours() -> None:
    assert neighbours(Ring(), 30, 0) == [1, 29]
    assert neighbours(Ring(steps=2), 30, 1) == [0, 2, 3, 29]
    # 5 x 6: above and below 6 away, left and right in the row.
    assert neighbours(Torus(rows=5, columns=6), 30, 0) == [1, 5, 6, 24]
    assert neighbours(Torus(), 30, 29) == [5, 23, 24, 28]
    assert neighbours(Exponential(), 30, 0) == [14, 22, 26, 28, 29]
    assert neighbours(Full(), 4, 1) == [0, 2, 3]
    assert neighbours(Star(), 4, 0) == [1, 2, 3] and neighbours(Star(), 4, 3) == [0]


def test_one_peer_exponential_takes_turns() -> None:
    heard = [neighbours(OnePeerExponential(), 30, 0, round) for round in range(10)]
    assert heard == [[29], [28], [26], [22], [14]] * 2


@pytest.mark.parametrize(
    ("config", "gap"),
    [
        (Ring(), 2 / 3 * (1 - math.cos(2 * math.pi / 30))),
        (Ring(), 0.0146),
        (Ring(steps=2), 0.0433),
        (Torus(rows=5, columns=6), 2 / 5 * (1 - math.cos(2 * math.pi / 6))),
        (Torus(), 0.2),
        (Exponential(), 2 / 6),
        (Full(), 1.0),
        (Star(), 1 / 30),
    ],
)
def test_gap_at_30_peers(config: Topology, gap: float) -> None:
    found = spectral_gap(mixing(config, sample(config, 30, 1, seed=0)))
    assert found.doubly_stochastic
    assert found.value == pytest.approx(gap, abs=1e-12 if round(gap, 4) != gap else 5e-5)


@pytest.mark.parametrize("num_peers", [6, 12, 20, 64, 100])
def test_gap_of_exponential_with_even_peers(num_peers: int) -> None:
    graph = sample(Exponential(), num_peers, 1, seed=0)
    gap = spectral_gap(mixing(Exponential(), graph)).value
    assert gap == pytest.approx(2 / (1 + math.ceil(math.log2(num_peers))), abs=1e-12)


def test_gap_of_single_rounds_of_one_peer_exponential() -> None:
    gaps = [
        spectral_gap(mixing(OnePeerExponential(), sample(OnePeerExponential(), 30, r, 0))) for r in range(5)
    ]
    assert gaps[0].value == pytest.approx(1 - math.cos(math.pi / 30), abs=1e-12)
    assert gaps[0].value == pytest.approx(0.0055, abs=5e-5)
    assert [gap.value for gap in gaps[1:]] == pytest.approx([0] * 4, abs=1e-12)


@pytest.mark.parametrize("first", [1, 2, 7])
def test_log2_rounds_of_one_peer_exponential_are_exactly_the_mean(first: int) -> None:
    product = torch.eye(16, dtype=torch.float64)
    for round in range(first, first + 4):
        product = matrix(OnePeerExponential(), 16, round) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / 16), rtol=0, atol=1e-12)
    matrices = [mixing(OnePeerExponential(), sample(OnePeerExponential(), 16, r, 0)) for r in range(1, 5)]
    assert contraction(matrices) == pytest.approx(0, abs=1e-12)
    assert contraction(matrices[:3]) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("config", [Ring(), Ring(steps=3), Exponential(), OnePeerExponential(), Full()])
@pytest.mark.parametrize("num_peers", [9, 16])
def test_circulant_eigenvalues_are_the_transform_of_a_row(config: Topology, num_peers: int) -> None:
    a = matrix(config, num_peers)
    x = torch.randn(num_peers, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    # The first column convolves; every other column is it, moved.
    expected = torch.fft.ifft(torch.fft.fft(a[:, 0]) * torch.fft.fft(x))
    torch.testing.assert_close(a.to(x.dtype) @ x, expected, rtol=0, atol=1e-12)
    gap = spectral_gap(mixing(config, sample(config, num_peers, 1, 0))).value
    assert gap == pytest.approx(1 - float(torch.linalg.matrix_norm(a - 1 / num_peers, 2)), abs=1e-12)


def test_torus_eigenvalues() -> None:
    rows, columns = 4, 7
    angles_r = 2 * math.pi * torch.arange(rows, dtype=torch.float64) / rows
    angles_c = 2 * math.pi * torch.arange(columns, dtype=torch.float64) / columns
    expected = 1 / 5 + 2 / 5 * (angles_r.cos()[:, None] + angles_c.cos())
    found = torch.linalg.eigvalsh(matrix(Torus(rows=rows), rows * columns))
    torch.testing.assert_close(found, expected.reshape(-1).sort().values, rtol=0, atol=1e-12)


def test_neighbours_are_sets() -> None:
    assert matrix(Ring(), 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    # Half way round is one neighbour where both directions meet.
    assert neighbours(Exponential(), 2, 0) == [1]
    assert neighbours(Exponential(), 4, 0) == [2, 3]


@pytest.mark.parametrize("config", [Ring(), Exponential(), OnePeerExponential(), Full(), Star()])
def test_one_peer_alone_keeps_its_model(config: Topology) -> None:
    check(config, 1, seed=0)
    assert matrix(config, 1).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("config", "num_peers", "message"),
    [
        (
            Ring(steps=2),
            4,
            r"topology.steps = 2: a ring with 4 neighbours needs more than 4 peers, there are 4",
        ),
        (Torus(rows=5), 31, r"topology.rows = 5: a torus needs rows x columns = 31 peers"),
        (Torus(rows=5, columns=5), 30, r"topology.rows = 5, topology.columns = 5: .* = 30 peers"),
        (Torus(columns=10), 20, r"topology.columns = 10: .* at least 3 of each"),
        (Torus(), 22, r"22 peers do not make a grid of at least 3 x 3"),
    ],
)
def test_impossible_shapes_are_refused(config: Topology, num_peers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config, num_peers, seed=0)
    with pytest.raises(ConfigError, match=message):
        sample(config, num_peers, 1, seed=0)


def test_smallest_possible_shapes() -> None:
    check(Ring(steps=2), 5, seed=0)
    check(Torus(), 9, seed=0)
