"""Local training of K clients against plain PyTorch loops, and what hooks, passes and errors see."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_torch import HEADS, SIZES, Nested, conv, draws, mlp, network, to_module, train
from torch import Tensor, nn

from raypfl.errors import ClientError, ShapeError
from raypfl.training import (
    SGD,
    Adam,
    AdamW,
    Batch,
    ClientData,
    Cohort,
    Network,
    Rows,
    Samples,
    TrainingConfig,
    cross_entropy,
    cross_entropy_per_sample,
)
from raypfl.training import cohort as cohort_module

K = len(SIZES)
LR = 0.1

OPTIMIZERS = {
    "sgd": (SGD(lr=LR), lambda p: torch.optim.SGD(p, LR)),
    "momentum": (
        SGD(lr=LR, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        SGD(lr=LR, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, nesterov=True),
    ),
    "adam": (Adam(lr=LR, weight_decay=0.01), lambda p: torch.optim.Adam(p, LR, weight_decay=0.01)),
    "adamw": (AdamW(lr=LR), lambda p: torch.optim.AdamW(p, LR)),
}
each_optimizer = pytest.mark.parametrize("ours, theirs", OPTIMIZERS.values(), ids=OPTIMIZERS)


def plain_norm(build):
    """The same module with torch's own batch normalisation."""
    return conv(nn.BatchNorm2d) if build is conv else build()


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [1, 3, K])
@pytest.mark.parametrize("build", HEADS)
@each_optimizer
def test_fit_equals_a_plain_loop(cohort, data, build, ours, theirs, width):
    """Uneven clients, one with one sample; with batch normalisation, clients are grouped by batch length."""
    net = network(build)
    w = draws(net)
    fitted = cohort(net, optimizer=ours, width=width).fit(w, cross_entropy)
    training = TrainingConfig(epochs=2, batch_size=3)
    for client in range(K):
        module = plain_norm(build)
        expected = train(w[client], module, HEADS[build], theirs, data=data, client=client, training=training)
        close(fitted.w[client], expected)
    # Batches of 3: 5, 1, 7 and 4 samples make 2, 1, 3 and 2 steps an epoch.
    assert fitted.moments.steps.tolist() == [4, 2, 6, 4]


@pytest.mark.parametrize("width", [1, K])
def test_steps_in_place_of_epochs(cohort, width):
    """Seven steps for every client, the first of as many epochs as they take."""
    net = network(mlp)
    w = draws(net)
    fitted = cohort(net, steps=7, width=width).fit(w, cross_entropy)
    assert fitted.moments.steps.tolist() == [7] * K
    # Client 2 has three batches an epoch: its first six steps are two epochs.
    two, six = (
        cohort(net, width=width, ids=[2], **amount).fit(w[2:3], cross_entropy).w
        for amount in ({"epochs": 2}, {"steps": 6})
    )
    close(two, six)
    assert not torch.equal(fitted.w[2:3], six)
    # A method that asks for passes gets passes.
    assert cohort(net, steps=7).fit(w, cross_entropy, epochs=1).moments.steps.tolist() == [2, 1, 3, 2]


@pytest.mark.parametrize("width", [1, 2, K])
def test_streams_go_on_from_round_to_round(cohort, data, width):
    """What a client meets depends on its own position, not on the round or on who is beside it."""
    net = network(mlp)
    met = {}

    def work(name):
        def collect(chunk, first):
            for batch in chunk.batches(steps=2, first=first):
                for row, client in enumerate(chunk.ids.tolist()):
                    size = int(batch.sizes[row])
                    met.setdefault((name, client), []).append(batch.x[row, :size])
            return (first,)

        return collect

    zeros = torch.zeros(K, dtype=torch.int64)
    cohort(net, width=width, round=1).run(work("first"), zeros)
    cohort(net, width=width, round=2).run(work("second"), zeros + 2)
    cohort(net, width=width, round=9).run(work("again"), torch.arange(K) % 2 * 2)
    for client in range(K):
        same = met["second" if client % 2 else "first", client]
        assert all(torch.equal(*pair) for pair in zip(met["again", client], same, strict=True))
    # Client 2 has seven samples: two batches of three, and in the next round the one that is left.
    first = torch.cat(met["first", 2])
    assert len(first) == 6 and len(first.unique(dim=0)) == 6
    pool = data.pool.x[torch.tensor(data.train[2])]
    last = met["second", 2][0]
    assert len(last) == 1 and len(torch.cat([first, last]).unique(dim=0)) == len(pool) == 7


