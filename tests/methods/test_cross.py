"""What methods have in common: limits in which one is another, server maps, and bytes."""

import pytest
import torch

from raypfl.methods import diversifed, fedamp, fedavg, local, one_lambda
from raypfl.methods.diversifed import DiversiFed
from raypfl.methods.fedamp import FedAMP
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.local import Local
from raypfl.methods.one_lambda import OneLambda
from raypfl.methods.published import Hub
from raypfl.models import MLP, LeNet5, ResNet8, build
from raypfl.training import Fit, Network

SEPARATE = Local(local.Config())

WITHOUT_LAMBDA = {
    "diversifed_net": DiversiFed(diversifed.Config(lam=0)),
    "diversifed_balanced": DiversiFed(diversifed.Config(lam=0, form="balanced", eta=3)),
    "diversifed_joint": DiversiFed(
        diversifed.Config(lam=0, coupling="joint", distance="squared", reduction="sum")
    ),
    "fedamp_exact": FedAMP(fedamp.Config(lam=0)),
    "fedamp_heuristic": FedAMP(fedamp.Config(lam=0, attention="heuristic")),
    "one_lambda": OneLambda(one_lambda.Config(lam=0)),
    "one_lambda_squared": OneLambda(one_lambda.Config(lam=0, distance="squared")),
}

ANCHORED = {
    "diversifed_net": DiversiFed(diversifed.Config()),
    "diversifed_balanced": DiversiFed(diversifed.Config(form="balanced", tau=1)),
    "diversifed_joint": DiversiFed(diversifed.Config(coupling="joint", tau=0.8)),
    "diversifed_squared": DiversiFed(diversifed.Config(distance="squared", tau=0.1)),
    "diversifed_sum": DiversiFed(diversifed.Config(reduction="sum")),
    "diversifed_capped": DiversiFed(diversifed.Config(distance_scale="median", max_pull=0.5)),
    "fedamp_exact": FedAMP(fedamp.Config(alpha=2, sigma=20)),
    "fedamp_capped": FedAMP(fedamp.Config(alpha=50, sigma=20, max_pull=1)),
    "fedamp_heuristic": FedAMP(fedamp.Config(attention="heuristic", alpha=1)),
}

ALL = {
    "local": SEPARATE,
    "fedavg": FedAvg(fedavg.Config()),
    "one_lambda": OneLambda(one_lambda.Config(lam=0.1)),
    **ANCHORED,
}


def each(methods):
    return pytest.mark.parametrize("method", methods.values(), ids=methods.keys())


