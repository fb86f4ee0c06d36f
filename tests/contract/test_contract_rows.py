"""What every method promises, tested on the bare contract in float64; `method_table.py` has the methods."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from harness import CLASSES, NETS, ONE_SAMPLE, SIZES, WITH_OWN_NORMS, Guard, Net, Simulation, mlp, toy
from method_table import TABLE

from raypfl.engine.messages import encode, take
from raypfl.methods import METHODS, personal
from raypfl.methods.contract import SERVER
from raypfl.rng import NOBODY, key

N = len(SIZES)
SOME = (0, ONE_SAMPLE, 4)
AWAY = [client for client in range(N) if client not in SOME]
SHUFFLED = (3, 0, 5, 1, 4, 2)

each_method = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
each_net = pytest.mark.parametrize("net", NETS.values(), ids=NETS)
each_net_that_it_may_have = pytest.mark.parametrize(
    "row, net",
    [
        pytest.param(row, net, id=f"{row.name}-{name}")
        for row in TABLE
        for name, net in {**NETS, "conv with own norms": WITH_OWN_NORMS}.items()
        if net is not WITH_OWN_NORMS or METHODS[row.options.name].norms_at_home
    ],
)
two_nets = pytest.mark.parametrize("net", [NETS["mlp"], NETS["conv"]], ids=["mlp", "conv"])


@pytest.fixture(scope="module")
def federation():
    return toy()


def resting(row):
    """Clients that do not train in a round of SOME."""
    return AWAY if row.trains == "sampled" else []


def uploaded(plan, up):
    """Who uploads, and what."""
    return plan.of_senders().ids, take(up, plan.uploads.nonzero()[:, 0])


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_every_method_has_a_row():
    assert {row.options.name for row in TABLE} == set(METHODS)
    assert not [name for name, count in Counter(row.name for row in TABLE).items() if count > 1]


@each_net
@each_method
def test_one_client_at_a_time_equals_all_at_once(row, net, federation):
    together, alone = (
        Simulation(row, net.float64(), federation, together=together).run(3) for together in (True, False)
    )
    for one, other in zip((*together.state, *together.hub), (*alone.state, *alone.hub), strict=True):
        close(one, other, row.tolerance)


@each_method
def test_order_of_participants_does_not_matter(row, federation):
    net = NETS["conv"].float64()
    ascending = Simulation(row, net, federation).run(3)
    shuffled = Simulation(row, net, federation).run(3, order=SHUFFLED)
    for one, other in zip((*ascending.state, *ascending.hub), (*shuffled.state, *shuffled.hub), strict=True):
        close(one, other, row.tolerance)


@two_nets
@each_method
def test_relabelling_clients_relabels_results(row, net, federation, monkeypatch):
    """Draws and architectures belong to a client's label; here they move with it, as its samples do."""
    named = Simulation(row, net.float64(), federation).run(3)

    def moved(seed: int, purpose: str, round: int = 0, client: int = NOBODY) -> int:
        return key(seed, purpose, round, client if client == NOBODY else SHUFFLED[client])

    for module in [module for name, module in sys.modules.items() if name.startswith("raypfl.")]:
        if getattr(module, "key", None) is key:
            monkeypatch.setattr(module, "key", moved)
    of_label = personal.kinds_of
    monkeypatch.setattr(personal, "kinds_of", lambda net, ids: of_label(net, torch.tensor(SHUFFLED)[ids]))
    row.moves(monkeypatch, SHUFFLED)
    renamed = Simulation(row, net.float64(), federation.relabelled(SHUFFLED)).run(3)
    close(renamed.models(), named.models()[list(SHUFFLED)], row.tolerance)


@two_nets
@each_method
def test_rows_of_absent_clients_do_not_move(row, net, federation):
    run = Simulation(row, net.float64(), federation).run(2)
    before, hub = run.state, run.hub
    run.round(SOME)
    for kept, field in zip(before, run.state, strict=True):
        assert torch.equal(field[resting(row)], kept[resting(row)])
    for name, kept, field in zip(hub._fields, hub, run.hub, strict=True):
        if len(kept) == N and name not in row.moving:
            assert torch.equal(field[AWAY], kept[AWAY])