@pytest.mark.parametrize("build", [mlp, conv, Nested])
@pytest.mark.parametrize("piece", ["head", "extractor"])
def test_training_one_piece_equals_a_plain_loop_over_its_parameters(cohort, data, build, piece):
    net, head = network(build), HEADS[build]
    w = draws(net)
    seen = []
    fitted = cohort(net, optimizer=OPTIMIZERS["adam"][0]).fit(
        w, cross_entropy, columns=getattr(net, piece), on_gradient=lambda g, batch: seen.append(g.shape[1])
    )
    for client in range(K):
        expected = train(
            w[client],
            plain_norm(build),
            head,
            OPTIMIZERS["adam"][1],
            data=data,
            client=client,
            training=TrainingConfig(epochs=2, batch_size=3),
            trained=lambda name: name.startswith(head) == (piece == "head"),
        )
        close(fitted.w[client], expected)
    other = net.extractor if piece == "head" else net.head
    assert torch.equal(fitted.w[:, other], w[:, other])
    columns = getattr(net, piece)
    assert set(seen) == {columns.stop - columns.start}


@pytest.mark.parametrize("ids, width", [(range(K), 1), (range(K), K), ([2], 1)], ids=["each", "all", "one"])
def test_what_is_passed_in_is_not_written(cohort, ids, width):
    net, momentum = network(conv), SGD(lr=LR, momentum=0.9)
    w = draws(net, len(ids))
    moments = momentum.moments(w[:, net.weights])
    kept = [tensor.clone() for tensor in (w, *moments)]
    cohort(net, ids=ids, optimizer=momentum, width=width).fit(w, cross_entropy, moments=moments)
    assert all(map(torch.equal, (w, *moments), kept))


@pytest.mark.parametrize("width", [1, K])
@each_optimizer
def test_pull_is_the_gradient_of_the_proximal_term(cohort, data, ours, theirs, width):
    net, rho = network(mlp), 0.7
    w = draws(net)
    anchor = w.flip(0)

    def proximal(m, batch, anchor):
        return cross_entropy(m, batch) + rho / 2 * (m.w - anchor).square().sum(1)

    own = anchor[:, net.weights]
    clients = cohort(net, width=width, optimizer=ours)
    pulled = clients.fit(w, cross_entropy, pull=(rho, own)).w
    close(pulled, clients.fit(w, proximal, own).w)
    # Where somebody looks at the gradient it has the pull in it.
    looked_at = []
    close(
        pulled, clients.fit(w, cross_entropy, pull=(rho, own), on_gradient=lambda *a: looked_at.append(a)).w
    )
    assert looked_at
    for client in range(K):
        expected = train(
            w[client],
            mlp(),
            "head",
            theirs,
            data=data,
            client=client,
            training=TrainingConfig(epochs=2, batch_size=3),
            pull=(rho, anchor[client]),
        )
        close(pulled[client], expected)
    shared = clients.fit(w, cross_entropy, pull=(rho, own[:1])).w
    close(shared, clients.fit(w, cross_entropy, pull=(rho, own[:1].repeat(K, 1))).w)


def test_reported_losses_leave_the_pull_out(cohort):
    net = network(mlp)
    w = draws(net)
    free, pulled = cohort(net, epochs=1, batch_size=100), cohort(net, epochs=1, batch_size=100)
    free.fit(w, cross_entropy)
    pulled.fit(w, cross_entropy, pull=(5.0, w[:, net.weights] + 1))
    close(pulled.losses, free.losses)


def test_losses_are_means_over_samples(cohort, data):
    net = network(mlp)
    w = draws(net)
    clients = cohort(net, optimizer=SGD(lr=1e-12))
    assert clients.losses is None
    clients.fit(w, cross_entropy)
    for client, own in enumerate(data.train):
        rows = torch.from_numpy(own)
        logits = to_module(w[client], mlp(), "head")(data.pool.x[rows])
        close(clients.losses[client], F.cross_entropy(logits, data.pool.y[rows]).detach(), 1e-9)


