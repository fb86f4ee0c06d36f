"""FedFomo: weights by gain on own validation samples, whose models are sent, and what is kept of them."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from raypfl.methods.fedfomo import (
    GUARD,
    Config,
    Down,
    FedFomo,
    Hub,
    State,
    explore,
    favourites,
    weights_of,
)
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.models import BatchNorm1d
from raypfl.training import Adam, Network, TrainingConfig

PURPOSE = "fomo validation"
HALF = Config(num_models=4, validation=0.5)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


class TestWeights:
    def test_positive_gains_over_their_sum(self):
        expected = rows([0.25, 0.75, 0.0], [0.0, 0.0, 1.0])
        assert torch.equal(weights_of(rows([1, 3, -2], [0, -1, 5])), expected)

    @pytest.mark.parametrize("scale", [1e-8, 2.0, 1e6])
    def test_scale_of_gains_does_not_matter(self, scale):
        gain = rows([0.3, -0.2, 0.5, 0.0], [0.1, 0.2, 0.3, -4.0])
        found = weights_of(scale * gain)
        torch.testing.assert_close(found, weights_of(gain), rtol=1e-14, atol=0)
        torch.testing.assert_close(found.sum(1), rows(1, 1), rtol=0, atol=1e-15)
        assert (found >= 0).all()

    def test_no_gain_has_no_weight(self):
        assert torch.equal(weights_of(rows([-1, 0], [0, 0])), torch.zeros(2, 2, dtype=torch.float64))


class TestFavourites:
    EVERYBODY = torch.ones(4, dtype=torch.bool)

    def test_largest_affinity_first(self):
        found = favourites(rows([0.5, -1, 2, 0]), self.EVERYBODY, torch.tensor([0]))
        assert found.tolist() == [[2, 0, 3, 1]]

    def test_ties_go_to_the_client_itself_then_to_the_lowest_id(self):
        found = favourites(torch.zeros(2, 4), self.EVERYBODY, torch.tensor([0, 2]))
        assert found.tolist() == [[0, 1, 2, 3], [2, 0, 1, 3]]

    def test_who_has_not_uploaded_comes_last(self):
        uploaded = torch.tensor([False, True, False, True])
        found = favourites(rows([9, -1, 0, 5], [0, 0, 1, 0]), uploaded, torch.tensor([0, 2]))
        assert found.tolist() == [[3, 1, 0, 2], [1, 3, 2, 0]]


class TestExploration:
    @pytest.mark.parametrize("epsilon, draw", [(0.0, 1), (0.4, 2), (1.0, 3)])
    def test_so_many_different_models(self, epsilon, draw):
        order = [7, 3, 1, 9, 4]
        for count in range(1, 6):
            found = explore(order, count, epsilon, draw)
            assert len(set(found)) == count and set(found) <= set(order)
            assert epsilon > 0 or found == order[:count]

    def test_as_often_as_epsilon_says(self):
        """The first choice is the favourite, unless it is explored and one of the 9 others is drawn."""
        order = list(range(10))
        first = [explore(order, 1, 0.5, draw)[0] for draw in range(2000)]
        assert sum(choice == 0 for choice in first) / 2000 == pytest.approx(0.55, abs=0.04)

    def test_falls_by_the_round_to_nothing(self, make_toy):
        toy = make_toy((4,) * 30)
        explored, plain = (FedFomo(Config(epsilon=value)) for value in (0.3, 0.0))
        hub = plain.init_hub(toy.net, toy.clients)
        same = [
            (toy.plan_of(explored, hub, round).peers == toy.plan_of(plain, hub, round).peers).all()
            for round in (1, 3, 7, 8)
        ]
        assert same == [False, False, True, True]
        again = toy.plan_of(explored, hub, 3).peers
        assert torch.equal(again, toy.plan_of(explored, hub, 3).peers)
        assert not torch.equal(again, toy.plan_of(explored, hub, 2).peers)


def start_of(toy, w, before, uploads=1):
    """Server and clients that hold these models."""
    num = len(w)
    affinity = torch.eye(num, dtype=w.dtype)
    statistics = w[:, toy.net.travelling]
    return Hub(toy.weights(w), statistics, affinity, torch.full((num,), uploads)), State(w, before)


def losses(toy, client, models):
    """Mean cross-entropy of models on a client's validation samples, by plain indexing."""
    held = toy.cohort(toy.plan(1, [client])).held_out(0.5, PURPOSE).data.validation[0]
    answers = toy.net.bind(models)(toy.x[held].expand(len(models), -1, -1))
    return torch.stack([F.cross_entropy(logits, toy.y[held]) for logits in answers])