@each_net
@each_method
def test_nothing_that_is_received_is_modified(row, net, federation):
    run = Simulation(row, net.float64(), federation)
    run.method = guard = Guard(run.method, run.data.pool)
    for ids in (None, SOME, (ONE_SAMPLE,)):
        plan, down, up = run.round(ids)
        own = take(run.state, plan.ids)
        guard.personalised(run.net, own, down)
        guard.personalised(run.net, own, down, up)
        guard.global_model(run.net, run.state, run.shared_download())
        guard.alternative(run.net, own, down, up)
        guard.answer(run.net, "personalised", run.clients.ids, run.models())(run.inputs())
        guard.adapted(run.cohort(run.clients.ids), run.models())
        guard.sent_down(run.net, plan, down)
        guard.sent_up(run.net, plan.ids, up)
        run.models()
    called = (
        "plan download local_update personalised absent alternative answer adapted global_model aggregate"
    )
    assert guard.checked >= {*called.split(), "sent_down", "sent_up"}


@each_net_that_it_may_have
@pytest.mark.parametrize("ids", [SOME, (ONE_SAMPLE,), None], ids=["some", "one", "all"])
def test_declared_messages_are_the_payload_of_the_table(row, net, ids, federation):
    run = Simulation(row, net.float64(), federation).run(1)
    plan, down, up = run.round(ids)
    participants = plan.ids.tolist()
    sent = {
        "down": [(message.dst, message) for message in run.method.sent_down(run.net, plan, down)],
        "up": [(message.src, message) for message in run.method.sent_up(run.net, *uploaded(plan, up))],
    }
    present = (run.clients.label_counts > 0).sum(1)
    known = torch.full_like(present, CLASSES)
    masks = {"down": 0, "up": row.masks_up(run.net, len(participants))}
    extra = {
        "down": row.down_per_class(run.net, len(participants)) * known,
        "up": row.up_per_class(run.net, len(participants)) * present,
    }
    counts = {"down": 0 * known, "up": row.counts_up_per_class(run.net, len(participants)) * present}
    for direction, payload in {"down": row.down, "up": row.up}.items():
        values, size, packed_size = Counter(), Counter(), Counter()
        for client, message in sent[direction]:
            if message.kind in row.packed_down:
                packed_size[client, message.kind] += message.bytes
            else:
                values[client] += message.values
                size[client] += message.bytes
            assert message.values > 0 and (SERVER in (message.src, message.dst)) != row.without_server
            assert message.src != message.dst
        concerned = (plan if direction == "down" else plan.of_senders()).ids
        if direction == "down" and row.decided is not None:
            expected = torch.tensor(row.decided(run.net, len(participants), down))
        else:
            expected = payload(run.net, len(participants)) + extra[direction][concerned]
        packed, counted = masks[direction], counts[direction][concerned]
        assert [values[client] for client in concerned.tolist()] == (expected + packed + counted).tolist()
        assert set(values) <= set(concerned.tolist())
        total = expected * run.net.dtype.itemsize + packed + 8 * counted
        assert [size[client] for client in concerned.tolist()] == total.tolist()
        heard = row.packed_down.items() if direction == "down" else ()
        assert packed_size == Counter(
            {
                (client, kind): size
                for kind, payload in heard
                for client in participants
                if (size := payload(run.net, len(participants)))
            }
        )


@pytest.mark.parametrize("row", [row for row in TABLE if row.sent_as_stored], ids=lambda row: row.name)
def test_messages_cross_borders_at_their_declared_size(row, federation):
    """To within 1 % and 300 bytes a field: a view of a larger tensor would bring all of it along."""
    run = Simulation(row, Net(partial(mlp, hidden=500)).float64(), federation)
    plan, down, up = run.round()
    for place, client in enumerate(plan.ids.tolist()):
        here = torch.tensor([place])
        declared_down = [m.bytes for m in run.method.sent_down(run.net, plan, down) if m.dst == client]
        declared_up = [m.bytes for m in run.method.sent_up(run.net, plan.ids[here], take(up, here))]
        for message, declared in (
            (take(down, here, run.method.shared), declared_down),
            (take(up, here), declared_up),
        ):
            found = len(pickle.dumps(encode(message), protocol=5))
            assert abs(found - sum(declared)) <= 0.01 * sum(declared) + 300 * max(len(declared), 1)


@each_net
@each_method
def test_models_are_adapted_alike_alone_and_beside_others(row, net, federation):
    """Evaluation may try a model on training data first; what it is given stays."""
    run = Simulation(row, net.float64(), federation).run(1)
    models = run.models()
    together, alone = (
        torch.cat([run.method.adapted(run.cohort(ids), models[ids]) for ids in torch.arange(N).split(length)])
        for length in (N, 1)
    )
    assert together.shape == models.shape and together.isfinite().all()
    close(together, alone, row.tolerance)
    again = run.method.adapted(run.cohort(run.clients.ids), models)
    assert torch.equal(again, together) and torch.equal(models, run.models())