@each_optimizer
def test_moments_kept_over_two_fits_equal_one_long_run(cohort, ours, theirs):
    # With all samples in one batch, shuffles do not matter.
    net = network(mlp)
    w = draws(net)
    clients = cohort(net, batch_size=100, optimizer=ours)
    long = clients.fit(w, cross_entropy, epochs=5)
    half = clients.fit(w, cross_entropy, epochs=2)
    close(clients.fit(half.w, cross_entropy, epochs=3, moments=half.moments).w, long.w)
    if long.moments.first.numel():
        forgetful = clients.fit(half.w, cross_entropy, epochs=3).w
        assert (forgetful - long.w).abs().max() > 1e-3


def with_own(m: Rows, batch: Batch, own: Tensor) -> Tensor:
    """`cross_entropy` of clients that bring a row of their own for the hooks."""
    return cross_entropy(m, batch)


@pytest.mark.parametrize("build", [mlp, conv])
@each_optimizer
def test_client_that_is_done_stands_still_bit_for_bit(cohort, build, ours, theirs):
    """Others have up to four steps more; a zero gradient would let momentum move it."""
    net = network(build)
    last: dict[int, Tensor] = {}

    def remember(w, batch, clients):
        last.update(zip(clients.tolist(), w.clone(), strict=True))

    fitted = cohort(net, optimizer=ours).fit(draws(net), with_own, torch.arange(K), after_step=remember)
    for client in range(K):
        assert torch.equal(fitted.w[client, net.weights], last[client])


def test_moments_of_a_client_that_is_done_stand_still_bit_for_bit(cohort):
    net = network(mlp)
    gradients = {}

    def remember(g, batch):
        if len(g) == K:
            # All four clients are at work in the first step alone; the last row has no other.
            gradients.setdefault("first", g[-1].clone())

    momentum = SGD(lr=LR, momentum=0.9)
    w = draws(net)
    fitted = cohort(net, epochs=1, optimizer=momentum).fit(w, cross_entropy, on_gradient=remember)
    one_sample = SIZES.index(1)
    assert torch.equal(fitted.moments.first[one_sample], gradients["first"])
    moved = torch.sub(w[one_sample, net.weights], gradients["first"], alpha=LR)
    assert torch.equal(fitted.w[one_sample, net.weights], moved)
    assert fitted.moments.steps.tolist() == [2, 1, 3, 2]


@pytest.mark.parametrize("width", [1, 2, K])
@pytest.mark.parametrize("build", [mlp, conv])
def test_hooks_see_and_change_their_own_rows(cohort, build, width):
    """Each client's gradient is scaled, and its first weight pinned, by a number of its own."""
    net = network(build)
    w, clients = draws(net), cohort(net, width=width)
    numbers = torch.arange(1.0, K + 1, dtype=torch.float64)[:, None]

    def scale(g, batch, own):
        assert len(g) == len(batch.x)
        g.mul_(own)

    def pin(w, batch, own):
        w[:, :1] = own

    scaled = clients.fit(w, lambda m, batch, own: cross_entropy(m, batch) * own[:, 0], numbers).w
    close(clients.fit(w, with_own, numbers, on_gradient=scale).w, scaled)
    assert torch.equal(clients.fit(w, with_own, numbers, after_step=pin).w[:, :1], numbers)


@pytest.mark.parametrize("width", [1, 2, K])
@pytest.mark.parametrize("build", [mlp, conv])
def test_what_is_measured_of_gradients_is_summed_over_a_clients_own_steps(cohort, build, width):
    """Steps are counted, and gradients seen before a hook changes them."""
    net = network(build)
    w, clients = draws(net), cohort(net, width=width)

    def wipe(g, batch):
        g.zero_()

    def norm(g, batch):
        assert len(g) == len(batch.x)
        return g.norm(dim=1)

    counted = clients.fit(w, cross_entropy, measure=lambda g, batch: torch.ones(len(g)))
    assert counted.measured.tolist() == counted.moments.steps.tolist() == [4, 2, 6, 4]
    assert counted.measured.dtype == torch.float64
    found = clients.fit(w, cross_entropy, measure=norm, on_gradient=wipe)
    alone = torch.zeros(K, dtype=torch.float64)

    def add(g, batch):
        alone[clients_at_work[0]] += g[0].norm()
        g.zero_()

    for client in range(K):
        clients_at_work = [client]
        cohort(net, ids=[client]).fit(w[client : client + 1], cross_entropy, on_gradient=add)
    close(found.measured, alone)
    assert not clients.fit(w, cross_entropy).measured.any()


