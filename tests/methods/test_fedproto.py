"""FedProto: the algorithm step by step with `torch.optim`, its read-outs, and what it is the same as."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypfl.engine.evaluation import score, tried
from raypfl.engine.messages import take
from raypfl.errors import ConfigError
from raypfl.methods import local
from raypfl.methods.fedproto import Config, Down, FedProto, Hub, Up, closeness
from raypfl.methods.local import Local
from raypfl.methods.start import common_start
from raypfl.models import BatchNorm1d
from raypfl.training import SGD, Network, TrainingConfig

TRAINING = TrainingConfig(epochs=3, batch_size=3, optimizer=SGD(lr=0.2, momentum=0.5))
CLASSES, FEATURES = 3, 4
HEAD = CLASSES * (FEATURES + 1)
NOBODY = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def deep(make_toy):
    """Four clients with a hidden layer; client 1 has no class 0, client 3 nothing but class 0."""
    toy = make_toy(hidden=FEATURES, training=TRAINING, dtype=torch.float64)
    toy.y[toy.indices[1]] = torch.tensor([1, 2, 2, 1])
    toy.y[toy.indices[3]] = 0
    counts = torch.stack([toy.y[own].bincount(minlength=CLASSES) for own in toy.indices])
    toy.clients = toy.clients._replace(label_counts=counts)
    return toy


def features(w, x):
    """Of samples `[n, 4]`, by a row's extractor."""
    return functional.linear(x, w[HEAD : HEAD + 16].view(4, 4), w[HEAD + 16 : HEAD + 20]).relu()


def logits(w, z):
    return functional.linear(z, w[:12].view(3, 4), w[12:HEAD])


def written_out(toy, config, rounds, participants):
    """Rounds of the algorithm box, one client and one sample after the other: models, {class: prototype}."""
    start = common_start(toy.net, 0)[0, toy.net.weights]
    models = [start.clone().requires_grad_() for _ in toy.indices]
    known = {}
    for number in range(1, rounds + 1):
        uploads = []
        for client in participants(number):
            w = models[client]
            optimizer = torch.optim.SGD([w], 0.2, momentum=0.5)
            batches = toy.batches(number, client)
            met = [([], [])]
            seen = 0
            for batch in batches:
                x, y = batch.x[0], batch.y[0]
                z = features(w, x)
                if seen == len(toy.indices[client]):
                    seen = 0
                    met.append(([], []))
                seen += len(y)
                met[-1][0].extend(z.detach())
                met[-1][1].extend(y.tolist())
                apart = sum(
                    (z[at] - known[k]).square().sum() for at, k in enumerate(y.tolist()) if k in known
                )
                loss = functional.cross_entropy(logits(w, z), y) + config.lam * apart / (len(y) * FEATURES)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert len(met) == 3
            own = toy.indices[client]
            if config.proto_pass == "after":
                met = [(list(features(w.detach(), toy.x[own])), toy.y[own].tolist())]
            elif config.proto_pass == "during":
                met = met[-1:]
            z, y = (sum((epoch[part] for epoch in met), []) for part in (0, 1))
            uploads.append(
                {k: torch.stack([a for a, b in zip(z, y, strict=True) if b == k]) for k in sorted(set(y))}
            )
        renewed = {}
        for k in {k for upload in uploads for k in upload}:
            holders = [upload[k] for upload in uploads if k in upload]
            weights = [len(group) if config.proto_weight == "count" else 1 for group in holders]
            total = sum(weight * group.mean(0) for weight, group in zip(weights, holders, strict=True))
            renewed[k] = total / sum(weights)
        known = {**known, **renewed} if config.proto_absent == "carry" else renewed
    return torch.stack(models).detach(), known


