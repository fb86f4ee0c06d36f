"""FedPer: what is shared, what stays, and the two ends of the scale between FedAvg and Separate."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from raypfl.engine.messages import take
from raypfl.errors import ConfigError
from raypfl.methods.fedavg import Config as FedAvgConfig
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedper import Config, FedPer
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.models import BatchNorm1d
from raypfl.training import SGD, Network, TrainingConfig

METHOD = FedPer(Config())
MINI_BATCHES = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.1, momentum=0.5))


def some(round):
    """Everybody in the first round, then two of four."""
    return None if round == 1 else [1, 3]


@pytest.fixture
def deep(make_toy):
    """Four unequal clients with a perceptron of four hidden units, some mini-batches a round."""
    return make_toy(hidden=4, training=MINI_BATCHES, dtype=torch.float64)


def layers():
    return nn.Sequential(
        OrderedDict(fc=nn.Linear(4, 5), act=nn.Tanh(), head=nn.Linear(5, 3), end=nn.Identity())
    )


def test_heads_stay_and_the_extractor_is_the_weighted_mean(deep):
    """The classic mistake is a head that the server's model overwrites."""
    first, second = deep.run(METHOD, 2, some)
    net = deep.net
    assert first.up.body.shape == (4, net.body.stop - net.body.start)
    mean = (torch.tensor([7.0, 4, 10, 5], dtype=torch.float64)[:, None] * first.up.body).sum(0) / 26
    torch.testing.assert_close(first.hub.body[0], mean, rtol=1e-13, atol=1e-15)
    start = METHOD.init_state(net, deep.clients).head
    assert (first.state.head != start).any(1).all()
    assert torch.equal(second.state.head[[0, 2]], first.state.head[[0, 2]])
    pre = METHOD.personalised(net, first.state, second.down)
    assert torch.equal(pre[:, net.head], first.state.head)
    assert torch.equal(pre[:, net.body], first.hub.body.expand(4, -1))
    own = take(second.state, torch.tensor([1, 3]))
    post = METHOD.personalised(net, own, second.down, second.up)
    assert torch.equal(post[:, net.weights], torch.cat([own.head, second.up.body], 1))


def test_no_personal_layer_is_fedavg_bit_for_bit(make_toy):
    toy = make_toy(training=MINI_BATCHES)
    toy.net = Network(layers, "end")
    assert toy.net.head == slice(0, 0)
    for mine, theirs in zip(toy.run(METHOD, 3, some), toy.run(FedAvg(FedAvgConfig()), 3, some), strict=True):
        assert torch.equal(mine.hub.body, theirs.hub.w)


def test_personal_layers_only_are_local_training_bit_for_bit(make_toy):
    toy = make_toy(training=MINI_BATCHES)
    toy.net = Network(layers, "fc")
    assert toy.net.body.start == toy.net.body.stop
    for mine, theirs in zip(toy.run(METHOD, 3, some), toy.run(Local(LocalConfig()), 3, some), strict=True):
        assert torch.equal(mine.state.head, toy.weights(theirs.state.w))


def test_one_client_is_plain_training_bit_for_bit(make_toy):
    """Momentum is fresh every round in both."""
    toy = make_toy(sizes=(7,), hidden=4, training=MINI_BATCHES)
    for mine, theirs in zip(toy.run(METHOD, 3), toy.run(FedAvg(FedAvgConfig()), 3), strict=True):
        assert torch.equal(torch.cat([mine.state.head, mine.hub.body], 1), theirs.hub.w)


def test_others_reach_a_head_only_through_the_extractor(make_toy):
    """Other labels at client 0: the other heads are the same after one round, and differ after two."""
    runs = []
    for shift in (0, 1):
        toy = make_toy(hidden=4, training=MINI_BATCHES, dtype=torch.float64)
        toy.y[toy.indices[0]] = (toy.y[toy.indices[0]] + shift) % 3
        runs.append(toy.run(METHOD, 2))
    (first, second), (other_first, other_second) = runs
    assert (first.state.head != other_first.state.head).any(1).tolist() == [True, False, False, False]
    assert (first.hub.body != other_first.hub.body).any()
    assert (second.state.head != other_second.state.head).any(1).all()


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("head, body", [("head", 30 + 10), ("norm2", 30), ("fc2", 20)])
def test_statistics_of_personal_layers_stay_with_them(make_toy, head, body, buffers):
    """Two normalised layers; wherever the head begins, its running statistics are never sent."""

    def normalised():
        return nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(4, 2),
                norm1=BatchNorm1d(2),
                fc2=nn.Linear(2, 3),
                norm2=BatchNorm1d(3),
                head=nn.Linear(3, 3),
            )
        )

    toy = make_toy(sizes=(6, 9), training=MINI_BATCHES, dtype=torch.float64)
    toy.net = net = Network(normalised, head, buffers=buffers, dtype=torch.float64)
    extractor = {"head": 10 + 4 + 9 + 6, "norm2": 10 + 4 + 9, "fc2": 10 + 4}[head]
    statistics = {"head": 4 + 6, "norm2": 4, "fc2": 4}[head] if buffers == "average" else 0
    assert net.body.stop - net.body.start == extractor + statistics
    done = toy.run(METHOD, 2)[-1]
    model = METHOD.personalised(net, done.state, done.down, done.up)
    assert done.state.kept.shape == (2, 10 - statistics)
    if done.state.kept.numel():
        assert torch.equal(model[:, net.kept], done.state.kept)
        assert (done.state.kept[0] != done.state.kept[1]).all()


def test_reported_is_the_personalised_model_as_received():
    assert METHOD.reported == ("personalised", "pre")


@pytest.mark.parametrize("head, problem", [("fc", "covers every layer"), ("end", "has no parameters")])
def test_split_that_leaves_one_side_empty_is_refused(make_toy, head, problem):
    net = Network(layers, head)
    with pytest.raises(ConfigError, match=rf"method fedper .*model.head = '{head}' {problem}"):
        METHOD.check(net, make_toy().clients, MINI_BATCHES)
