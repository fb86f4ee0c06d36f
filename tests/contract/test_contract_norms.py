"""Methods that leave parameters of normalisation layers at home (`model.buffers: fedbn`)."""

import pytest
import torch
from method_table import TABLE
from torch import nn

from raypfl.engine.messages import take
from raypfl.errors import ConfigError, ShapeError
from raypfl.methods import METHODS
from raypfl.testing.harness import SIZES, WITH_OWN_NORMS, Net, Simulation, conv, mlp, toy, world
from raypfl.training import Network

N = len(SIZES)
ABLE = [row for row in TABLE if METHODS[row.options.name].norms_at_home]
UNABLE = [row for row in TABLE if not METHODS[row.options.name].norms_at_home]

each_able = pytest.mark.parametrize("row", ABLE, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def federation():
    return toy()


def test_scales_and_shifts_lie_beside_the_statistics():
    """Head, convolution, then 2 scales, 2 shifts, 2 means and 2 variances that stay."""
    net, average = WITH_OWN_NORMS.float64(), Net(conv).float64()
    assert net.shared == net.shared_weights == slice(0, average.num_weights - 4)
    assert net.private == net.kept == slice(average.num_weights - 4, average.num_weights + 4)
    assert net.body == slice(average.body.start, average.num_weights - 4)
    assert (net.weights, net.extractor, net.statistics) == (
        average.weights,
        average.extractor,
        average.statistics,
    )
    assert net.travelling.start == net.travelling.stop
    start = net.draw(5)[0]
    assert start[net.private].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert sorted(start.tolist()) == sorted(average.draw(5)[0].tolist())


def test_same_answers_whatever_the_order_of_columns():
    x = torch.randn(1, 3, 1, 4, 4, dtype=torch.float64)
    nets = WITH_OWN_NORMS.float64(), Net(conv).float64()
    one, other = (net.bind(net.draw(5))(x) for net in nets)
    assert torch.equal(one, other)


@each_able
def test_one_client_at_a_time_equals_all_at_once(row, federation):
    together, alone = (
        Simulation(row, WITH_OWN_NORMS.float64(), federation, together=whole).run(3)
        for whole in (True, False)
    )
    for one, other in zip((*together.state, *together.hub), (*alone.state, *alone.hub), strict=True):
        torch.testing.assert_close(one, other, rtol=row.tolerance, atol=row.tolerance)


@each_able
def test_what_stays_is_known_to_its_client_alone(row, federation):
    """Everyone starts from one model, so after a round only shared columns could have told of others."""
    net = WITH_OWN_NORMS.float64()
    one, other = (
        Simulation(row, net, data).run(1).models()[:, net.private]
        for data in (federation, federation.with_other_data(0))
    )
    assert (one != other).any(1).tolist() == [client == 0 for client in range(N)]
    assert len(one.unique(dim=0)) == N


@each_able
def test_a_received_model_keeps_its_clients_layers(row, federation):
    run = Simulation(row, WITH_OWN_NORMS.float64(), federation)
    run.run(2)
    before = run.models()[:, run.net.private]
    plan, down, _ = run.round()
    # States have moved on; what clients held when they received is what `before` has.
    ids = torch.arange(N)
    rested = Simulation(row, WITH_OWN_NORMS.float64(), federation).run(2)
    received = rested.method.personalised(rested.net, take(rested.state, ids), down)
    assert torch.equal(received[:, run.net.private], before)
    assert torch.equal(plan.ids, ids)


@each_able
def test_nothing_changes_without_such_layers(row, federation):
    one, other = (
        Simulation(row, Net(mlp, buffers).float64(), federation).run(2) for buffers in ("fedbn", "average")
    )
    assert torch.equal(one.models(), other.models())


@pytest.mark.parametrize("row", UNABLE, ids=lambda row: row.name)
def test_methods_that_send_whole_models_say_so(row, federation):
    with pytest.raises(ConfigError, match="model.buffers = fedbn: method"):
        world(row, federation, WITH_OWN_NORMS)


def test_normalisation_in_the_head_is_refused():
    def build():
        return nn.Sequential(nn.Flatten(), nn.GroupNorm(2, 16), nn.Linear(16, 3))

    with pytest.raises(ShapeError, match="in the head, which begins at '1'"):
        Network(build, "1", buffers="fedbn")
