"""Edge lists of the user's own, and what can be wrong with them."""

from pathlib import Path

import pytest
import torch

from raypfl.errors import ConfigError
from raypfl.topology import check, mixing, require_symmetric_doubly_stochastic, sample
from raypfl.topology.edge_list import EdgeListFile

# A path 0 - 1 - 2.
WEIGHTED = "# peers weight\n\n0 1 0.25\n  2 1\t0.5 # the other side\n"


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    return tmp_path / "edges.txt"


def test_lines_without_weights(edges: Path) -> None:
    edges.write_text("0 1\n1 2\n")
    config = EdgeListFile(file=edges)
    graph = sample(config, 3, 1, 0)
    assert graph.adjacency().int().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    third = 1 / 3
    wanted = torch.tensor([[1 - third, third, 0], [third, third, third], [0, third, 1 - third]])
    torch.testing.assert_close(mixing(config, graph).dense(), wanted.double(), rtol=0, atol=1e-7)


def test_directed_lines_say_who_receives_from_whom(edges: Path) -> None:
    edges.write_text("0 1\n1 2\n2 0\n")
    config = EdgeListFile(file=edges, directed=True)
    graph = sample(config, 3, 1, 0)
    assert [graph.sources_of(i).tolist() for i in range(3)] == [[1], [2], [0]]
    assert mixing(config, graph).dense()[0].tolist() == [0.5, 0.5, 0]


def test_own_models_take_what_is_left(edges: Path) -> None:
    edges.write_text(WEIGHTED)
    config = EdgeListFile(file=edges)
    a = mixing(config, sample(config, 3, 1, 0))
    assert a.dense().tolist() == [[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]]
    require_symmetric_doubly_stochastic(a)


def test_directed_weights_and_own_weights(edges: Path) -> None:
    edges.write_text("0 1 0.75\n1 0 1\n0 0 0.25\n1 1 0\n")
    config = EdgeListFile(file=edges, directed=True, lazy=0.5)
    assert mixing(config, sample(config, 2, 1, 0)).dense().tolist() == [[0.625, 0.375], [0.5, 0.5]]


def test_other_weights_may_go_with_the_edges(edges: Path) -> None:
    edges.write_text(WEIGHTED)
    config = EdgeListFile(file=edges, weights="samplesize")
    a = mixing(config, sample(config, 3, 1, 0), torch.tensor([1, 3, 6]))
    assert a.dense()[0].tolist() == [0.25, 0.75, 0]


def test_decimals_may_be_rounded(edges: Path) -> None:
    edges.write_text("".join(f"{i} {j} 0.3333334\n" for i in range(4) for j in range(i)))
    config = EdgeListFile(file=edges)
    a = mixing(config, sample(config, 4, 1, 0))
    assert float((a.row_sums() - 1).abs().max()) <= 1e-12
    require_symmetric_doubly_stochastic(a)


def test_the_weight_of_a_peer_that_is_away_goes_to_the_own_model(edges: Path) -> None:
    edges.write_text(WEIGHTED)
    config = EdgeListFile(file=edges)
    graph = sample(config, 3, 1, 0).induced(torch.tensor([True, True, False]))
    assert mixing(config, graph).dense().tolist() == [[0.75, 0.25, 0], [0.25, 0.75, 0], [0, 0, 1]]


def test_a_changed_file_is_read_again(edges: Path) -> None:
    import os

    edges.write_text("0 1\n1 2\n")
    config = EdgeListFile(file=edges)
    assert sample(config, 3, 1, 0).num_edges == 4
    edges.write_text("0 1\n1 2\n0 2\n")
    os.utime(edges, ns=(1, 1))
    assert sample(config, 3, 1, 0).num_edges == 6


@pytest.mark.parametrize(
    ("text", "directed", "message"),
    [
        ("0 1\n1 3\n", False, r"edges.txt, line 2: there is no peer 3; the 3 peers are numbered from 0 to 2"),
        ("0 -1\n", False, r"line 1: there is no peer -1"),
        ("0 1\n# note\n2 2\n", False, r"line 3: peer 2 is joined to itself"),
        ("0 1\n1 2\n0 1\n", True, r"line 3: the edge 0 1 is already in line 1"),
        ("0 1\n1 2\n1 0\n", False, r"line 3: the edge 1 0 is already in line 1"),
        ("0 1 0.5\n0 0 0.5\n0 0 0.5\n", True, r"line 3: the edge 0 0 is already in line 2"),
        ("0 1\n1 2 0.5\n", False, r"line 2: '1 2 0.5': either all lines have a weight or none has"),
        ("0 1\n1 2\n1 2 3 4\n", False, r"line 3: '1 2 3 4': must be two peers and perhaps a weight"),
        ("0,1\n", False, r"line 1: '0,1': must be two peers"),
        ("0\n", False, r"line 1: '0': must be two peers"),
        ("0 1 x\n", False, r"line 1: '0 1 x': must be two peers"),
        ("0 1 -0.5\n", False, r"line 1: the weight -0.5 must be above 0 and at most 1"),
        ("0 1 nan\n", False, r"line 1: the weight nan must be above 0 and at most 1"),
        ("0 1 0\n", False, r"line 1: the weight 0 must be above 0"),
        ("0 1 0.6\n1 2 0.6\n", False, r"the weights of row 1 sum to 1.2, more than 1"),
        ("0 1 0.6\n1 2 0.3\n1 1 0.2\n", False, r"the weights of row 1 sum to 1.1, not to 1"),
        (
            "0 1 0.6\n1 2 0.3\n2 2 0.5\n",
            False,
            r"row 2 sum to 0.8, not to 1. Change the line '2 2 0.5' or leave",
        ),
        ("0 1\n", False, r"falls apart into 2 pieces: peer 2 is not joined to peer 0"),
        ("", False, r"falls apart into 3 pieces"),
    ],
)
def test_wrong_files_are_refused(edges: Path, text: str, directed: bool, message: str) -> None:
    edges.write_text(text)
    with pytest.raises(ConfigError, match=message):
        check(EdgeListFile(file=edges, directed=directed), 3, seed=0)


def test_files_that_cannot_be_read(edges: Path) -> None:
    with pytest.raises(ConfigError, match=r"edges.txt: cannot be read: No such file"):
        check(EdgeListFile(file=edges), 3, seed=0)
    edges.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: not a text file"):
        check(EdgeListFile(file=edges), 3, seed=0)


def test_weights_that_do_not_go_with_the_file(edges: Path) -> None:
    edges.write_text("0 1\n1 2\n2 0\n")
    with pytest.raises(ConfigError, match="topology.weights = given: .* has no weights"):
        check(EdgeListFile(file=edges, weights="given"), 3, seed=0)
    with pytest.raises(ConfigError, match="needs an undirected graph"):
        check(EdgeListFile(file=edges, weights="metropolis", directed=True), 3, seed=0)


def test_weights_that_break_a_method_s_assumptions(edges: Path) -> None:
    edges.write_text("0 1 0.5\n1 0 0.25\n1 2 0.5\n2 1 0.5\n")
    config = EdgeListFile(file=edges, directed=True)
    with pytest.raises(
        ConfigError, match="peer 0 gives peer 1's model the weight 0.5, peer 1 gives peer 0's 0.25"
    ):
        require_symmetric_doubly_stochastic(mixing(config, sample(config, 3, 1, 0)))


def test_the_file_is_the_same_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert EdgeListFile(file=Path("edges.txt")).file == tmp_path / "edges.txt"
