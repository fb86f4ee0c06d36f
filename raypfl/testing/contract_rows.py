"""What every method promises, tested on the bare contract in float64."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from raypfl.engine.messages import encode, take
from raypfl.methods import Plan, personal
from raypfl.methods.contract import SERVER
from raypfl.rng import NOBODY, key
from raypfl.testing.harness import (
    CLASSES,
    NETS,
    ONE_SAMPLE,
    SIZES,
    WITH_OWN_NORMS,
    Guard,
    Net,
    Simulation,
    Toy,
    mlp,
    toy,
)
from raypfl.testing.row import Row
from raypfl.testing.table import only, with_nets

N = len(SIZES)
SOME = (0, ONE_SAMPLE, 4)
AWAY = [client for client in range(N) if client not in SOME]
SHUFFLED = (3, 0, 5, 1, 4, 2)

each_net = pytest.mark.parametrize("net", NETS.values(), ids=NETS)
two_nets = pytest.mark.parametrize("net", [NETS["mlp"], NETS["conv"]], ids=["mlp", "conv"])


@pytest.fixture(scope="module")
def federation() -> Toy:
    return toy()


def nets_of(row: Row) -> dict[str, Net]:
    """The networks of the tests, and one with normalisation layers that stay where the method can."""
    able = type(row.method()).norms_at_home
    return {**NETS, **({"conv with own norms": WITH_OWN_NORMS} if able else {})}


def resting(row: Row) -> list[int]:
    """Clients that do not train in a round of SOME."""
    return AWAY if row.trains == "sampled" else []


def uploaded(plan: Plan, up: Any) -> tuple[torch.Tensor, Any]:
    """Who uploads, and what."""
    return plan.of_senders().ids, take(up, plan.uploads.nonzero()[:, 0])


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@each_net
def test_one_client_at_a_time_equals_all_at_once(row: Row, net: Net, federation: Toy) -> None:
    together, alone = (
        Simulation(row, net.float64(), federation, together=together).run(3) for together in (True, False)
    )
    for one, other in zip((*together.state, *together.hub), (*alone.state, *alone.hub), strict=True):
        close(one, other, row.tolerance)


def test_order_of_participants_does_not_matter(row: Row, federation: Toy) -> None:
    net = NETS["conv"].float64()
    ascending = Simulation(row, net, federation).run(3)
    shuffled = Simulation(row, net, federation).run(3, order=SHUFFLED)
    for one, other in zip((*ascending.state, *ascending.hub), (*shuffled.state, *shuffled.hub), strict=True):
        close(one, other, row.tolerance)


@two_nets
def test_relabelling_clients_relabels_results(
    row: Row, net: Net, federation: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws and architectures belong to a client's label; here they move with it, as its samples do."""
    named = Simulation(row, net.float64(), federation).run(3)

    def moved(seed: int, purpose: str, round: int = 0, client: int = NOBODY) -> int:
        return key(seed, purpose, round, client if client == NOBODY else SHUFFLED[client])

    ours = ("raypfl.", type(row.method()).__module__)
    concerned = [name for name in sys.modules if name.startswith(ours) and "raypfl.testing" not in name]
    for module in map(sys.modules.__getitem__, concerned):
        if getattr(module, "key", None) is key:
            monkeypatch.setattr(module, "key", moved)
    of_label = personal.kinds_of
    monkeypatch.setattr(personal, "kinds_of", lambda net, ids: of_label(net, torch.tensor(SHUFFLED)[ids]))
    row.moves(monkeypatch, SHUFFLED)
    renamed = Simulation(row, net.float64(), federation.relabelled(SHUFFLED)).run(3)
    close(renamed.models(), named.models()[list(SHUFFLED)], row.tolerance)


@two_nets
def test_rows_of_absent_clients_do_not_move(row: Row, net: Net, federation: Toy) -> None:
    run = Simulation(row, net.float64(), federation).run(2)
    before, hub = run.state, run.hub
    run.round(SOME)
    for kept, field in zip(before, run.state, strict=True):
        assert torch.equal(field[resting(row)], kept[resting(row)])
    for name, kept, field in zip(hub._fields, hub, run.hub, strict=True):
        if len(kept) == N and name not in row.moving:
            assert torch.equal(field[AWAY], kept[AWAY])