def assert_same(toy, done, models, known):
    torch.testing.assert_close(toy.weights(done.state.w), models, rtol=1e-10, atol=1e-12)
    assert done.hub.known[0].tolist() == [k in known for k in range(CLASSES)]
    for k in range(CLASSES):
        expected = known.get(k, torch.zeros(FEATURES, dtype=torch.float64))
        torch.testing.assert_close(done.hub.prototype[0, k], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("proto_weight", ["uniform", "count"])
@pytest.mark.parametrize("proto_pass", ["after", "during", "all_epochs"])
def test_three_rounds_step_by_step(deep, proto_pass, proto_weight):
    config = Config(lam=2.0, proto_pass=proto_pass, proto_weight=proto_weight)
    done = deep.run(FedProto(config), 3)[-1]
    assert_same(deep, done, *written_out(deep, config, 3, lambda number: range(4)))


@pytest.mark.parametrize("proto_absent", ["carry", "drop"])
def test_classes_that_no_participant_has(deep, proto_absent):
    """Everybody, then client 3, which has class 0 alone, then client 1, which has classes 1 and 2."""
    config = Config(lam=2.0, proto_absent=proto_absent)

    def participants(number):
        return [[0, 1, 2, 3], [3], [1]][number - 1]

    history = deep.run(FedProto(config), 3, participants)
    assert_same(deep, history[-1], *written_out(deep, config, 3, participants))
    kept = [done.hub.known[0].tolist() for done in history]
    if proto_absent == "carry":
        assert kept == [[True] * 3] * 3
        assert torch.equal(history[1].hub.prototype[0, 1:], history[0].hub.prototype[0, 1:])
    else:
        assert kept == [[True] * 3, [True, False, False], [False, True, True]]
        assert not history[1].hub.prototype[0, 1:].any()


def test_options_make_a_difference(deep):
    """The step-by-step tests would not see an option that both sides ignore."""
    plain = deep.run(FedProto(Config(lam=2.0)), 3)[-1]
    for options in (
        {"lam": 1.0},
        {"proto_pass": "during"},
        {"proto_pass": "all_epochs"},
        {"proto_weight": "count"},
    ):
        other = deep.run(FedProto(Config(**{"lam": 2.0, **options})), 3)[-1]
        assert (other.hub.prototype - plain.hub.prototype).abs().max() > 1e-4, options
        assert (other.state.w - plain.state.w).abs().max() > 1e-5, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("proto_pass", ["after", "during"])
def test_without_lambda_models_are_separate_bit_for_bit(make_toy, dtype, proto_pass):
    toy = make_toy(hidden=4, dtype=dtype)

    def participants(number):
        return [None, [0, 2, 3], [1, 2], None][number - 1]

    found = toy.run(FedProto(Config(lam=0.0, proto_pass=proto_pass)), 4, participants)
    expected = toy.run(Local(local.Config()), 4, participants)
    for mine, alone in zip(found, expected, strict=True):
        assert torch.equal(mine.state.w, alone.state.w)
    with_lambda = toy.run(FedProto(Config(proto_pass=proto_pass)), 2, participants)
    assert torch.equal(with_lambda[0].state.w, expected[0].state.w), "no prototypes in the first round"
    assert not torch.equal(with_lambda[1].state.w[0], expected[1].state.w[0])


def term_gradient(toy, w, prototype, known):
    """Of the distance term alone, every client on its first batch."""
    gradients = []
    for client in range(len(toy.indices)):
        (batch,) = toy.batches(1, client, epochs=1, batch_size=1000)
        found = []
        for lam in (0.0, 3.0):
            leaf = toy.weights(w[client : client + 1]).clone().requires_grad_()
            m = toy.net.bind(w[client : client + 1], leaf=leaf)
            loss = FedProto(Config(lam=lam)).drawn(m, batch, prototype, known)
            found.append(torch.autograd.grad(loss.sum(), leaf)[0])
        gradients.append((found[1] - found[0]) / 3.0)
    return torch.cat(gradients)


def test_no_gradient_where_features_are_their_prototypes(deep):
    w = deep.rows(0.01)
    w[:, HEAD + 16 : HEAD + 20] = 5.0
    deep.indices = [own[:1] for own in deep.indices[:1]]
    sample = deep.indices[0][0]
    prototype = torch.randn(1, CLASSES, FEATURES, dtype=torch.float64)
    prototype[0, deep.y[sample]] = features(w[0], deep.x[sample])
    everything = torch.ones(1, CLASSES, dtype=torch.bool)
    assert term_gradient(deep, w[:1], prototype, everything).abs().max() < 1e-15
    prototype[0, deep.y[sample]] += 0.1
    assert term_gradient(deep, w[:1], prototype, everything).abs().max() > 1e-3


def test_gradient_is_two_over_batch_and_features(deep):
    """`2 / (n d) sum_l (z_l - c_y)` at the extractor's bias, all units active; unknown ones add 0."""
    w = deep.rows(0.01)
    w[:, HEAD + 16 : HEAD + 20] = 5.0
    prototype = torch.randn(1, CLASSES, FEATURES, generator=torch.Generator().manual_seed(1)).double()
    known = torch.tensor([[True, False, True]])
    found = term_gradient(deep, w, prototype, known)
    for client, own in enumerate(deep.indices):
        apart = features(w[client], deep.x[own]) - prototype[0, deep.y[own]]
        expected = 2 / (len(own) * FEATURES) * apart[deep.y[own] != 1].sum(0)
        torch.testing.assert_close(found[client, HEAD + 16 : HEAD + 20], expected, rtol=1e-9, atol=1e-12)
        assert not found[client, :HEAD].any(), "the head hears nothing of prototypes"


def test_one_clients_prototypes_are_the_global_ones(make_toy):
    toy = make_toy((9,), hidden=4, training=TRAINING, dtype=torch.float64)
    for done in toy.run(FedProto(Config()), 3):
        has = toy.clients.label_counts[0] > 0
        assert torch.equal(done.hub.known[0], has)
        torch.testing.assert_close(done.hub.prototype[0, has], done.up.prototype[0, has], rtol=1e-15, atol=0)


def test_means_are_taken_class_by_class():
    """Clients list their classes in any order and some lack one: means by class, not by place."""
    prototype = torch.arange(12.0).view(3, 4, 1)
    weight = torch.tensor([[2, 0, 1, 0], [0, 3, 1, 0], [1, 1, 0, 0]])
    hub = Hub(torch.full((1, 4, 1), 7.0), torch.tensor([[False, False, False, True]]))
    counted = FedProto(Config(proto_weight="count")).aggregate(None, hub, Up(prototype, weight), None)
    assert counted.prototype[0, :, 0].tolist() == pytest.approx([8 / 3, 6.0, 4.0, 7.0])
    assert counted.known.all()
    plain = FedProto(Config()).aggregate(None, hub, Up(prototype, (weight > 0).long()), None)
    assert plain.prototype[0, :, 0].tolist() == [4.0, 7.0, 4.0, 7.0]


def read_out(toy, method, model, state, down, point="pre", rows=None, up=None):
    """Predictions and losses as an evaluation has them, every client on its own samples."""
    rows = torch.arange(len(toy.indices)) if rows is None else torch.tensor(rows)
    away = torch.tensor([i for i in range(len(toy.indices)) if i not in rows.tolist()], dtype=torch.int64)
    models = tried(method, toy.net, [model], point, away, rows, state, down, up)
    return score(method, toy.cohort(toy.plan()), model, models[model], "test")


def by_hand(toy, w, prototype, candidates):
    """Accuracy and loss of each client by the nearest prototype; by its head if it has none."""
    found = []
    for client, own in enumerate(toy.indices):
        correct, loss = 0, 0.0
        for sample in own:
            z, y = features(w[client], toy.x[sample]), int(toy.y[sample])
            if not candidates[client]:
                answer = logits(w[client], z)
                correct += int(answer.argmax()) == y
                loss += float(functional.cross_entropy(answer[None], toy.y[sample][None]))
                continue
            away = {k: float((z - prototype[0, k]).square().sum()) for k in candidates[client]}
            correct += min(away, key=away.get) == y
            far = 2 * max(away.values()) + 1
            answer = -torch.tensor([away.get(k, far) for k in range(CLASSES)], dtype=torch.float64)
            loss += float(functional.cross_entropy(answer[None], toy.y[sample][None]))
        found.append((correct / len(own), loss / len(own)))
    accuracy, losses = zip(*found, strict=True)
    return list(accuracy), list(losses)


@pytest.mark.parametrize("classes", ["known", "own"])
def test_evaluation_is_by_the_nearest_prototype_client_by_client(deep, classes):
    """Before and after training, with participants and others; each client's figures are its own.

    Clients 0, 1 and 3 take part in the second round; prototypes of the first are of clients 1 and 3.
    """
    method = FedProto(Config(classes=classes))
    ids = [[1, 3], [0, 1, 3]]
    first, second = deep.run(method, 2, lambda number: ids[number - 1])
    present = deep.clients.label_counts > 0

    def candidates(known):
        return [
            [k for k in range(CLASSES) if known[0, k] and (classes == "known" or present[client, k])]
            for client in range(4)
        ]

    down = method.download(deep.net, first.hub, deep.plan(2, ids[1]))
    for point, state, up in (("pre", first.state, None), ("post", second.state, second.up)):
        accuracy, loss, _ = read_out(deep, method, "personalised", state, down, point, ids[1], up)
        expected = by_hand(deep, deep.weights(state.w), first.hub.prototype, candidates(first.hub.known))
        assert accuracy.tolist() == pytest.approx(expected[0])
        assert loss.tolist() == pytest.approx(expected[1])
        accuracy, loss, _ = read_out(deep, method, "alternative", state, down, point, ids[1], up)
        expected = by_hand(deep, deep.weights(state.w), None, [[]] * 4)
        assert accuracy.tolist() == pytest.approx(expected[0])
        assert loss.tolist() == pytest.approx(expected[1])


def test_head_decides_until_there_are_prototypes(deep):
    method = FedProto(Config())
    done = deep.run(method, 1)[0]
    for point, state, up in (
        ("pre", method.init_state(deep.net, deep.clients), None),
        ("post", done.state, done.up),
    ):
        nearest, head = (
            read_out(deep, method, model, state, done.down, point, None, up)
            for model in ("personalised", "alternative")
        )
        assert all((one == other).all() for one, other in zip(nearest, head, strict=True))


def test_head_decides_for_a_client_without_a_class_that_is_known(deep):
    """Client 3 has class 0 alone; the round before had client 1, with the other two."""
    method = FedProto(Config(classes="own"))
    done = deep.run(method, 1, lambda number: [1])[0]
    down = method.download(deep.net, done.hub, deep.plan(2))
    nearest, head = (
        read_out(deep, method, model, done.state, down) for model in ("personalised", "alternative")
    )
    assert nearest[1][3] == head[1][3] and nearest[0][3] == head[0][3]
    assert (nearest[1][:3] != head[1][:3]).all()


def test_translation_changes_no_prediction():
    draw = torch.Generator().manual_seed(0)
    z, c = torch.randn(2, 50, 4, generator=draw).double(), torch.randn(2, 5, 4, generator=draw).double()
    candidate = torch.tensor([[True, False, True, True, False], [True] * 5])
    move = 1e3 * torch.randn(1, 1, 4, generator=draw).double()
    found, moved = closeness(z, c, candidate), closeness(z + move, c + move, candidate)
    assert torch.equal(found.argmax(2), moved.argmax(2))
    torch.testing.assert_close(found, moved, rtol=1e-8, atol=1e-8)


def test_a_class_without_prototype_is_never_chosen_and_loses_a_finite_amount():
    """Also where the one candidate is hit exactly, and where distances dwarf 1."""
    prototype = torch.zeros(1, 3, 2)
    candidate = torch.tensor([[False, True, False]])
    z = torch.tensor([[[0.0, 0.0], [3e4, 4e4], [1e-8, 0.0]]])
    found = closeness(z, prototype, candidate)
    assert found.argmax(2).tolist() == [[1, 1, 1]]
    assert found.isfinite().all()
    assert found[0, 0].tolist() == [-1.0, 0.0, -1.0]


def network(*layers):
    named = [("flatten", nn.Flatten()), *layers, ("head", nn.Linear(FEATURES, CLASSES))]
    return Network(lambda: nn.Sequential(OrderedDict(named)), "head", dtype=torch.float64)


@pytest.mark.parametrize(
    "layers",
    [
        (("fc", nn.Linear(4, 4)), ("drop", nn.Dropout(0.5))),
        (("fc", nn.Linear(4, 4)), ("norm", BatchNorm1d(4))),
    ],
    ids=["dropout", "batch normalisation"],
)
def test_prototypes_are_those_of_the_evaluated_model(deep, layers):
    """After training, in evaluation mode; those met during training are others."""
    deep.net = network(*layers)
    done = deep.run(FedProto(Config()), 1)[0]
    met = deep.run(FedProto(Config(proto_pass="during")), 1)[0]
    torch.testing.assert_close(met.state.w, done.state.w, rtol=1e-12, atol=1e-14)
    for client, own in enumerate(deep.indices):
        with torch.no_grad():
            z = deep.net.bind(done.state.w[client : client + 1]).features(deep.x[own][None])[0]
        for k in set(deep.y[own].tolist()):
            exact = z[deep.y[own] == k].mean(0)
            torch.testing.assert_close(done.up.prototype[client, k], exact, rtol=1e-10, atol=1e-12)
            assert (met.up.prototype[client, k] - exact).abs().max() > 1e-4


def values(messages):
    return [(message.src, message.dst, message.kind, message.values, message.bytes) for message in messages]


def test_messages_are_prototypes_of_classes_that_are_there(deep):
    plain, counted = FedProto(Config()), FedProto(Config(proto_weight="count"))
    done = deep.run(plain, 1, lambda number: [1, 3])[0]
    ids = torch.tensor([1, 3])
    assert values(plain.sent_up(deep.net, ids, done.up)) == [
        (1, -1, "prototype", 8, 64),
        (3, -1, "prototype", 4, 32),
    ]
    done = deep.run(counted, 1, lambda number: [1, 3])[0]
    assert values(counted.sent_up(deep.net, ids, done.up)) == [
        (1, -1, "prototype", 8, 64),
        (1, -1, "weight", 2, 16),
        (3, -1, "prototype", 4, 32),
        (3, -1, "weight", 1, 8),
    ]
    nobody = plain.init_hub(deep.net, deep.clients)
    assert plain.sent_down(deep.net, deep.plan(), Down(*nobody)) == []
    only = deep.run(plain, 1, lambda number: [1])[0].hub
    assert values(plain.sent_down(deep.net, deep.plan(2, [0, 3]), Down(*only))) == [
        (-1, 0, "prototype", 8, 64),
        (-1, 3, "prototype", 8, 64),
    ]


def test_uniform_weights_do_not_tell_counts(deep):
    done = deep.run(FedProto(Config()), 1)[0]
    assert done.up.weight.unique().tolist() == [0, 1]


def test_who_is_away_keeps_its_model_and_reads_it_by_the_newest_prototypes(deep):
    method = FedProto(Config())
    first, second = deep.run(method, 2, lambda number: [[0, 1, 2, 3], [0]][number - 1])
    shared = take(method.download(deep.net, second.hub, deep.plan(3)), NOBODY, method.shared)
    rows = method.absent(deep.net, second.state, shared)
    width = deep.net.width
    assert torch.equal(rows[1:, :width], first.state.w[1:])
    assert torch.equal(rows[:, width : width + 12], second.hub.prototype.flatten(1).expand(4, -1))
    assert not torch.equal(second.hub.prototype, first.hub.prototype)


def test_models_without_features_or_with_a_deep_head_are_refused(make_toy):
    method = FedProto(Config())
    flat = make_toy()
    with pytest.raises(ConfigError, match=r"fedproto needs layers before the head.*covers every layer"):
        method.check(flat.net, flat.clients, TRAINING)
    deep_head = make_toy(hidden=4)
    layers = [
        ("fc", nn.Linear(4, 4)),
        ("head", nn.Linear(4, 4)),
        ("act", nn.ReLU()),
        ("out", nn.Linear(4, 3)),
    ]
    deep_head.net = Network(lambda: nn.Sequential(OrderedDict(layers)), "head")
    with pytest.raises(ConfigError, match="one linear layer"):
        method.check(deep_head.net, deep_head.clients, TRAINING)
    fine = make_toy(hidden=4)
    method.check(fine.net, fine.clients, TRAINING)


def test_defaults_and_what_is_reported():
    assert Config() == Config(
        lam=1.0, proto_pass="after", proto_weight="uniform", proto_absent="carry", classes="known"
    )
    assert FedProto.reported == ("personalised", "pre")
