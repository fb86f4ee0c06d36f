"""FedCAC: which parameters are critical, who shares them, and what is left when everybody or nobody does."""

import pytest
import torch

from raypfl.algebra import pack_bits, unpack_bits
from raypfl.methods import Plan, local
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedcac import (
    Config,
    FedCAC,
    Up,
    collaborators,
    combine,
    critical_entries,
    critical_overlaps,
)
from raypfl.methods.local import Local
from raypfl.training import SGD, TrainingConfig


def make(**options):
    return FedCAC(Config(**options))


def masks(*rows):
    return pack_bits(torch.tensor(rows, dtype=torch.bool))


FOUR = masks(
    [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 1, 1, 1]
)
"""Pairs share 3, 2, 1 / 3, 1 / 2 of 4 entries: mean overlap 1/2, largest 3/4."""


def friends(round, beta):
    return collaborators(critical_overlaps(FOUR), round, beta).int().tolist()


class TestCriticalEntries:
    def test_change_times_value_in_each_tensor(self):
        """|(w - start) w| is 2, 0, 3 | 0.5, 4, 1: neither change nor value alone gives this order."""
        start = torch.tensor([[1.0, 9.0, 0.0, 0.5, 0.0, 100.0]])
        trained = torch.tensor([[2.0, 9.0, 3**0.5, 1.0, 2.0, 100.01]])
        assert critical_entries([slice(0, 3), slice(3, 5), slice(5, 6)], start, trained, 0.5).tolist() == [
            [False, False, True, False, True, False]
        ]
        assert critical_entries([slice(0, 3), slice(3, 6)], start, trained, 0.67).tolist() == [
            [True, False, True, False, True, True]
        ]

    @pytest.mark.parametrize("ratio, count", [(0.29, 29), (0.3, 30), (0.995, 99), (0.0, 0), (1.0, 100)])
    def test_exactly_so_many_where_nothing_moved(self, ratio, count):
        rows = torch.ones(3, 100)
        mask = critical_entries([slice(0, 100)], rows, rows, ratio)
        assert mask.sum(1).tolist() == [count] * 3
        assert mask[:, :count].all()

    def test_is_cut_within_tensors(self, toy):
        """Of the 12 weights and 3 biases of the classifier."""
        assert [columns.stop - columns.start for columns in toy.net.tensors] == [12, 3]
        done = toy.run(make(critical_ratio=0.5), 1)[0]
        start = make().init_hub(toy.net, toy.clients).w
        mask = critical_entries(toy.net.tensors, start, done.up.w, 0.5)
        assert mask[:, :12].sum(1).tolist() == [6] * 4 and mask[:, 12:].sum(1).tolist() == [1] * 4
        assert torch.equal(done.up.critical, pack_bits(mask))


class TestCollaborators:
    def test_threshold_rises_from_the_mean_to_the_largest_overlap(self):
        """0.5 + t/10 * 0.25: in round 1 pairs with 3/4, since 2/4 is below 0.525."""
        close = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
        assert friends(1, 10) == close and friends(9, 10) == close
        assert friends(10, 10) == close, "at t = beta the closest pairs are still together"
        assert friends(11, 10) == torch.eye(4).int().tolist()

    def test_starts_at_the_mean(self):
        """0.5000001 * 1/4 above the mean is below no overlap but those of the mean itself."""
        found = friends(1, 1e15)
        assert found == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]

    @pytest.mark.parametrize("round", [1, 3, 1000])
    def test_identical_masks_stay_together_for_ever(self, round):
        """The mean is the largest."""
        same = masks(*[[1, 0, 1, 0, 1, 1, 1]] * 7)
        assert collaborators(critical_overlaps(same), round, 3.0).all()

    def test_nobody_has_a_critical_parameter(self):
        none = critical_overlaps(masks([0, 0], [0, 0]))
        assert none.tolist() == [[0, 0], [0, 0]]
        assert collaborators(none, 1, 10.0).tolist() == [[True, False], [False, True]]

    def test_one_participant(self):
        assert collaborators(critical_overlaps(masks([1, 0])), 1, 10.0).tolist() == [[True]]


def test_critical_entries_come_from_friends_and_the_others_from_all():
    """Counts 1, 1, 2; the first two are friends; the friends' mean is not weighted."""
    w = torch.tensor([[0.0, 0.0], [4.0, 8.0], [2.0, 12.0]])
    near = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool()
    up = Up(w, masks([1, 0], [0, 1], [1, 1]))
    assert combine(up, near, torch.tensor([1, 1, 2])).tolist() == [[2.0, 8.0], [2.0, 4.0], [2.0, 12.0]]


def test_is_the_papers_matrix_form(make_toy):
    toy = make_toy(dtype=torch.float64)
    w = toy.weights(toy.rows())
    critical = torch.rand(4, w.shape[1], generator=torch.Generator().manual_seed(1)) < 0.5
    near = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    sizes = toy.clients.sizes
    m, b = critical.double(), near.double()
    share = sizes.double() / sizes.sum()
    expected = m * (torch.diag(1 / b.sum(1)) @ b @ w) + (1 - m) * (torch.ones(4, 1) * share @ w)
    found = combine(Up(w, pack_bits(critical)), near, sizes)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


EVEN = TrainingConfig(epochs=2, batch_size=4, optimizer=SGD(lr=0.3))


