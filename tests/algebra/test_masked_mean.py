"""Means over who has a coordinate: DisPFL's aggregation and CriticalFL's sparse upload."""

import pytest
import torch
from sparse_cases import mixing, neighbours, normal
from torch import Tensor

from raypfl.algebra import Csr, csr_copying, csr_from_pairs, csr_take, masked_mean, mix_sparse, sparse_mixing
from raypfl.errors import ShapeError

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def neighbourhood(num_peers: int, degree: int, weight_N: Tensor | None = None) -> Csr:
    """Who is heard, oneself included, with the weight of the sender (1 where none is given)."""
    receivers, senders = neighbours(num_peers, degree)
    weights = torch.ones_like(senders).double() if weight_N is None else weight_N[senders]
    return csr_from_pairs(receivers, senders, weights, num_peers)


def masks(peers: int, columns: int, density: float = 0.5) -> Tensor:
    return torch.rand(peers, columns, generator=torch.Generator().manual_seed(7)) < density


def test_known_numbers():
    senders = Csr(torch.tensor([0, 3]), torch.tensor([0, 1, 2]), torch.tensor([1.0, 1, 1]).double())
    w_NP = torch.tensor([[2.0, 4.0, 0.0, 0.0], [4.0, 0.0, 0.0, -6.0], [6.0, 0.0, 0.0, 0.0]])
    mask_NP = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1]]).bool()
    assert masked_mean(senders, w_NP, mask_NP).tolist() == [[4.0, 4.0, 0.0, -3.0]]