class TestOneRound:
    """Four clients with models of their own, everybody receives all of them."""

    @pytest.mark.parametrize("distance, order", [("l2", 2), ("l1", 1)])
    def test_models_are_mixed_by_their_gain_for_the_distance(self, distance, order, toy):
        w, before = toy.rows(seed=1), toy.rows(4.0, seed=5)
        method = FedFomo(HALF.model_copy(update={"distance": distance}))
        hub, state = start_of(toy, w, before)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        for client in range(4):
            own = before[client : client + 1]
            gain = losses(toy, client, own) - losses(toy, client, w)
            gain = gain / (torch.linalg.vector_norm(toy.weights(w - own), order, dim=1) + GUARD)
            torch.testing.assert_close(done.up.gain[client], gain, rtol=1e-10, atol=1e-12)
            omega = gain.clamp_min(0) / gain.clamp_min(0).sum()
            torch.testing.assert_close(done.state.before[client], omega @ w, rtol=1e-10, atol=1e-12)
        assert (done.up.gain > 0).any(1).all() and (done.up.gain < 0).any(), "the case is a real one"
        torch.testing.assert_close(done.hub.affinity, hub.affinity + done.up.gain, rtol=1e-14, atol=0)

    def test_training_starts_at_the_mixture_and_leaves_validation_samples_out(self, toy):
        w, before = toy.rows(seed=1), toy.rows(2.0, seed=2)
        method = FedFomo(HALF)
        hub, state = start_of(toy, w, before)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        split = toy.cohort(toy.plan()).held_out(0.5, PURPOSE).data
        toy.indices = split.train
        step = 0.5 * toy.gradients(done.state.before)
        torch.testing.assert_close(
            toy.weights(done.state.w), toy.weights(done.state.before) - step, rtol=1e-10, atol=1e-12
        )
        assert torch.equal(done.up.w, toy.weights(done.state.w))

    @pytest.mark.parametrize("rule", ["keep", "paper"])
    def test_with_no_gain_the_rule_decides(self, rule, toy):
        """o_i was trained, all models are far off."""
        before = toy.run(Local(LocalConfig()), 20)[-1].state.w
        w = before + 50 * toy.rows()
        method = FedFomo(HALF.model_copy(update={"no_gain": rule}))
        hub, state = start_of(toy, w, before)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        assert (done.up.gain < 0).all()
        assert torch.equal(done.state.before, w if rule == "keep" else before)
        assert (done.hub.affinity < torch.eye(4)).all(), "the server adds negative gains, too"

    def test_equal_models_share_their_weight(self, toy):
        w, before = toy.rows(seed=1), toy.rows(2.0, seed=2)
        w[3] = w[1]
        method = FedFomo(HALF)
        hub, state = start_of(toy, w, before)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        omega = weights_of(done.up.gain)
        assert torch.equal(omega[:, 1], omega[:, 3]) and (omega[:, 1] > 0).any()

    def test_a_model_that_is_where_training_began_gains_nothing(self, toy):
        w, before = toy.rows(seed=1), toy.rows(2.0, seed=2)
        before[0] = w[2]
        method = FedFomo(HALF)
        hub, state = start_of(toy, w, before)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        assert done.up.gain[0, 2] == 0 and (done.up.gain[1:, 2] != 0).all()

    def test_weight_of_what_is_not_sent_stays(self, toy):
        w, before = toy.rows(seed=1), toy.rows(2.0, seed=2)
        method = FedFomo(Config(num_models=2, validation=0.5))
        hub, state = start_of(toy, w, before)
        hub.affinity[1] = rows(0.1, -3, 0.3, 0.2)
        plan = toy.plan_of(method, hub, 2, [0, 1, 3])
        assert plan.peers.tolist() == [[0, 1], [2, 3], [0, 3]]
        done = toy.round(method, hub, state, plan)
        moved = done.hub.affinity != hub.affinity
        assert moved.nonzero().tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [3, 0], [3, 3]]
        assert done.hub.uploads.tolist() == [2, 2, 1, 2]
        assert torch.equal(done.hub.w[2], hub.w[2]) and torch.equal(done.state.w[2], w[2])