@each_method
@pytest.mark.parametrize("client", [0, ONE_SAMPLE], ids=["several samples", "one sample"])
def test_one_participant(row, client, federation):
    run = Simulation(row, NETS["conv"].float64(), federation)
    start = run.models()
    run.run(2, ids=[client])
    assert run.models().isfinite().all()
    assert (run.models()[client] - start[client])[run.net.weights].abs().max() > 1e-3


@each_method
def test_client_with_one_sample_trains_beside_the_others(row, federation):
    run = Simulation(row, NETS["conv"].float64(), federation)
    here = torch.tensor([ONE_SAMPLE])
    before = run.models()[here]
    _, down, up = run.round()
    received = take(down, here, run.method.shared)
    after = run.method.personalised(run.net, take(run.state, here), received, take(up, here))
    assert after.isfinite().all()
    assert (after - before)[:, run.net.weights].abs().max() > 1e-3


@each_method
def test_training_lowers_the_loss(row, federation):
    run = Simulation(row, NETS["mlp"].float64(), federation)
    start = run.loss()
    run.run(8)
    assert run.loss() < 0.5 * start


@two_nets
@each_method
def test_absent_client_uses_its_own_last_model_or_the_newest_shared_one(row, net, federation):
    run = Simulation(row, net.float64(), federation)
    _, down, up = run.round()
    trained = run.method.personalised(run.net, run.state, down, up)
    before, newest_before = run.models(), run.method.global_model(run.net, run.state, run.shared_download())
    run.round(SOME)
    now, newest = run.models(), run.method.global_model(run.net, run.state, run.shared_download())
    if row.away == "own":
        assert torch.equal(now[resting(row)], trained[resting(row)])
        assert (now != trained).any(1).tolist() == [client not in resting(row) for client in range(N)]
        return
    if row.away == "own by newest":
        width = run.net.width
        assert torch.equal(now[AWAY, :width], trained[AWAY, :width])
        assert (now != before)[AWAY, width:].any(1).all()
        return
    head, extractor = run.net.head, run.net.extractor
    if row.away == "own head":
        assert torch.equal(now[AWAY, head], trained[AWAY, head])
    elif row.away == "own residual":
        close((now - newest)[AWAY, head], (before - newest_before)[AWAY, head], row.tolerance)
        assert ((now - newest)[AWAY, head].abs() > 1e-3).any(1).all()
    elif row.away == "own shares":
        assert (now[AWAY] - newest[AWAY] != before[AWAY] - newest_before[AWAY])[:, head].any(1).all()
        assert ((now - newest)[AWAY, head].abs() > 1e-3).any(1).all()
    if row.away in ("own head", "own residual", "own shares"):
        assert (now[:, run.net.body] == now[:1, run.net.body]).all()
        assert (now != before)[:, extractor].any(1).all()
        return
    assert torch.equal(now, run.method.global_model(run.net, run.state, run.shared_download()))
    assert (now[:, run.net.shared] == now[:1, run.net.shared]).all()
    assert (now != before)[:, run.net.weights].any(1).all()


@each_method
def test_statistics_that_do_not_travel_move_with_their_client_alone(row, federation):
    net = NETS["conv with local statistics"].float64()
    run = Simulation(row, net, federation)
    start = run.models()
    run.round(SOME)
    moved = (run.models() != start)[:, net.private].any(1)
    assert moved.tolist() == [client not in resting(row) for client in range(N)]


@each_method
def test_data_reach_others_only_where_the_method_collaborates(row, federation):
    """A collaboration whose term has no gradient would be local training under another name."""
    net = NETS["mlp"].float64()
    one, other = (
        Simulation(row, net, data).run(3).models()[:, net.weights]
        for data in (federation, federation.with_other_data(0))
    )
    itself, *others = (one != other).any(1).tolist()
    reached = len(others) if row.collaborates else 0
    assert itself and (0 < sum(others) <= reached if row.chooses else sum(others) == reached)


@each_method
def test_client_that_never_takes_part_reaches_nobody(row, federation):
    net = NETS["mlp"].float64()
    participants = range(1, N)
    one, other = (
        Simulation(row, net, data).run(3, ids=participants).models()
        for data in (federation, federation.with_other_data(0))
    )
    assert torch.equal(one[1:], other[1:])
    assert torch.equal(one[0], other[0]) == (row.trains == "sampled")