@pytest.mark.parametrize("ratio, beta", [(0.0, 10.0), (1.0, 10.0), (1.0, 0.01), (0.0, 0.01)])
def test_all_or_nothing_critical_is_fedavg(ratio, beta, make_toy):
    """With r = 0 nothing is personal; with r = 1 all masks coincide, and all collaborate in any round."""
    toy = make_toy((6, 6, 6), training=EVEN, dtype=torch.float64)
    found = toy.run(make(critical_ratio=ratio, beta=beta), 3)
    for done, average in zip(found, toy.run(FedAvg(FedAvgConfig()), 3), strict=True):
        expected = average.hub.w.expand(3, -1)
        torch.testing.assert_close(done.hub.w, expected, rtol=1e-12, atol=1e-14)


def test_late_rounds_keep_critical_entries_local(make_toy):
    """For t >> beta: M o W + (1 - M) o mean, on unequal clients."""
    toy = make_toy(training=EVEN, dtype=torch.float64)
    done = toy.run(make(beta=1e-9), 1)[0]
    start = make().init_hub(toy.net, toy.clients).w
    mask = critical_entries(toy.net.tensors, start, done.up.w, 0.5)
    share = toy.clients.sizes.double() / toy.clients.sizes.sum()
    mean = share @ done.up.w
    expected = torch.where(mask, done.up.w, mean)
    torch.testing.assert_close(done.hub.w, expected, rtol=1e-12, atol=1e-14)
    assert (done.hub.w[mask] == done.up.w[mask]).all()


def test_everybody_together_is_fedavg_for_any_ratio(make_toy):
    """The threshold below every overlap, equal counts."""
    toy = make_toy((6, 6, 6), training=EVEN, dtype=torch.float64)
    up = toy.run(make(), 1)[0].up
    found = combine(up, torch.ones(3, 3, dtype=torch.bool), toy.clients.sizes)
    torch.testing.assert_close(found, up.w.mean(0).expand(3, -1), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_client_alone_is_separate_bit_for_bit(dtype, make_toy):
    toy = make_toy((7,), dtype=dtype)
    for found, alone in zip(toy.run(make(), 3), toy.run(Local(local.Config()), 3), strict=True):
        assert torch.equal(found.state.w, alone.state.w)


def test_identical_models_stay_bit_for_bit(make_toy):
    toy = make_toy()
    w = toy.weights(toy.rows())[:1].repeat(4, 1)
    critical = torch.rand(4, w.shape[1], generator=torch.Generator().manual_seed(1)) < 0.5
    plan = Plan(1, torch.arange(4), toy.clients.sizes)
    hub = make().init_hub(toy.net, toy.clients)
    assert torch.equal(make().aggregate(toy.net, hub, Up(w, pack_bits(critical)), plan).w, w)


def test_rounds_start_from_the_combined_model_and_only_participants_move(toy):
    method = make(beta=3)
    history = toy.run(method, 3, lambda round: [None, [0, 1, 3], None][round - 1])
    first, second, third = history
    assert torch.equal(second.down.w, first.hub.w[[0, 1, 3]])
    assert torch.equal(second.hub.w[2], first.hub.w[2]) and torch.equal(second.state.w[2], first.state.w[2])
    assert torch.equal(third.down.w, second.hub.w)
    before = method.personalised(toy.net, second.state, third.down)
    assert torch.equal(toy.weights(before), second.hub.w)
    assert torch.equal(method.absent(toy.net, second.state, third.down), second.state.w)
    assert torch.equal(method.personalised(toy.net, third.state, third.down, third.up), third.state.w)


def test_traffic_is_a_model_and_a_bit_a_parameter(make_toy):
    toy = make_toy()
    done = toy.run(make(), 1)[0]
    plan = toy.plan()
    up = make().sent_up(toy.net, plan.ids, done.up)
    down = make().sent_down(toy.net, plan, done.down)
    assert {message.bytes for message in up if message.kind == "w"} == {4 * 15}
    assert {message.bytes for message in up if message.kind == "critical"} == {2}
    assert {message.bytes for message in down} == {4 * 15}


@pytest.mark.parametrize("option", [{"critical_ratio": 1.1}, {"beta": 0}, {"critical_ratio": -0.1}])
def test_settings_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Config(**option)


def test_relations_are_those_of_the_last_round(toy):
    """The weights make of uploads what is critical in the combined models."""
    method = make(beta=3)
    _, second, third = toy.run(method, 3, lambda round: [None, [0, 1, 3], None][round - 1])
    plan = Plan(3, toy.clients.ids, toy.clients.sizes)
    assert method.relations(toy.net, method.init_hub(toy.net, toy.clients), plan, third.down) == {}
    found = method.relations(toy.net, second.hub, plan, third.down)
    ids = [0, 1, 3]
    overlap, weight = (torch.full((4, 4), torch.nan, dtype=torch.float64) for _ in range(2))
    for matrix, pairs in zip((overlap, weight), found.values(), strict=True):
        matrix[pairs.receivers, pairs.sources] = pairs.values
    assert list(found) == ["mask overlap", "weight of critical parameters"]
    assert overlap[2].isnan().all() and weight[:, 2].isnan().all()
    assert torch.equal(overlap[ids][:, ids], critical_overlaps(second.up.critical))
    critical = unpack_bits(second.up.critical, second.up.w.shape[1])
    mixed = weight[ids][:, ids] @ second.up.w.double()
    torch.testing.assert_close(second.hub.w[ids].double()[critical], mixed[critical], rtol=1e-6, atol=1e-7)
