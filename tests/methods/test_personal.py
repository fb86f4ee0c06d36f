"""Clients' own models of other architectures: who has which, how they are read, who may have them."""

import numpy as np
import pytest
import torch

from raypfl.configuration import load
from raypfl.data import ClientIndices, Federation, Pool
from raypfl.engine.local import LocalEngine
from raypfl.engine.world import make_world
from raypfl.errors import ConfigError
from raypfl.methods import personal
from raypfl.methods.fml import FML
from raypfl.methods.fml import Config as FMLConfig
from raypfl.methods.pfml import PFML, Config
from raypfl.settings import ExperimentConfig, RunConfig
from raypfl.training import SGD, TrainingConfig

OTHERS = [{"name": "mlp", "hidden": [5]}, {"name": "mlp", "hidden": [11]}]


@pytest.fixture
def toy(make_toy):
    """A linear shared model; perceptrons of 5 units at even clients, of 11 units at odd ones."""
    training = TrainingConfig(epochs=1, batch_size=3, optimizer=SGD(lr=0.1))
    toy = make_toy((7, 4, 10, 5, 6), training=training, dtype=torch.float64)
    toy.net.personal = (toy.network(5), toy.network(11))
    return toy


def test_clients_of_an_architecture_begin_alike(toy):
    start = personal.personal_start(toy.net, 0, toy.clients.ids)
    assert start.shape == (5, max(net.width for net in toy.net.personal))
    assert torch.equal(start[0], start[2]) and torch.equal(start[1], start[3])
    narrow, wide = toy.net.personal
    assert (
        not start[0, narrow.weights.stop :].any() and start[1, narrow.weights.stop : wide.weights.stop].any()
    )
    # Whoever asks, with whichever clients beside it.
    assert torch.equal(personal.personal_start(toy.net, 0, torch.tensor([3])), start[3:4])


def test_each_row_is_read_by_its_own_architecture(toy):
    ids = torch.tensor([3, 0, 4, 1])
    rows = personal.personal_start(toy.net, 0, ids) + 0.1 * torch.arange(4)[:, None]
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    found = personal.answer_of_own(toy.net, ids, rows)(x)
    for place, client in enumerate(ids.tolist()):
        own = toy.net.personal[client % 2]
        alone = own.bind(rows[place : place + 1, : own.width])(x[place : place + 1])
        torch.testing.assert_close(found[place : place + 1], alone, rtol=1e-13, atol=1e-14)


def test_chunks_have_one_architecture(toy):
    seen = []

    def work(chunk, rows):
        seen.append(chunk.ids.tolist())
        return (rows,)

    cohort = toy.cohort(toy.plan())
    rows = torch.arange(5.0)[:, None]
    (back,) = cohort.run(work, rows, kinds=personal.kinds_of(toy.net, cohort.ids))
    # Width two; within an architecture the longest sequence first.
    assert seen == [[2, 0], [4], [3, 1]]
    assert torch.equal(back, rows)


@pytest.mark.parametrize("method", [PFML(Config(beta=1.0, local_batches=3)), FML(FMLConfig())])
def test_the_same_architecture_twice_is_one(method, make_toy, monkeypatch):
    """Given the common start, two architectures that are the shared one give what the shared one gives."""
    training = TrainingConfig(epochs=1, batch_size=3, optimizer=SGD(lr=0.1))
    one, twice = (make_toy(training=training, hidden=5, dtype=torch.float64) for _ in range(2))
    expected = one.run(method, 3)
    twice.net.personal = (twice.network(5), twice.network(5))
    draw = twice.net.draw
    for net in twice.net.personal:
        # Of whatever key: the common start.
        monkeypatch.setattr(net, "draw", lambda _: draw(personal.key(0, "init")))
    for done, exact in zip(twice.run(method, 3), expected, strict=True):
        for found, known in zip((*done.hub, *done.state), (*exact.hub, *exact.state), strict=True):
            torch.testing.assert_close(found, known, rtol=1e-11, atol=1e-13)


def test_only_the_shared_model_travels(toy):
    method = PFML(Config(local_batches=2))
    done = toy.run(method, 1)[0]
    plan = toy.plan()
    for messages in (
        method.sent_down(toy.net, plan, done.down),
        method.sent_up(toy.net, plan.ids, done.up),
    ):
        assert [message.values for message in messages] == [toy.net.num_weights] * 5


@pytest.mark.parametrize("aux", ["reset", "anchor"])
def test_starting_at_the_shared_model_needs_its_architecture(aux, toy):
    with pytest.raises(ConfigError, match=f"method.aux = '{aux}'.*personal_model"):
        PFML(Config(aux=aux)).check(toy.net, toy.clients, toy.training)
    PFML(Config()).check(toy.net, toy.clients, toy.training)


def settings(**changes):
    return {
        "rounds": 2,
        "seed": 0,
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 5},
        "model": {"name": "linear"},
        "training": {"steps": 3, "batch_size": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
        "method": {"name": "pfml", "local_batches": 3},
        **changes,
    }


def test_methods_without_such_models_refuse_them():
    with pytest.raises(ValueError, match="personal_model: with method fedavg .* they do with pfml, fml"):
        RunConfig(**settings(personal_model=OTHERS, method={"name": "fedavg"}))
    several = [{"name": "pfml"}, {"name": "pfedme"}]
    with pytest.raises(ValueError, match="with method pfedme"):
        ExperimentConfig(**settings(personal_model=OTHERS, method=several, seed=[0]))


def test_one_model_a_list_or_none_may_be_given():
    one, several, none, absent = (
        RunConfig(**settings(**given)).personal_model
        for given in ({"personal_model": OTHERS[0]}, {"personal_model": OTHERS}, {"personal_model": None}, {})
    )
    assert [own.hidden for own in one] == [(5,)] and [own.hidden for own in several] == [(5,), (11,)]
    assert none == absent == ()
    config = RunConfig(**settings(personal_model=OTHERS))
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "given, told",
    [
        ("{name: mlpp}", r"personal_model\[0\].name = .mlpp.: unknown. Did you mean mlp"),
        (
            "[{name: linear}, {name: mlp, units: [3]}]",
            r"personal_model\[1\]: the model 'mlp' has no option 'units'",
        ),
        ("3", r"personal_model\[0\]"),
    ],
)
def test_a_wrong_model_is_named_with_its_place(given, told):
    with pytest.raises(ConfigError, match=told):
        load(settings(), [f"personal_model={given}"])


def test_models_of_each_architecture_are_evaluated():
    """Both theta and m, each with a loss of its own, of clients that train and of those that never have."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 8)
    x = rng.normal(size=(len(y), 1, 4, 4)).astype(np.float32)
    cut = np.array_split(rng.permutation(len(y)), 5)
    clients = tuple(ClientIndices(rows[:3], rows[:0], rows[3:]) for rows in cut)
    config = RunConfig(**settings(personal_model=OTHERS, participation={"count": 3}))
    pool = Pool("toy", x, y, len(y), 3, None, "toy")
    engine = LocalEngine(make_world(config, pool, Federation(clients)), pool)
    assert [net.num_weights for net in engine.hub.net.personal] == [5 * 17 + 3 * 6, 11 * 17 + 3 * 12]
    report = engine.round(1, evaluate_pre=True, evaluate_post=True)
    engine.close()
    kinds = {(block["model"], block["point"]) for block in report.clients if block["split"] == "test"}
    assert kinds == {(m, p) for m in ("personalised", "alternative") for p in ("pre", "post")} | {
        ("global", "pre")
    }
    assert all(np.isfinite(block["loss"]).all() for block in report.clients if block["split"] == "test")