@each_net
def test_nothing_that_is_received_is_modified(row: Row, net: Net, federation: Toy) -> None:
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
        guard.diagnose(run.net, run.hub, plan, down)
        given = guard.relations(run.net, run.hub, plan, down), guard.own_relations(run.net, plan.ids, own)
        for pairs in itertools.chain.from_iterable(found.values() for found in given):
            assert {*pairs.receivers.tolist(), *pairs.sources.tolist()} <= set(range(N))
            assert len(pairs.receivers) == len(pairs.sources) == len(pairs.values)
            assert pairs.values.isfinite().all()
        run.models()
    called = (
        "plan download local_update personalised absent alternative answer adapted global_model aggregate"
    )
    assert guard.checked >= {*called.split(), "sent_down", "sent_up"}


@with_nets(nets_of)
@pytest.mark.parametrize("ids", [SOME, (ONE_SAMPLE,), None], ids=["some", "one", "all"])
def test_declared_messages_are_the_payload_of_the_table(
    row: Row, net: Net, ids: tuple[int, ...] | None, federation: Toy
) -> None:
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
        values: Counter[int] = Counter()
        size: Counter[int] = Counter()
        packed_size: Counter[tuple[int, str]] = Counter()
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
                (client, kind): packed_bytes
                for kind, payload in heard
                for client in participants
                if (packed_bytes := payload(run.net, len(participants)))
            }
        )


@only(lambda row: row.sent_as_stored)
def test_messages_cross_borders_at_their_declared_size(row: Row, federation: Toy) -> None:
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
def test_models_are_adapted_alike_alone_and_beside_others(row: Row, net: Net, federation: Toy) -> None:
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


@pytest.mark.parametrize("client", [0, ONE_SAMPLE], ids=["several samples", "one sample"])
def test_one_participant(row: Row, client: int, federation: Toy) -> None:
    run = Simulation(row, NETS["conv"].float64(), federation)
    start = run.models()
    run.run(2, ids=[client])
    assert run.models().isfinite().all()
    assert (run.models()[client] - start[client])[run.net.weights].abs().max() > 1e-3


def test_client_with_one_sample_trains_beside_the_others(row: Row, federation: Toy) -> None:
    run = Simulation(row, NETS["conv"].float64(), federation)
    here = torch.tensor([ONE_SAMPLE])
    before = run.models()[here]
    _, down, up = run.round()
    received = take(down, here, run.method.shared)
    after = run.method.personalised(run.net, take(run.state, here), received, take(up, here))
    assert after.isfinite().all()
    assert (after - before)[:, run.net.weights].abs().max() > 1e-3


def test_training_lowers_the_loss(row: Row, federation: Toy) -> None:
    run = Simulation(row, NETS["mlp"].float64(), federation)
    start = run.loss()
    run.run(8)
    assert run.loss() < 0.5 * start


@two_nets
def test_absent_client_uses_its_own_last_model_or_the_newest_shared_one(
    row: Row, net: Net, federation: Toy
) -> None:
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


def test_statistics_that_do_not_travel_move_with_their_client_alone(row: Row, federation: Toy) -> None:
    net = NETS["conv with local statistics"].float64()
    run = Simulation(row, net, federation)
    start = run.models()
    run.round(SOME)
    moved = (run.models() != start)[:, net.private].any(1)
    assert moved.tolist() == [client not in resting(row) for client in range(N)]


def test_data_reach_others_only_where_the_method_collaborates(row: Row, federation: Toy) -> None:
    """A collaboration whose term has no gradient would be local training under another name."""
    net = NETS["mlp"].float64()
    one, other = (
        Simulation(row, net, data).run(3).models()[:, net.weights]
        for data in (federation, federation.with_other_data(0))
    )
    itself, *others = (one != other).any(1).tolist()
    reached = len(others) if row.collaborates else 0
    assert itself and (0 < sum(others) <= reached if row.chooses else sum(others) == reached)


def test_client_that_never_takes_part_reaches_nobody(row: Row, federation: Toy) -> None:
    net = NETS["mlp"].float64()
    participants = range(1, N)
    one, other = (
        Simulation(row, net, data).run(3, ids=participants).models()
        for data in (federation, federation.with_other_data(0))
    )
    assert torch.equal(one[1:], other[1:])
    assert torch.equal(one[0], other[0]) == (row.trains == "sampled")


__all__ = ["federation", *(name for name in dir() if name.startswith("test_"))]
