"""APPLE: cores and relationships trained together, and whose cores a client has."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from raypfl.errors import ConfigError
from raypfl.methods.apple import APPLE, Config, Hub, State, kappa
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local
from raypfl.training import SGD, Adam, TrainingConfig

SEPARATE = Local(LocalConfig())
FROZEN = Config(eta2=0.0)
UNEVEN = TrainingConfig(epochs=2, batch_size=3, optimizer=SGD(lr=0.3, momentum=0.5, weight_decay=0.01))


def share(toy):
    return toy.clients.sizes.to(toy.net.dtype)[None] / toy.clients.sizes.sum()


def start_of(toy, method, v, p):
    """Server and clients that hold these cores and relationships."""
    state = method.init_state(toy.net, toy.clients)
    return Hub(toy.weights(v), share(toy)), state._replace(v=toy.weights(v), p=p)


def relationships(toy, seed=3):
    """Rows around p0, some entries negative."""
    noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=toy.net.dtype)
    return share(toy) + 0.3 * noise


def objective(toy, client, v, p, cores, pull):
    """`F_i(w_i) + pull/2 ||p_i - p0||^2` over all samples, of its core and row; for autograd."""
    w = sum(p[j] * (v if j == client else cores[j]) for j in range(len(cores)))
    padded = torch.cat([w, w.new_zeros(toy.net.width - len(w))])[None]
    own = toy.indices[client]
    loss = F.cross_entropy(toy.net.bind(padded)(toy.x[own][None])[0], toy.y[own])
    return loss + pull / 2 * (p - share(toy)[0]).square().sum()


class TestOneStep:
    @pytest.mark.parametrize("max_downloads", [None, 3])
    @pytest.mark.parametrize("schedule, strength", [("exp", 1e-3**0.25), ("cos", (1 + 0.5**0.5) / 2)])
    def test_core_and_row_follow_their_gradients(self, schedule, strength, max_downloads, toy):
        """Round 3 of L = 8 is r = 2, a quarter of the way; the core moves by 0.5, the row by 0.2."""
        method = APPLE(Config(eta2=0.2, mu=0.7, schedule=schedule, L=8, max_downloads=max_downloads))
        v, p = toy.rows(), relationships(toy)
        hub, state = start_of(toy, method, v, p)
        done = toy.round(method, hub, state, toy.plan_of(method, hub, 3))
        cores = toy.weights(v)
        for client in range(4):
            own, row = cores[client].clone().requires_grad_(), p[client].clone().requires_grad_()
            loss = objective(toy, client, own, row, cores, 0.7 * strength)
            g_v, g_p = torch.autograd.grad(loss, (own, row))
            torch.testing.assert_close(done.state.v[client], own - 0.5 * g_v, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(done.state.p[client], row - 0.2 * g_p, rtol=1e-11, atol=1e-13)
            assert g_p.abs().min() > 1e-4 and g_v.norm() > 1e-3

    def test_several_steps_and_momentum_equal_a_loop_over_both(self, make_toy):
        """Plain torch.optim on both parts, batch by batch; evaluated is what the last step leaves."""
        toy = make_toy(training=UNEVEN, dtype=torch.float64)
        method = APPLE(Config(eta2=0.05, mu=0.7, L=10, p_momentum=0.8))
        v, p = toy.rows(), relationships(toy)
        hub, state = start_of(toy, method, v, p)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        cores = toy.weights(v)
        for client in range(4):
            own, row = cores[client].clone().requires_grad_(), p[client].clone().requires_grad_()
            core_steps = torch.optim.SGD([own], 0.3, momentum=0.5, weight_decay=0.01)
            row_steps = torch.optim.SGD([row], 0.05, momentum=0.8)
            for batch in toy.batches(1, client):
                w = sum(row[j] * (own if j == client else cores[j]) for j in range(4))
                padded = torch.cat([w, w.new_zeros(toy.net.width - len(w))])[None]
                loss = F.cross_entropy(toy.net.bind(padded)(batch.x)[0], batch.y[0])
                loss = loss + 0.35 * (row - share(toy)[0]).square().sum()
                core_steps.zero_grad()
                row_steps.zero_grad()
                loss.backward()
                core_steps.step()
                row_steps.step()
            w = sum(row[j] * (own if j == client else cores[j]) for j in range(4))
            for found, expected in (
                (done.state.v, own),
                (done.state.p, row),
                (toy.weights(done.state.w), w),
                (done.up.v, own),
            ):
                torch.testing.assert_close(found[client], expected.detach(), rtol=1e-10, atol=1e-12)

    def test_strong_pull_returns_the_row_to_its_start_but_for_the_data(self, toy):
        """eta2 mu kappa = 1."""
        method = APPLE(Config(eta2=0.5, mu=2.0))
        v, p = toy.rows(), relationships(toy)
        hub, state = start_of(toy, method, v, p)
        done = toy.round(method, hub, state, toy.plan_of(method, hub))
        for client in range(4):
            row = p[client].clone().requires_grad_()
            cores = toy.weights(v)
            loss = objective(toy, client, cores[client], row, cores, 0.0)
            (g,) = torch.autograd.grad(loss, row)
            torch.testing.assert_close(done.state.p[client], share(toy)[0] - 0.5 * g, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("max_downloads", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_rows_of_the_identity_that_stay_it_is_separate_bit_for_bit(dtype, max_downloads, make_toy):
    """With Adam, uneven mini-batches and changing participants."""
    toy = make_toy(dtype=dtype)
    method = APPLE(Config(eta2=0.0, max_downloads=max_downloads))
    hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
    state = state._replace(p=torch.eye(4, dtype=dtype))
    alone = SEPARATE.init_state(toy.net, toy.clients)
    for number, ids in enumerate([None, [0, 2, 3], [1, 2], None], 1):
        done = toy.round(method, hub, state, toy.plan_of(method, hub, number, ids))
        hub, state = done.hub, done.state
        alone = toy.round(
            SEPARATE, SEPARATE.init_hub(toy.net, toy.clients), alone, toy.plan(number, ids)
        ).state
        assert torch.equal(state.w, alone.w) and torch.equal(state.v, toy.weights(alone.w))


def test_one_client_alone_is_separate_bit_for_bit(make_toy):
    toy = make_toy((7,))
    found, alone = toy.run(APPLE(FROZEN), 3)[-1].state, toy.run(SEPARATE, 3)[-1].state
    assert torch.equal(found.w, alone.w)


def test_equal_frozen_rows_are_gradient_descent_on_all_data(make_toy):
    """All share one w, which moves by -(eta1 / m^2) sum_j g_j(w) a round."""
    steps = TrainingConfig(epochs=1, batch_size=100, optimizer=SGD(lr=0.5))
    toy = make_toy((6, 6, 6, 6), training=steps, dtype=torch.float64)
    method = APPLE(FROZEN)
    w = method.init_state(toy.net, toy.clients).w
    for done in toy.run(method, 3):
        moved = toy.weights(w) - 0.5 / 16 * toy.gradients(w).sum(0)
        received = method.download(toy.net, done.hub, toy.plan())
        after = method.personalised(toy.net, done.state, received)
        torch.testing.assert_close(toy.weights(after), moved, rtol=1e-11, atol=1e-13)
        w = toy.net.assemble(moved)


def test_before_training_a_client_has_the_newest_cores_and_after_it_those_it_trained_beside(toy):
    method = APPLE(Config(eta2=0.1))
    first, second = toy.run(method, 2)
    mixture = second.state.p @ second.hub.v
    received = method.download(toy.net, second.hub, toy.plan(3))
    newest = method.personalised(toy.net, second.state, received)
    torch.testing.assert_close(toy.weights(newest), mixture, rtol=1e-11, atol=1e-13)
    for client in range(4):
        cores = first.hub.v.clone()
        cores[client] = second.state.v[client]
        torch.testing.assert_close(
            toy.weights(second.state.w)[client], second.state.p[client] @ cores, rtol=1e-11, atol=1e-13
        )
    assert torch.equal(method.personalised(toy.net, second.state, second.down, second.up), second.state.w)


def test_cores_of_others_stay_as_they_were(toy):
    """Only participants' cores and rows move; those of absent clients are still mixed."""
    method = APPLE(Config(eta2=0.1))
    v, p = toy.rows(), relationships(toy)
    hub, state = start_of(toy, method, v, p)
    done = toy.round(method, hub, state, toy.plan_of(method, hub, 1, [1, 3]))
    assert torch.equal(done.hub.v[[0, 2]], hub.v[[0, 2]]) and torch.equal(done.state.p[[0, 2]], p[[0, 2]])
    assert (done.hub.v != hub.v).any(1).tolist() == [False, True, False, True]
    other = hub._replace(v=hub.v * torch.tensor([2.0, 1, 1, 1])[:, None])
    again = toy.round(method, other, state, toy.plan_of(method, hub, 1, [1, 3]))
    assert (again.up.v != done.up.v).any(1).all()