@pytest.mark.parametrize("width", [1, 3, K])
def test_extra_rows_reach_the_objective_as_own_or_shared(cohort, width):
    """The objective's only minimum is the client's own target plus a shared one."""
    net = network(mlp)
    own = torch.arange(1.0, K + 1, dtype=torch.float64)[:, None]
    shared = torch.full((1, 1), 100.0, dtype=torch.float64)

    def objective(m, batch, own, shared):
        return (m.w - own - shared).square().sum(1) / 2

    fitted = cohort(net, width=width, epochs=1, optimizer=SGD(lr=1.0)).fit(draws(net), objective, own, shared)
    close(fitted.w[:, net.weights], (own + 100.0).expand(-1, net.num_weights))


def test_gradient_of_a_client_moves_that_client_alone(cohort):
    net = network(mlp)
    w = draws(net)
    only_second = torch.tensor([[0.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    fitted = cohort(net).fit(w, lambda m, batch, on: cross_entropy(m, batch) * on[:, 0], only_second).w
    assert [torch.equal(before, after) for before, after in zip(w, fitted, strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_learning_rate_decays_over_rounds(cohort):
    net = network(mlp)
    w = draws(net)

    def moved(round, lr_decay):
        clients = cohort(net, round=round, epochs=1, batch_size=100, lr_decay=lr_decay)
        return clients.fit(w, cross_entropy).w - w

    close(moved(1, 0.5), moved(1, 1.0))
    close(moved(3, 0.5), moved(1, 1.0) / 4)


def test_learning_rate_may_fall_every_few_rounds():
    training = TrainingConfig(lr_decay=0.5, lr_every=3)
    assert [training.decay(round) for round in range(1, 8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_shuffles_depend_on_round_and_purpose(cohort):
    net = network(mlp)
    w = draws(net)
    results = [
        cohort(net, round=round).fit(w, cross_entropy, purpose=purpose).w
        for round, purpose in [(1, "batches"), (1, "batches"), (2, "batches"), (1, "inner")]
    ]
    assert [torch.equal(results[0], other) for other in results] == [True, True, False, False]


@pytest.mark.parametrize("width", [1, 2, K])
def test_run_returns_rows_in_the_order_of_the_cohort(cohort, width):
    clients = cohort(network(mlp), ids=(2, 0, 3, 1), width=width)
    marks = torch.tensor([20.0, 0.0, 30.0, 10.0])
    shared = torch.tensor([[7.0]])
    chunks = []

    def work(chunk, marks, shared):
        chunks.append(len(chunk))
        assert [10.0 * client for client in chunk.ids.tolist()] == marks.tolist()
        assert chunk.sizes.tolist() == [SIZES[client] for client in chunk.ids.tolist()]
        return marks + shared[0], chunk.sizes

    out, sizes = clients.run(work, marks, shared)
    assert out.tolist() == [27.0, 7.0, 37.0, 17.0]
    assert sizes.tolist() == [7, 5, 4, 1]
    assert sum(chunks) == K and max(chunks) == width


def test_sizes_and_label_counts(cohort, data):
    clients = cohort(network(mlp))
    assert clients.sizes.tolist() == list(SIZES)
    labels = [[data.pool.y[row].item() for row in own] for own in data.train]
    assert clients.label_counts.tolist() == [[own.count(label) for label in range(3)] for own in labels]


@pytest.mark.parametrize("build", [mlp, conv])
@pytest.mark.parametrize("width", [1, K])
@pytest.mark.parametrize("pass_batch", [2, 1000])
def test_pass_over_sums_one_pass_in_evaluation_mode(cohort, data, build, width, pass_batch, monkeypatch):
    monkeypatch.setattr(cohort_module, "PASS_BATCH", pass_batch)
    net = network(build)
    w = draws(net)
    kept = w.clone()

    def outcome(m, batch):
        per_sample = cross_entropy_per_sample(m(batch.x), batch.y)
        return torch.stack([batch.sum(per_sample), batch.sizes], 1)

    sums = cohort(net, width=width).pass_over(w, outcome)
    assert sums[:, 1].tolist() == list(SIZES)
    for client, own in enumerate(data.train):
        rows = torch.from_numpy(own)
        logits = to_module(w[client], plain_norm(build), "head").eval()(data.pool.x[rows])
        close(sums[client, 0], F.cross_entropy(logits, data.pool.y[rows], reduction="sum").detach())
    assert torch.equal(w, kept)


@pytest.mark.parametrize("width", [1, K])
def test_pass_over_a_split_counts_zero_where_there_are_no_samples(cohort, width):
    net = network(conv)
    clients = cohort(net, width=width)

    def samples(m, batch):
        return batch.sum(m(batch.x).square().sum(2)) * 0 + batch.sizes

    assert clients.pass_over(draws(net), samples, split="validation").tolist() == [2.0, 0.0, 1.0, 0.0]
    assert clients.pass_over(draws(net), samples, split="test").tolist() == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("width", [1, K])
def test_each_gives_every_model_in_evaluation_mode(cohort, data, width):
    net = network(conv)
    w = draws(net)
    x = data.pool.x[:2]
    features = cohort(net, width=width).each(w, lambda m: m.features(x.expand(len(m.w), *x.shape)))
    for client in range(K):
        close(features[client], to_module(w[client], conv(), "head").eval()[:-1](x).detach())


def test_failure_names_clients_and_round_with_one_traceback(cohort):
    net = network(mlp)

    def objective(m, batch):
        if batch.sizes.max() == 1:
            raise ZeroDivisionError("the client with one sample")
        return cross_entropy(m, batch)

    with pytest.raises(ClientError, match=r"client\(s\) \[1\], round 4") as caught:
        cohort(net, round=4, width=1, epochs=1, batch_size=100).fit(draws(net), objective)
    text = str(caught.value)
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("ZeroDivisionError: the client with one sample") == 1
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_errors_for_the_user_pass_as_they_are(cohort):
    def objective(m, batch):
        raise ClientError("said already")

    with pytest.raises(ClientError, match="^said already$"):
        cohort(network(mlp)).fit(draws(network(mlp)), objective)


def with_dropout() -> nn.Module:
    layers = [
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(16, 8)),
        ("drop", nn.Dropout(0.5)),
        ("head", nn.Linear(8, 3)),
    ]
    return nn.Sequential(OrderedDict(layers))


@pytest.mark.parametrize("width", [1, K])
def test_dropout_is_seeded_by_its_key(cohort, width):
    net = Network(with_dropout, "head", dtype=torch.float64)
    w = net.draw(0).repeat(K, 1)

    def fitted(round):
        return cohort(net, round=round, batch_size=100, width=width).fit(w, cross_entropy).w

    state = torch.get_rng_state()
    first = fitted(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(fitted(1), first)
    assert not torch.equal(fitted(2), first)


def test_dropout_draws_differ_between_clients(cohort):
    net = Network(with_dropout, "head", dtype=torch.float64)
    x = torch.ones(K, 3, 1, 4, 4, dtype=torch.float64)
    out = []

    def objective(m, batch):
        out.append(m.features(x[: len(batch.x)]).detach())
        return cross_entropy(m, batch)

    cohort(net, epochs=1, batch_size=100).fit(net.draw(0).repeat(K, 1), objective)
    dropped = out[0] == 0
    assert dropped.any()
    assert not (dropped == dropped[:1]).all()


@pytest.mark.parametrize("fraction, sizes", [(0.2, [1, 1, 1, 1]), (0.29, [1, 1, 2, 1]), (0.9, [4, 1, 6, 3])])
def test_held_out_samples_are_a_fixed_part_of_the_training_samples(cohort, data, fraction, sizes):
    """Of 5, 1, 7 and 4 samples, at least one and not all; a single one is trained on and held out."""
    net = network(mlp)
    split = cohort(net).held_out(fraction, "validation").data
    assert [len(own) for own in split.validation] == sizes
    for own, rest, held in zip(data.train, split.train, split.validation, strict=True):
        if len(own) == 1:
            assert rest.tolist() == held.tolist() == own.tolist()
        else:
            assert sorted([*rest, *held]) == sorted(own) and not set(rest) & set(held)
    assert [own.tolist() for own in split.test] == [own.tolist() for own in data.test]
    later = cohort(net, round=7, ids=(3, 2)).held_out(fraction, "validation").data
    assert [own.tolist() for own in later.train] == [split.train[row].tolist() for row in (3, 2)]


def test_held_out_samples_are_drawn_by_purpose_and_client(cohort, data):
    """Not the last ones in stored order, where a client's classes may be sorted."""
    one, other = (cohort(network(mlp)).held_out(0.5, purpose).data.validation for purpose in ("a", "b"))
    assert [own.tolist() for own in one] != [own.tolist() for own in other]
    assert [own.tolist() for own in one] != [own[-len(own) // 2 :].tolist() for own in data.train]


def test_training_beside_held_out_samples_goes_on_from_the_kept_velocity(cohort):
    """What is trained there is the clients' own momentum, too."""
    net = network(mlp)
    clients = cohort(net, optimizer=SGD(lr=0.1, momentum=0.9), momentum_state="keep")
    clients.velocity = torch.zeros(K, net.num_weights, dtype=net.dtype)
    clients.held_out(0.2, "validation").fit(draws(net), cross_entropy)
    assert (clients.velocity != 0).any(1).all()


class TestChangedImages:
    """`training.augment`: what a client meets in training, and nothing else."""

    @pytest.fixture
    def images(self):
        x = torch.randn(60, 1, 4, 4, dtype=torch.float64)
        own = [np.arange(0, 7), np.arange(7, 12), np.arange(12, 13)]
        none = [rows[:0] for rows in own]
        return ClientData(Samples(x, torch.arange(60) % 3), 3, own, none, none)

    def seen(self, images, ids, augment, round=1):
        settings = TrainingConfig(epochs=2, batch_size=3, augment=augment)
        net = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "1", dtype=torch.float64)
        data = images.take(ids)
        cohort = Cohort(net, data, torch.tensor(ids), round=round, seed=0, training=settings, width=len(ids))
        found = {client: [] for client in ids}

        def work(chunk, w):
            for batch in chunk.batches():
                rows = torch.arange(len(chunk))[batch.rows]
                for row, x, y, size in zip(rows, batch.x, batch.y, batch.sizes.int(), strict=True):
                    found[int(chunk.ids[row])].append((x[:size], y[:size]))
            return (w,)

        cohort.run(work, torch.zeros(len(ids), net.width, dtype=torch.float64))
        return found

    def test_labels_and_order_stay_and_images_change(self, images):
        plain = self.seen(images, [0, 1, 2], None)
        changed = self.seen(images, [0, 1, 2], {"crop": 1})
        for client in plain:
            for (x, y), (moved, label) in zip(plain[client], changed[client], strict=True):
                assert torch.equal(y, label) and x.shape == moved.shape
        assert not torch.equal(plain[0][0][0], changed[0][0][0])

    def test_company_does_not_matter_and_the_round_does(self, images):
        together = self.seen(images, [0, 1, 2], {"crop": 1})
        for client in together:
            alone = self.seen(images, [client], {"crop": 1})[client]
            for (x, _), (other, _) in zip(together[client], alone, strict=True):
                assert torch.equal(x, other)
        later = self.seen(images, [0, 1, 2], {"crop": 1}, round=2)
        assert not torch.equal(together[0][0][0].sort().values, later[0][0][0].sort().values)

    def test_features_are_not_kept(self, images):
        settings = TrainingConfig(augment={"crop": 1})
        net = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "1", dtype=torch.float64)
        cohort = Cohort(net, images, torch.arange(3), round=1, seed=0, training=settings)
        assert cohort.features_differ
        with pytest.raises(ShapeError, match="cannot be kept"):
            cohort.on_features(torch.zeros(3, net.width, dtype=torch.float64))
