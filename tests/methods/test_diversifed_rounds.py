"""DiversiFed over rounds: the proximal problem of a client, the anchor it gets, and who is absent.

The server step itself is checked in test_diversifed; T13 (lambda = 0) is in test_cross.
"""

import pytest
import torch

from raypfl.algebra import pairwise_distances, pull_together
from raypfl.methods import published
from raypfl.methods.diversifed import Config, DiversiFed, attraction
from raypfl.training import SGD, TrainingConfig

both_forms = pytest.mark.parametrize("form", ["net", "balanced"])


def server_step(w_KP, config, eta):
    return pull_together(attraction(pairwise_distances(w_KP), config, eta), w_KP)


class TestClientStep:
    """The proximal problem that a client solves, through its real local training."""

    ETA, LAM = 2.0, 3.0

    @both_forms
    @pytest.mark.parametrize("coupling", ["own", "joint"])
    def test_solves_a_quadratic(self, form, coupling, make_quadratic):
        """T14: `w+ = (b + rho w~) / (1 + rho)` with rho = lam / eta = 1.5."""
        method = DiversiFed(Config(form=form, coupling=coupling, eta=self.ETA, lam=self.LAM))
        toy = make_quadratic(1.5)
        done = toy.step_from(method, toy.rows(2.0))
        anchor = server_step(toy.weights(toy.rows(2.0)), method.config, self.ETA)
        torch.testing.assert_close(done.down.anchor, anchor, rtol=1e-12, atol=0)
        expected = (toy.targets() + 1.5 * anchor) / 2.5
        torch.testing.assert_close(toy.weights(done.state.w), expected, rtol=1e-12, atol=0)
        assert torch.equal(done.up.w, toy.weights(done.state.w))

    @both_forms
    @pytest.mark.parametrize("eta", [0.3, 1.0])
    def test_fixed_point_solves_the_stated_objective_for_every_step_size(self, form, eta, make_quadratic):
        """`grad F_i + lam grad R_i = 0`: why rho = lam / eta, and not lam."""
        config = Config(form=form, tau=0.4, eta=eta, lam=0.5)
        toy = make_quadratic(0.5 / eta)
        w = toy.weights(toy.run(DiversiFed(config), 150)[-1].state.w)
        torch.testing.assert_close(
            w - toy.targets(), -0.5 * (w - server_step(w, config, 1.0)), rtol=1e-8, atol=1e-8
        )
        assert (w - toy.targets()).norm() > 0.01

    def test_starts_at_the_own_model_and_keeps_it(self, toy):
        """One step from w, not from the anchor: `w - lr (grad F + rho (w - w~))`."""
        method = DiversiFed(Config(eta=self.ETA, lam=self.LAM))
        w = toy.rows(2.0)
        done = toy.step_from(method, w)
        expected = toy.weights(w) - 0.5 * (toy.gradients(w) + 1.5 * (toy.weights(w) - done.down.anchor))
        torch.testing.assert_close(toy.weights(done.state.w), expected, rtol=1e-12, atol=1e-13)

    def test_proximal_term_is_on_in_the_first_round(self, make_toy):
        """C = I, anchor = the common start: models stay closer to it than Separate's."""
        toy = make_toy(training=TrainingConfig(epochs=10, batch_size=3, optimizer=SGD(lr=0.02)))
        start = DiversiFed(Config()).init_state(toy.net, toy.clients).w
        free, held = (toy.run(DiversiFed(Config(lam=lam)), 1)[0] for lam in (0.0, 30.0))
        assert torch.equal(held.down.anchor, toy.weights(start))
        assert ((held.state.w - start).norm(dim=1) < 0.5 * (free.state.w - start).norm(dim=1)).all()


class TestParticipation:
    def test_absent_models_enter_nothing_and_stay(self, make_toy):
        toy, method = make_toy(), DiversiFed(Config())
        w = toy.rows()
        hub, plan = published.Hub(toy.weights(w)), toy.plan(2, [0, 2, 3])
        done = toy.round(method, hub, published.State(w), plan)
        moved = toy.weights(w).clone()
        moved[1] += 100.0
        assert torch.equal(method.download(toy.net, published.Hub(moved), plan).anchor, done.down.anchor)
        assert done.down.anchor.shape == (3, toy.net.num_weights)
        assert torch.equal(done.state.w[1], w[1])
        assert torch.equal(done.hub.w, toy.weights(done.state.w))

    def test_server_sees_the_model_of_a_client_that_was_away(self, make_toy):
        """Client 1 trains in round 1 and again in round 3: its anchor is built on its upload of round 1."""
        toy, method = make_toy(), DiversiFed(Config())
        history = toy.run(method, 3, lambda round: [[0, 1, 2], [0, 2, 3], [1, 3]][round - 1])
        seen = toy.weights(history[1].state.w)[[1, 3]]
        assert torch.equal(seen[0], history[0].up.w[1])
        expected = pull_together(method.attraction(seen, 3), seen)
        assert torch.equal(history[2].down.anchor, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_server_leaves_its_rows_alone(make_toy, dtype):
    toy, method = make_toy(dtype=dtype), DiversiFed(Config())
    hub = published.Hub(toy.weights(toy.rows()))
    before = hub.w.clone()
    method.download(toy.net, hub, toy.plan(2))
    method.attraction(hub.w, 2)
    assert torch.equal(hub.w, before)
