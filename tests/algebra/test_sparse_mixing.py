"""Sparse mixing: the same numbers as a dictionary loop, bits that do not depend on company, NaN contained."""

import pytest
import torch
from sparse_cases import mixing, neighbours, normal
from torch import Tensor

from raypfl.algebra import (
    Csr,
    csr_copying,
    csr_from_dense,
    csr_from_pairs,
    csr_take,
    csr_to_dense,
    mix_groups,
    mix_sparse,
    sparse_mixing,
)
from raypfl.errors import ShapeError

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def naive(weights: Csr, w_NP: Tensor) -> Tensor:
    """Section by section of a model, in float64: what a loop over peers and their dictionaries computes."""
    models = [dict(enumerate(row.double().split(7))) for row in w_NP]
    rows = []
    for share_N in csr_to_dense(weights, len(models)):
        heard = [(float(share), model) for share, model in zip(share_N, models, strict=True) if share != 0]
        mixed = {name: sum(share * model[name] for share, model in heard) for name in models[0]}
        rows.append(torch.cat(list(mixed.values())))
    return torch.stack(rows)


def with_copies(weights: Csr, receivers: list[int], source: int, num_peers: int) -> Csr:
    dense = csr_to_dense(weights, num_peers)
    dense[receivers] = 0.0
    dense[receivers, source] = 1.0
    return csr_from_dense(dense)


def test_known_numbers():
    weights = csr_from_dense(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64))
    w_NP = torch.tensor([[1.0, 0.0], [3.0, 8.0], [5.0, 7.0]])
    assert mix_sparse(weights, w_NP).tolist() == [[2.0, 4.0], [5.0, 7.0]]


@BOTH
@pytest.mark.parametrize(("peers", "degree"), [(2, 1), (11, 5), (40, 39)])
def test_equals_a_loop_over_dictionaries(dtype, peers, degree):
    weights, w_NP = mixing(peers, degree), normal(peers, 333, dtype=dtype)
    mixed = mix_sparse(weights, w_NP)
    assert mixed.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(mixed.double(), naive(weights, w_NP), rtol=bound, atol=bound)


@BOTH
def test_rows_are_read_only_and_not_shared(dtype):
    w_NP = normal(5, 9, dtype=dtype)
    before = w_NP.clone()
    mixed = mix_sparse(csr_copying(torch.arange(5)), w_NP)
    assert torch.equal(w_NP, before) and torch.equal(mixed, w_NP)
    assert mixed.untyped_storage().data_ptr() != w_NP.untyped_storage().data_ptr()


@BOTH
def test_consensus_is_a_fixed_point(dtype):
    w_NP = normal(1, 500, dtype=dtype).expand(30, -1)
    bound = 5e-7 if dtype == torch.float32 else 1e-15
    torch.testing.assert_close(mix_sparse(mixing(30, 5), w_NP), w_NP.contiguous(), rtol=bound, atol=0)


@BOTH
def test_dropped_rows_are_copies_bit_for_bit(dtype):
    """Also of negative zeros, of what is not finite, and beside other peers that are not."""
    w_NP = normal(9, 200, dtype=dtype)
    w_NP[2, :4] = torch.tensor([-0.0, 0.0, float("inf"), float("nan")])
    w_NP[5] = float("nan")
    mixed = mix_sparse(with_copies(mixing(9, 3), [0, 7], 2, 9), w_NP)
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    for receiver in (0, 7):
        assert torch.equal(mixed[receiver].view(bits), w_NP[2].view(bits))


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("degree", [3, 38])
def test_what_is_not_finite_reaches_only_who_names_it(dtype, bad, degree):
    """0 * NaN is NaN: a dense product carries one diverged peer to everybody."""
    weights, w_NP = mixing(40, degree), normal(40, 100, dtype=dtype)
    healthy = mix_sparse(weights, w_NP)
    w_NP[13] = bad
    mixed = mix_sparse(weights, w_NP)
    names_it = csr_to_dense(weights, 40)[:, 13] != 0
    assert names_it.any() and not names_it.all()
    assert torch.equal(mixed[~names_it], healthy[~names_it])
    assert not mixed[names_it].isfinite().any()


@BOTH
def test_a_receiver_has_the_same_bits_in_any_company(dtype):
    weights, w_NP = with_copies(mixing(40, 5), [3], 8, 40), normal(40, 1003, dtype=dtype)
    everybody = mix_sparse(weights, w_NP)
    for ids in [[0], [3], [39, 3, 5], list(range(0, 40, 2)), list(range(17))]:
        part = mix_sparse(csr_take(weights, torch.tensor(ids)), w_NP)
        assert torch.equal(part, everybody[ids])


@BOTH
@pytest.mark.parametrize("degree", [5, 39])
def test_bits_do_not_depend_on_blocks(dtype, degree, monkeypatch):
    weights, w_NP = mixing(40, degree), normal(40, 1003, dtype=dtype)
    whole = mix_sparse(weights, w_NP)
    for alignment in (1, 3, 64, 500, 1024):
        monkeypatch.setattr(sparse_mixing, "BLOCK_ENTRIES", 40 * alignment)
        monkeypatch.setattr(sparse_mixing, "BLOCK_ALIGNMENT", alignment)
        assert torch.equal(mix_sparse(weights, w_NP), whole)


@BOTH
def test_bits_do_not_depend_on_threads(dtype):
    weights, w_NP, threads = mixing(40, 5), normal(40, 40_000, dtype=dtype), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(mix_sparse(weights, w_NP))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@BOTH