@each(WITHOUT_LAMBDA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_lambda_is_separate_bit_for_bit(method, dtype, make_toy):
    """T13, with Adam, uneven mini-batches and changing participants: no anchor overwrites a model."""
    toy = make_toy(dtype=dtype)

    def participants(round):
        return [None, [0, 2, 3], [1, 2], None][round - 1]

    found, expected = toy.run(method, 4, participants), toy.run(SEPARATE, 4, participants)
    for with_server, alone in zip(found, expected, strict=True):
        assert torch.equal(with_server.state.w, alone.state.w)
    assert not torch.equal(expected[-1].state.w[0], expected[-1].state.w[1])


@pytest.mark.parametrize("method", [ALL["fedavg"], ALL["one_lambda"]], ids=["fedavg", "one_lambda"])
def test_one_client_alone_is_separate_bit_for_bit(method, make_toy):
    toy = make_toy((7,))
    for found, alone in zip(toy.run(method, 3), toy.run(SEPARATE, 3), strict=True):
        rows = method.personalised(toy.net, found.state, found.down, found.up)
        assert torch.equal(toy.weights(rows), toy.weights(alone.state.w))
    if isinstance(method, FedAvg):
        assert torch.equal(found.hub.w, toy.weights(alone.state.w))


@each(ANCHORED)
@pytest.mark.parametrize("participants", [[0], [2]])
def test_one_participant_is_anchored_at_its_own_upload(method, participants, make_toy):
    toy = make_toy()
    w = toy.weights(toy.rows())
    down = method.download(toy.net, Hub(w), toy.plan(3, participants))
    assert torch.equal(down.anchor, w[participants])


@each({name: method for name, method in ALL.items() if name != "fedavg"})
def test_who_does_not_take_part_stays(method, make_toy):
    toy = make_toy()
    history = toy.run(method, 2, lambda round: [None, [2]][round - 1])
    before, after = (done.state.w for done in history)
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert not torch.equal(before[2], after[2])


def test_separate_does_not_see_other_clients(make_toy):
    """Neither their presence nor their order of training."""
    toy = make_toy(dtype=torch.float64)
    together, some = (toy.run(SEPARATE, 2, lambda round, ids=ids: ids)[-1].state.w for ids in (None, [1, 3]))
    torch.testing.assert_close(together[[1, 3]], some[[1, 3]], rtol=1e-12, atol=1e-14)


@each(ALL)
def test_relabelling_clients_relabels_results(method, make_toy, toy):
    """Full batches, so that shuffles, which follow the label, do not matter."""
    order = [2, 0, 3, 1]
    other = make_toy(training=toy.training, dtype=torch.float64)
    other.indices = [toy.indices[at] for at in order]
    other.clients = toy.clients.take(torch.tensor(order))._replace(ids=torch.arange(4))
    first, second = toy.run(method, 3)[-1], other.run(method, 3)[-1]
    trained = [
        method.personalised(toy.net, done.state, done.down, done.up or None) for done in (first, second)
    ]
    torch.testing.assert_close(trained[0][order], trained[1], rtol=1e-8, atol=1e-10)
    if isinstance(method, FedAvg):
        torch.testing.assert_close(first.hub.w, second.hub.w, rtol=1e-10, atol=1e-12)


@each(ANCHORED)
class TestServerMaps:
    def test_identical_models_stay_bit_for_bit(self, method, make_toy):
        toy = make_toy()
        w = toy.weights(toy.rows())[:1].expand(4, -1)
        assert torch.equal(method.download(toy.net, Hub(w), toy.plan(2)).anchor, w)

    def test_rows_sum_to_one(self, method, make_toy):
        """One column of ones beside the models comes back as ones."""
        toy = make_toy(dtype=torch.float64)
        w = toy.weights(toy.rows(3.0)).clone()
        w[:, 0] = 1.0
        anchor = method.download(toy.net, Hub(w), toy.plan(2)).anchor
        torch.testing.assert_close(anchor[:, 0], w[:, 0], rtol=0, atol=1e-14)
        assert (anchor - w).norm() > 1e-4

    def test_a_constant_vector_is_passed_on(self, method, make_toy, request):
        toy = make_toy(dtype=torch.float64)
        w = toy.weights(toy.rows())
        constant = torch.arange(15, dtype=torch.float64)
        first, second = (
            method.download(toy.net, Hub(rows), toy.plan(2)).anchor for rows in (w, w + constant)
        )
        if "heuristic" in request.node.callspec.id:
            assert (second - first - constant).norm() > 0.1, "cosines depend on the origin"
        else:
            torch.testing.assert_close(second, first + constant, rtol=0, atol=1e-11)

    def test_order_of_participants_does_not_matter(self, method, make_toy):
        toy = make_toy(dtype=torch.float64)
        hub = Hub(toy.weights(toy.rows()))
        ascending, other = (
            method.download(toy.net, hub, toy.plan(2, ids)).anchor for ids in ([0, 1, 3], [3, 0, 1])
        )
        torch.testing.assert_close(other, ascending[[2, 0, 1]], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "method, kept",
    [
        (ANCHORED[name], name in ("diversifed_joint", "fedamp_exact"))
        for name in ("diversifed_net", "diversifed_joint", "fedamp_exact")
    ],
    ids=["own", "joint", "fedamp"],
)
def test_mean_model_is_kept_by_symmetric_weights(method, kept, make_toy):
    toy = make_toy(dtype=torch.float64)
    w = toy.weights(toy.rows())
    drift = (method.download(toy.net, Hub(w), toy.plan(2)).anchor - w).mean(0).norm()
    assert bool(drift < 1e-13) == kept


class Untrained:
    """Stands in for a cohort where only messages matter."""

    def __init__(self, net, round=1):
        self.net, self.round = net, round

    def fit(self, w, *arguments, **options):
        return Fit(w, None, None)


NETWORKS = {
    "mlp": (MLP(), (1, 28, 28), 10, 203_560),
    "lenet5": (LeNet5(), (3, 32, 32), 10, 248_024),
    "lenet5_9": (LeNet5(), (3, 28, 28), 9, 247_684),
    "resnet8": (ResNet8(), (3, 32, 32), 100, 5_033_616),
}


def network(name, buffers="local"):
    config, shape, classes, _ = NETWORKS[name]
    return Network(
        lambda: build(config, shape, classes).module, build(config, shape, classes).head, buffers=buffers
    )


def traffic(method, net, toy, participants):
    """Bytes down and up of each participant in the first round."""
    plan = toy.plan(1, participants)
    down = method.download(net, method.init_hub(net, toy.clients), plan)
    state = method.init_state(net, toy.clients.take(plan.ids))
    _, up = method.local_update(Untrained(net), state, down)
    totals = {client: [0, 0] for client in participants}
    for message in method.sent_down(net, plan, down):
        totals[message.dst][0] += message.bytes
    for message in method.sent_up(net, plan.ids, up):
        totals[message.src][1] += message.bytes
    return list(totals.values())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "method, models_down, models_up",
    [
        (ALL["local"], 0, 0),
        (ALL["fedavg"], 1, 1),
        (ALL["fedamp_exact"], 1, 1),
        (ALL["diversifed_net"], 1, 1),
        (ALL["one_lambda"], 2, 1),
    ],
    ids=["local", "fedavg", "fedamp", "diversifed", "one_lambda"],
)
def test_bytes_of_a_round(name, method, models_down, models_up, make_toy):
    """4P a model: three participants of four, nobody pays for the padding of rows."""
    one_model = NETWORKS[name][-1]
    found = traffic(method, network(name), make_toy(), [0, 1, 3])
    assert found == [[models_down * one_model, models_up * one_model]] * 3


@pytest.mark.parametrize(
    "method, statistics",
    [(ALL["fedavg"], 4 * 2_688), (ALL["diversifed_net"], 0)],
    ids=["fedavg", "diversifed"],
)
def test_running_statistics_travel_with_a_global_model_only(method, statistics, make_toy):
    """ResNet-8 has 2,688 of them; where models are personal they stay at home, whatever the policy."""
    one_model = 5_033_616 + statistics
    assert traffic(method, network("resnet8", "average"), make_toy(), [0, 1]) == [[one_model, one_model]] * 2