class TestKappa:
    def test_known_values(self):
        exp, cos = Config(L=4, eps=1e-4), Config(L=4, schedule="cos")
        assert [kappa(r, exp) for r in range(6)] == pytest.approx([1, 0.1, 0.01, 0.001, 0, 0])
        expected = [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0, 0]
        assert [kappa(r, cos) for r in range(6)] == pytest.approx(expected)

    @pytest.mark.parametrize("schedule", ["exp", "cos"])
    def test_without_rounds_there_is_no_pull(self, schedule):
        assert kappa(0, Config(L=0, schedule=schedule)) == 0.0

    def test_the_first_round_has_all_of_it(self):
        assert kappa(0, Config()) == kappa(0, Config(schedule="cos")) == 1.0
        assert kappa(15, Config()) == pytest.approx(math.exp(math.log(1e-3) * 15 / 16))


class TestDownloads:
    def test_everybody_hears_all_others(self, toy):
        method = APPLE(Config())
        hub = method.init_hub(toy.net, toy.clients)
        plan = toy.plan_of(method, hub, 1, [0, 2])
        assert plan.peers.tolist() == [[1, 2, 3], [0, 1, 3]]
        down = method.download(toy.net, hub, plan)
        assert down.cores.shape == (1, 4, 15), "one copy for all"
        sent = method.sent_down(toy.net, plan, down)
        assert [(m.dst, m.values, m.bytes) for m in sent] == [(0, 45, 360), (2, 45, 360)]

    def test_with_a_limit_so_many_others_are_drawn(self, make_toy):
        """Uniformly, by round and client, never the client itself."""
        toy = make_toy((4,) * 8)
        method = APPLE(Config(max_downloads=3))
        hub = method.init_hub(toy.net, toy.clients)
        plans = [toy.plan_of(method, hub, round).peers for round in range(1, 401)]
        drawn = torch.stack(plans)
        assert (drawn[:, :, 1:] > drawn[:, :, :-1]).all() and torch.equal(
            plans[3], toy.plan_of(method, hub, 4).peers
        )
        for client in range(8):
            often = drawn[:, client].flatten().bincount(minlength=8) / 400
            assert often[client] == 0
            others = often[torch.arange(8) != client]
            torch.testing.assert_close(others, torch.full((7,), 3 / 7), atol=0.1, rtol=0)
        assert (drawn[:, 0] != drawn[:, 7]).any()

    def test_with_a_limit_the_other_cores_are_as_old_as_their_download(self, make_toy):
        """Each client's caches, kept by hand; all columns of p move, since every core is at hand."""
        toy = make_toy(dtype=torch.float64)
        method = APPLE(Config(eta2=0.1, max_downloads=1))
        hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
        cached = [[hub.v[j] for j in range(4)] for _ in range(4)]
        old = False
        for number, ids in enumerate([None, [0, 1, 3], None, [2, 3], None], 1):
            plan = toy.plan_of(method, hub, number, ids)
            for client, peers in zip(plan.ids.tolist(), plan.peers.tolist(), strict=True):
                for j in peers:
                    cached[client][j] = hub.v[j]
            before = state.p
            done = toy.round(method, hub, state, plan)
            hub, state = done.hub, done.state
            for client in plan.ids.tolist():
                cores = torch.stack(cached[client])
                others = [j for j in range(4) if j != client]
                assert torch.equal(state.cores[client][others], cores[others])
                old = old or not torch.equal(cores[others], hub.v[others])
                cores[client] = state.v[client]
                found = toy.weights(state.w)[client]
                torch.testing.assert_close(found, state.p[client] @ cores, rtol=1e-11, atol=1e-13)
                assert (state.p[client] != before[client]).all()
        assert old, "some caches were out of date"

    def test_a_limit_that_binds_nobody_changes_nothing(self, make_toy):
        toy = make_toy(dtype=torch.float64)
        free, limited = (toy.run(APPLE(Config(eta2=0.1, max_downloads=m)), 3)[-1].state for m in (None, 3))
        for name in ("v", "p", "w"):
            torch.testing.assert_close(getattr(free, name), getattr(limited, name), rtol=1e-11, atol=1e-13)
        assert free.cores.numel() == 0 and limited.cores.shape == (4, 4, 15)

    @pytest.mark.parametrize("participants, count", [([2], 3), ([0, 1, 3], 3)])
    def test_one_participant_still_hears_absent_clients(self, participants, count, toy):
        method = APPLE(Config())
        hub = method.init_hub(toy.net, toy.clients)
        plan = toy.plan_of(method, hub, 1, participants)
        assert plan.peers.shape == (len(participants), count)