def test_receivers_that_take_the_same_are_computed_once_and_equal(dtype, monkeypatch):
    """A complete graph; one peer is absent and keeps its own model."""
    share = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense = (share / share.sum()).expand(40, -1).clone()
    dense[4] = torch.eye(40, dtype=torch.float64)[4]
    weights, w_NP = csr_from_dense(dense), normal(40, 300, dtype=dtype)
    computed = []
    weighted_sum = sparse_mixing.weighted_sum

    def watched(weights, values, part):
        computed.append(len(weights.offsets) - 1)
        return weighted_sum(weights, values, part)

    monkeypatch.setattr(sparse_mixing, "weighted_sum", watched)
    mixed = mix_sparse(weights, w_NP)
    assert set(computed) == {1}
    assert torch.equal(mixed[4], w_NP[4])
    others = [peer for peer in range(40) if peer != 4]
    assert torch.equal(mixed[others], mix_sparse(csr_take(weights, torch.tensor([0])), w_NP).expand(39, -1))


@BOTH
def test_permuted_peers(dtype):
    """Relabelled peers give relabelled models, up to the order of sums."""
    weights, w_NP = mixing(12, 4), normal(12, 50, dtype=dtype)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    relabelled = csr_from_dense(csr_to_dense(weights, 12)[order][:, order])
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(
        mix_sparse(relabelled, w_NP[order]), mix_sparse(weights, w_NP)[order], rtol=bound, atol=bound
    )


def test_doubly_stochastic_weights_keep_the_mean():
    ring = torch.eye(8, dtype=torch.float64)
    ring = csr_from_dense((ring + ring.roll(1, 0) + ring.roll(-1, 0)) / 3)
    w_NP = normal(8, 40)
    torch.testing.assert_close(mix_sparse(ring, w_NP).mean(0), w_NP.mean(0), rtol=1e-13, atol=1e-15)


def test_who_names_nobody_gets_zeros():
    weights = csr_from_pairs(torch.tensor([1]), torch.tensor([0]), torch.tensor([0.5]), 3)
    assert mix_sparse(weights, torch.full((2, 2), 4.0)).tolist() == [[0, 0], [2, 2], [0, 0]]
    nobody = csr_from_dense(torch.zeros(2, 2, dtype=torch.float64))
    assert mix_sparse(nobody, torch.full((2, 2), float("nan"))).tolist() == [[0, 0], [0, 0]]
    assert mix_sparse(csr_take(weights, torch.tensor([], dtype=torch.int64)), torch.ones(2, 2)).shape == (
        0,
        2,
    )


class TestGroups:
    def test_each_group_has_its_own_matrix(self):
        extractor, head = mixing(9, 3, seed=1), mixing(9, 2, seed=2)
        w_NP = normal(9, 30, dtype=torch.float32)
        mixed = mix_groups([(slice(0, 20), extractor), (slice(20, 30), head)], w_NP)
        assert torch.equal(mixed[:, :20], mix_sparse(extractor, w_NP[:, :20]))
        assert torch.equal(mixed[:, 20:], mix_sparse(head, w_NP[:, 20:]))

    @pytest.mark.parametrize("entries", [9, 2**18])
    def test_columns_by_number(self, entries, monkeypatch):
        """Normalisation layers stay at home: their columns lie scattered among those that travel."""
        monkeypatch.setattr(sparse_mixing, "BLOCK_ENTRIES", entries)
        monkeypatch.setattr(sparse_mixing, "BLOCK_ALIGNMENT", 1)
        home = torch.tensor([3, 4, 17, 29])
        travel = torch.tensor([column for column in range(30) if column not in home.tolist()])
        shared, w_NP = mixing(9, 3), normal(9, 30, dtype=torch.float32)
        mixed = mix_groups([(travel, shared), (home, csr_copying(torch.arange(9)))], w_NP)
        assert torch.equal(mixed[:, home], w_NP[:, home])
        assert torch.equal(mixed[:, travel], mix_sparse(shared, w_NP)[:, travel])

    def test_empty_groups(self):
        weights, w_NP = mixing(4, 2), normal(4, 6)
        none = torch.tensor([], dtype=torch.int64)
        mixed = mix_groups([(slice(0, 0), weights), (slice(0, 6), weights), (none, weights)], w_NP)
        assert torch.equal(mixed, mix_sparse(weights, w_NP))

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ([(slice(0, 5), mixing(4, 2))], "Column 5 of 6 is in 0 groups"),
            (
                [(slice(0, 6), mixing(4, 2)), (torch.tensor([1]), mixing(4, 2))],
                "Column 1 of 6 is in 2 groups",
            ),
            ([(slice(0, 3), mixing(4, 2)), (slice(3, 6), mixing(3, 2))], r"\[3, 4\] receivers"),
            ([(slice(0, 6), mixing(5, 2))], "Sender 4 has no row: there are 4 rows"),
        ],
    )
    def test_groups_that_do_not_fit(self, groups, message):
        with pytest.raises(ShapeError, match=message):
            mix_groups(groups, normal(4, 6))


def test_a_sparse_mix_holds_blocks_only(monkeypatch):
    """Neither the rows nor anything of N x N is held a second time."""
    largest = []
    weighted_sum = sparse_mixing.weighted_sum

    def watched(weights, values, part_NB):
        mixed_RB = weighted_sum(weights, values, part_NB)
        largest.append(max(part_NB.numel(), mixed_RB.numel()))
        return mixed_RB

    monkeypatch.setattr(sparse_mixing, "weighted_sum", watched)
    receivers, senders = neighbours(300, 5)
    weights = csr_from_pairs(receivers, senders, torch.full((1800,), 1 / 6, dtype=torch.float64), 300)
    mix_sparse(weights, normal(300, 20_000, dtype=torch.float32))
    assert max(largest) <= sparse_mixing.BLOCK_ENTRIES