@BOTH
def test_equals_a_loop_over_coordinates(dtype):
    senders, w_NP, mask_NP = neighbourhood(12, 4), normal(12, 40, dtype=dtype), masks(12, 40, 0.3)
    found = masked_mean(senders, w_NP, mask_NP)
    receivers, heard = neighbours(12, 4)
    for receiver in range(12):
        for column in range(40):
            of = [float(w_NP[j, column]) for j in heard[receivers == receiver] if mask_NP[j, column]]
            expected = sum(of) / len(of) if of else 0.0
            assert float(found[receiver, column]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@BOTH
def test_one_sender_is_copied_bit_for_bit_and_none_gives_zero(dtype):
    w_NP, mask_NP = normal(6, 50, dtype=dtype), torch.zeros(6, 50, dtype=torch.bool)
    mask_NP[2, :25] = True
    senders = neighbourhood(6, 5)
    found = masked_mean(senders, w_NP, mask_NP)
    assert torch.equal(found[:, :25], w_NP[2, :25].expand(6, -1))
    assert torch.equal(found[:, 25:], torch.zeros(6, 25, dtype=dtype))


@BOTH
def test_full_masks_are_uniform_gossip_and_keep_consensus(dtype):
    senders, w_NP, full = neighbourhood(9, 4), normal(9, 60, dtype=dtype), torch.ones(9, 60, dtype=torch.bool)
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    uniform = senders._replace(values=senders.values / 5)
    torch.testing.assert_close(
        masked_mean(senders, w_NP, full), mix_sparse(uniform, w_NP), rtol=bound, atol=bound
    )
    row = w_NP[:1].expand(9, -1)
    torch.testing.assert_close(masked_mean(senders, row, full), row.contiguous(), rtol=bound, atol=0)


@BOTH
def test_what_stands_outside_a_mask_is_not_read(dtype):
    senders, w_NP, mask_NP = neighbourhood(9, 4), normal(9, 60, dtype=dtype), masks(9, 60)
    outside = w_NP.masked_fill(~mask_NP, float("nan"))
    assert torch.equal(masked_mean(senders, outside, mask_NP), masked_mean(senders, w_NP, mask_NP))


@BOTH
def test_a_diverged_peer_reaches_its_receivers_where_it_has_a_coordinate(dtype):
    receivers, heard = neighbours(9, 3)
    senders, w_NP, mask_NP = neighbourhood(9, 3), normal(9, 60, dtype=dtype), masks(9, 60)
    healthy = masked_mean(senders, w_NP, mask_NP)
    w_NP[4] = float("nan")
    found = masked_mean(senders, w_NP, mask_NP)
    hit = torch.zeros(9, dtype=torch.bool)
    hit[receivers[heard == 4]] = True
    broken = hit[:, None] & mask_NP[4]
    assert found[broken].isnan().all()
    assert torch.equal(found[~broken], healthy[~broken])


class TestWholeRows:
    """CriticalFL: the receiver's own row is dense, its peers send what they changed most."""

    num_samples_N = torch.tensor([3.0, 5.0, 7.0, 11.0]).double()

    def weights(self) -> tuple[Csr, Csr]:
        receivers, senders = neighbours(4, 2)
        other = receivers != senders
        peers = csr_from_pairs(receivers[other], senders[other], self.num_samples_N[senders[other]], 4)
        return peers, csr_copying(torch.arange(4))._replace(values=self.num_samples_N)

    @BOTH
    def test_formula(self, dtype):
        (peers, own), w_NP, mask_NP = self.weights(), normal(4, 30, dtype=dtype), masks(4, 30, 0.2)
        found = masked_mean(peers, w_NP, mask_NP, whole=own)
        for i in range(4):
            heard = peers.columns[peers.offsets[i] : peers.offsets[i + 1]]
            n_i, n_j = self.num_samples_N[i], self.num_samples_N[heard, None] * mask_NP[heard]
            expected = (n_i * w_NP[i] + (n_j * w_NP[heard]).sum(0)) / (n_i + n_j.sum(0))
            torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-6)

    def test_a_mask_of_the_own_row_has_no_influence(self):
        (peers, own), w_NP, mask_NP = self.weights(), normal(4, 30), torch.zeros(4, 30, dtype=torch.bool)
        torch.testing.assert_close(masked_mean(peers, w_NP, mask_NP, whole=own), w_NP, rtol=1e-15, atol=0)

    def test_everything_sent_is_the_weighted_mean(self):
        (peers, own), w_NP = self.weights(), normal(4, 30)
        found = masked_mean(peers, w_NP, torch.ones(4, 30, dtype=torch.bool), whole=own)
        receivers, senders = neighbours(4, 2)
        total = torch.zeros(4).double().index_add(0, receivers, self.num_samples_N[senders])
        share = csr_from_pairs(receivers, senders, self.num_samples_N[senders] / total[receivers], 4)
        torch.testing.assert_close(found, mix_sparse(share, w_NP), rtol=1e-13, atol=1e-14)


@BOTH
def test_bits_depend_on_neither_company_nor_blocks(dtype, monkeypatch):
    senders, w_NP, mask_NP = neighbourhood(12, 4), normal(12, 500, dtype=dtype), masks(12, 500)
    whole = masked_mean(senders, w_NP, mask_NP)
    ids = torch.tensor([7, 2])
    assert torch.equal(masked_mean(csr_take(senders, ids), w_NP, mask_NP), whole[ids])
    monkeypatch.setattr(sparse_mixing, "BLOCK_ENTRIES", 12 * 7)
    monkeypatch.setattr(sparse_mixing, "BLOCK_ALIGNMENT", 7)
    assert torch.equal(masked_mean(senders, w_NP, mask_NP), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mixing(4, 2), torch.ones(4, 3), torch.ones(4, 3)), "Masks torch.float32"),
        (
            (mixing(4, 2), torch.ones(4, 3), torch.ones(4, 2, dtype=torch.bool)),
            r"bool \[4, 2\] for rows \[4, 3\]",
        ),
        ((mixing(5, 2), torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool)), "Sender 4 has no row"),
        (
            (mixing(3, 2), torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bool), mixing(2, 1)),
            "2 and 3 receivers",
        ),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(ShapeError, match=message):
        masked_mean(*arguments)
