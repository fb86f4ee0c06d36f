"""What is said about a topology before a run."""

from pathlib import Path

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.topology.describe import describe
from raypfl.topology.drawn import KOut, Matching, Regular
from raypfl.topology.edge_list import EdgeListFile
from raypfl.topology.shapes import OnePeerExponential, Ring, Star


def test_a_static_graph() -> None:
    assert describe(Ring(), 30, None, seed=0) == [
        "in-degree: 2",
        "graph: undirected, the same every round, connected",
        "weights: uniform; doubly stochastic",
        "spectral gap: 0.0146 (1 - ||A - J||_2)",
    ]


def test_pulls() -> None:
    lines = describe(KOut(), 30, torch.arange(1, 31), seed=0)
    assert lines[0] == "in-degree: 5"
    assert lines[1].startswith("graph: directed, differs from round to round; ")
    assert lines[1].endswith(" of 5 rounds connected, all of them together connected")
    assert lines[2].startswith("weights: samplesize; not doubly stochastic (columns sum to ")
    assert "(median of 5 rounds; 1 - modulus of the second eigenvalue" in lines[3]
    assert lines[4] == "squared disagreement left by a round, expected with uniform weights: 0.134"


def test_assumed_sizes_are_said() -> None:
    assert "samplesize (sizes taken as equal here);" in describe(KOut(), 30, None, seed=0)[2]


def test_turns_are_looked_at_whole() -> None:
    lines = describe(OnePeerExponential(), 16, None, seed=0)
    assert lines[3].startswith("spectral gap: 0 (median of 8 rounds")
    assert lines[4] == "disagreement left by 8 rounds: at most 0 of what there was"


def test_uneven_degrees() -> None:
    assert describe(Star(), 5, None, seed=0)[0] == "in-degree: 1 to 4, mean 1.6"


def test_rounds_that_are_connected_only_together() -> None:
    line = describe(Matching(), 8, None, seed=0)[1]
    assert "; 0 of 5 rounds connected, all of them together connected" in line


def test_availability() -> None:
    lines = describe(Ring(p_active=0.8), 30, None, seed=0)
    assert lines[-1].startswith("peers there in a round: 2")
    assert lines[-1].endswith("(probability 0.8 each)")
    assert "not doubly stochastic" in lines[2]


def test_a_file_whose_first_peer_hears_nobody(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("1 0\n2 1\n")
    lines = describe(EdgeListFile(file=tmp_path / "edges.txt", directed=True), 3, None, seed=0)
    assert lines[1] == "graph: directed, the same every round, connected, but not in both directions"


def test_an_impossible_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be even"):
        describe(Regular(), 31, None, seed=0)