def test_first_round_changes_nothing_before_training(make_toy):
    toy = make_toy(dtype=torch.float64)
    method = FedFomo(Config())
    done = toy.run(method, 1)[0]
    assert torch.equal(done.up.gain, torch.zeros(4, 4, dtype=torch.float64))
    assert torch.equal(done.state.before, method.init_state(toy.net, toy.clients).w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_its_own_model_alone_it_is_separate_on_the_training_part(dtype, make_toy):
    """Whether the own model has gained (weight 1) or not (kept): it goes on from where it is."""
    steps = TrainingConfig(epochs=2, batch_size=3, optimizer=Adam(lr=0.3))
    toy, method = make_toy(dtype=dtype, training=steps), FedFomo(Config(num_models=1))
    hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
    gains = []
    for number in range(1, 7):
        plan = toy.plan_of(method, hub, number)._replace(peers=torch.arange(4)[:, None])
        done = toy.round(method, hub, state, plan)
        hub, state = done.hub, done.state
        gains.append(done.up.gain)
    toy.indices = toy.cohort(toy.plan()).held_out(0.2, PURPOSE).data.train
    assert torch.equal(state.w, toy.run(Local(LocalConfig()), 6)[-1].state.w)
    assert (torch.cat(gains) > 0).any() and (torch.cat(gains) < 0).any(), "both cases came up"


def test_one_client_in_all(make_toy):
    toy = make_toy((7,))
    found = toy.run(FedFomo(Config()), 3)[-1].state.w
    toy.indices = toy.cohort(toy.plan()).held_out(0.2, PURPOSE).data.train
    assert torch.equal(found, toy.run(Local(LocalConfig()), 3)[-1].state.w)


def test_who_comes_late_hears_those_who_were_there(make_toy):
    """Client 0 joins in round 3; 1 and 2 have uploaded, and it receives those cached uploads."""
    toy, method = make_toy(), FedFomo(Config(num_models=2))
    second = toy.run(method, 2, lambda round: [1, 2])[-1]
    plan = toy.plan_of(method, second.hub, 3, [0, 3])
    assert plan.peers.tolist() == [[1, 2], [1, 2]]
    down = method.download(toy.net, second.hub, plan)
    assert torch.equal(down.models[0], second.up.w)


class TestStatistics:
    """v_j is run with its owner's running statistics where they travel; mixtures have the client's own."""

    @staticmethod
    def toy_with_norm(make_toy, buffers):
        toy = make_toy(dtype=torch.float64, features=4)
        layers = OrderedDict([("norm", BatchNorm1d(4)), ("head", nn.Linear(4, 3))])
        toy.net = Network(lambda: nn.Sequential(layers), "head", buffers=buffers, dtype=torch.float64)
        return toy

    @pytest.mark.parametrize("buffers, owner", [("average", True), ("local", False)])
    def test_whose_they_are(self, buffers, owner, make_toy):
        toy = self.toy_with_norm(make_toy, buffers)
        w, before = toy.rows(seed=1), toy.rows(2.0, seed=2)
        for held in (w, before):
            held[:, toy.net.statistics] = 1 + torch.rand(4, 8, generator=torch.Generator().manual_seed(5))
        method = FedFomo(HALF)
        hub, state = start_of(toy, w, before)
        plan = toy.plan_of(method, hub)
        down = method.download(toy.net, hub, plan)
        _, up = method.local_update(toy.cohort(plan), state, down)
        for client in range(4):
            tried = w.clone()
            if not owner:
                tried[:, toy.net.statistics] = w[client, toy.net.statistics]
            own = before[client : client + 1]
            gain = losses(toy, client, own) - losses(toy, client, tried)
            gain = gain / (toy.weights(w - own).norm(dim=1) + GUARD)
            torch.testing.assert_close(up.gain[client], gain, rtol=1e-10, atol=1e-12)
        done, _ = method.local_update(toy.cohort(plan), state, down)
        assert torch.equal(done.before[:, toy.net.statistics], w[:, toy.net.statistics])

    @pytest.mark.parametrize("buffers, columns", [("average", 8), ("local", 0)])
    def test_they_are_counted_apart(self, buffers, columns, make_toy):
        toy = self.toy_with_norm(make_toy, buffers)
        method = FedFomo(Config(num_models=3))
        hub = method.init_hub(toy.net, toy.clients)
        plan = toy.plan_of(method, hub, 1, [0, 2])
        sent = method.sent_down(toy.net, plan, method.download(toy.net, hub, plan))
        expected = [("models", 3 * toy.net.num_weights), ("statistics", 3 * columns)]
        assert [(m.kind, m.values) for m in sent if m.dst == 2] == [own for own in expected if own[1]]


def test_every_model_is_sent_to_a_host_once(toy):
    method = FedFomo(Config(num_models=2))
    hub, _ = start_of(toy, toy.rows(), toy.rows())
    plan = toy.plan_of(method, hub, 1, [1, 2, 3])
    down = method.download(toy.net, hub, plan)
    assert plan.peers.tolist() == [[0, 1], [0, 2], [0, 3]]
    assert isinstance(down, Down) and down.models.shape == (1, 4, 15)
    assert torch.equal(down.models[0, down.place[2]], toy.weights(toy.rows())[[0, 3]])
    assert sum(message.values for message in method.sent_down(toy.net, plan, down)) == 3 * 2 * 15


@pytest.mark.parametrize("options", [{"num_models": 0}, {"validation": 0.0}, {"validation": 1.0}])
def test_options_out_of_range(options):
    with pytest.raises(ValidationError):
        Config(**options)