def test_rows_start_at_the_shares_of_all_clients_wherever_a_client_lives(toy):
    method = APPLE(Config())
    some = method.init_state(toy.net, toy.clients.take(torch.tensor([1, 3])))
    assert torch.equal(some.p, share(toy).repeat(2, 1))
    assert torch.equal(some.p, method.init_state(toy.net, toy.clients).p[[1, 3]])
    assert isinstance(some, State)


def test_rates_of_both_parts_decay_over_rounds(make_toy):
    def moved(decay):
        steps = TrainingConfig(epochs=1, batch_size=100, optimizer=SGD(lr=0.5), lr_decay=decay)
        toy = make_toy(training=steps, dtype=torch.float64)
        method = APPLE(Config(eta2=0.1))
        hub, state = start_of(toy, method, toy.rows(), relationships(toy))
        done = toy.round(method, hub, state, toy.plan_of(method, hub, 3))
        return done.state.v - state.v, done.state.p - state.p

    for full, decayed in zip(moved(1.0), moved(0.5), strict=True):
        torch.testing.assert_close(decayed, full / 4, rtol=1e-9, atol=1e-12)


def test_kept_momentum_is_refused(toy):
    kept = TrainingConfig(optimizer=SGD(momentum=0.9), momentum_state="keep")
    with pytest.raises(ConfigError, match=r"apple.*Use 'reset'"):
        APPLE(Config()).check(toy.net, toy.clients, kept)
    APPLE(Config()).check(toy.net, toy.clients, TrainingConfig(optimizer=Adam()))


@pytest.mark.parametrize("options", [{"eta2": -1.0}, {"L": -1}, {"eps": 0.0}, {"max_downloads": 0}])
def test_options_out_of_range(options):
    with pytest.raises(ValidationError):
        Config(**options)


def test_what_clients_know_of_each_other_are_their_relationships(toy):
    method = APPLE(Config())
    state = method.init_state(toy.net, toy.clients)._replace(p=relationships(toy))
    ids = torch.tensor([2, 0])
    pairs = method.own_relations(toy.net, ids, type(state)(*(field[ids] for field in state)))["relationship"]
    found = torch.full((4, 4), torch.nan, dtype=state.p.dtype)
    found[pairs.receivers, pairs.sources] = pairs.values
    assert torch.equal(found[ids], state.p[ids]) and found[[1, 3]].isnan().all()
