"""FedAMP: attentive messages from the definition, and a client step that does use them."""

# S participants, P parameters.

import math

import pytest
import torch
from pydantic import ValidationError

from raypfl.algebra import pairwise_distances, pairwise_similarities, pull_together
from raypfl.methods.fedamp import Config, FedAMP, exact_attraction, heuristic_attraction
from raypfl.methods.local import Config as LocalConfig
from raypfl.methods.local import Local


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(w_SP, alpha=2.0, sigma=5.0):
    return exact_attraction(pairwise_distances(w_SP), alpha, sigma)


def coefficients(a_SS):
    return a_SS + torch.diag(1 - a_SS.sum(1))


def attention_loss(w_SP, sigma):
    """Sum over pairs of `1 - exp(-||w_i - w_j||^2 / sigma)`."""
    squared = [(w_SP[i] - w_SP[j]).square().sum() for i in range(len(w_SP)) for j in range(i)]
    return sum(1 - torch.exp(-value / sigma) for value in squared)


def attention_gradient(w_SP, sigma):
    leaf = w_SP.clone().requires_grad_()
    return torch.autograd.grad(attention_loss(leaf, sigma), leaf)[0]


class TestExactWeights:
    def test_known_numbers(self):
        """Places 0, 1 and 3 on a line, alpha / sigma = 1/2."""
        w_SP = torch.tensor([[0.0], [1.0], [3.0]])
        near, middle, far = (0.5 * math.exp(-squared / 4) for squared in (1, 4, 9))
        expected = torch.tensor([[0, near, far], [near, 0, middle], [far, middle, 0]], dtype=torch.float64)
        torch.testing.assert_close(exact(w_SP, 2.0, 4.0), expected, rtol=1e-12, atol=0)

    def test_step_descends_half_the_gradient(self):
        """Half, since the weights leave out the factor 2 of the exact derivative."""
        w_SP = normal(5, 4)
        expected = w_SP - 2.0 / 2 * attention_gradient(w_SP, 5.0)
        torch.testing.assert_close(pull_together(exact(w_SP), w_SP), expected, rtol=0, atol=1e-13)

    def test_symmetric_with_rows_and_columns_of_c_summing_to_one(self):
        w_SP = normal(6, 4)
        c_SS, one = coefficients(exact(w_SP)), torch.ones(6, dtype=torch.float64)
        assert torch.equal(c_SS, c_SS.T)
        torch.testing.assert_close(c_SS.sum(1), one, rtol=0, atol=1e-14)
        torch.testing.assert_close(c_SS.sum(0), one, rtol=0, atol=1e-14)
        mean = pull_together(exact(w_SP), w_SP).mean(0)
        torch.testing.assert_close(mean, w_SP.mean(0), rtol=0, atol=1e-14)

    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
    def test_nobody_repels(self, scale):
        a_SS = exact(scale * normal(6, 4))
        assert (a_SS >= 0).all()
        assert a_SS.isfinite().all()

    def test_narrow_attention_is_none(self):
        assert not exact(normal(6, 4), sigma=1e-6).any()

    def test_wide_attention_with_alpha_over_m_is_the_mean(self):
        w_SP = normal(8, 4)
        anchors = pull_together(exact(w_SP, 1e12 / 8, 1e12), w_SP)
        torch.testing.assert_close(anchors, w_SP.mean(0).expand(8, -1), rtol=0, atol=1e-10)

    def test_alpha_zero_leaves_the_uploads(self):
        method, w_SP = FedAMP(Config(alpha=0)), normal(5, 4)
        assert torch.equal(pull_together(method.attraction(w_SP, 1), w_SP), w_SP)
        assert method.rho(1) == 1.0

    def test_invariances(self):
        """Translation and orthogonal maps leave the weights, a permutation permutes them; scale matters."""
        w_SP, order = normal(5, 4), torch.tensor([2, 4, 0, 1, 3])
        a_SS, rotation = exact(w_SP), torch.linalg.qr(normal(4, 4, seed=1)).Q
        for moved, expected in (
            (w_SP + 3, a_SS),
            (w_SP @ rotation, a_SS),
            (w_SP[order], a_SS[order][:, order]),
        ):
            torch.testing.assert_close(exact(moved), expected, rtol=1e-11, atol=0)
        assert (exact(2 * w_SP) < a_SS).any()

    def test_cap_on_row_sums(self):
        """A row above the cap is scaled to it, the others stay."""
        w_SP = torch.tensor([[0.0], [0.1], [0.2], [4.0]])
        free = exact(w_SP, 5.0, 5.0)
        capped = FedAMP(Config(alpha=5, sigma=5, max_pull=1)).attraction(w_SP, 1)
        assert (free.sum(1) > 1).tolist() == [True, True, True, False]
        expected = torch.cat([free[:3] / free[:3].sum(1, keepdim=True), free[3:]])
        torch.testing.assert_close(capped, expected, rtol=1e-12, atol=0)


class TestHeuristicWeights:
    def test_known_numbers(self):
        """Directions 0, 60 and 180 degrees: cosines 1/2, -1 and -1/2."""
        w_SP = torch.tensor([[2.0, 0.0], [0.5, 0.75**0.5], [-5.0, 0.0]])
        a_SS = heuristic_attraction(pairwise_similarities(w_SP), kappa=2.0, self_weight=0.4)
        first, second = math.exp(2 * 0.5), math.exp(2 * -1)
        expected = torch.tensor([0, 0.6 * first / (first + second), 0.6 * second / (first + second)])
        torch.testing.assert_close(a_SS[0], expected.double(), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("self_weight", [0.0, 0.3, 1.0])
    def test_rows_of_c_sum_to_one_with_the_given_self_weight(self, self_weight):
        a_SS = FedAMP(Config(attention="heuristic", self_weight=self_weight)).attraction(normal(6, 4), 1)
        others = torch.full((6,), 1 - self_weight, dtype=torch.float64)
        torch.testing.assert_close(a_SS.sum(1), others, rtol=0, atol=1e-12)
        assert (a_SS >= 0).all()
        assert not a_SS.diagonal().any()

    def test_only_angles_matter(self):
        method, w_SP = FedAMP(Config(attention="heuristic")), normal(5, 4)
        lengths = torch.tensor([[0.1], [1.0], [5.0], [7.0], [100.0]], dtype=torch.float64)
        torch.testing.assert_close(
            method.attraction(lengths * w_SP, 1), method.attraction(w_SP, 1), rtol=1e-9, atol=0
        )


@pytest.mark.parametrize("attention", ["exact", "heuristic"])
class TestBothAttentions:
    @pytest.mark.parametrize("num_clients", [1, 2, 40])
    def test_equal_models_stay_bit_for_bit(self, attention, num_clients):
        """Whatever entries of order n alpha / sigma would do to a rounding."""
        method = FedAMP(Config(attention=attention, alpha=1e6))
        w_SP = normal(1, 1000).float().expand(num_clients, -1)
        assert torch.equal(pull_together(method.attraction(w_SP, 1), w_SP), w_SP)

    def test_is_not_separate(self, attention, toy):
        """A release of FedAMP has a proximal term without a gradient, and so is Separate."""
        method = FedAMP(Config(attention=attention, alpha=1, sigma=4, lam=1))
        history = toy.run(method, 5)
        alone = toy.run(Local(LocalConfig()), 5)

        def spread(rounds):
            return pairwise_distances(toy.weights(rounds[-1].state.w)).sum()

        assert spread(history) < 0.9 * spread(alone)

    def test_client_step_is_pulled_to_the_anchor(self, attention, toy):
        """From the own model: `w - lr (grad F + rho (w - u))`, rho = lam / alpha = 3/2, the squared norm."""
        method = FedAMP(Config(attention=attention, alpha=2, sigma=4, lam=3))
        w = toy.rows(0.5)
        done = toy.step_from(method, w)
        expected = toy.weights(w) - 0.5 * (toy.gradients(w) + 1.5 * (toy.weights(w) - done.down.anchor))
        torch.testing.assert_close(toy.weights(done.state.w), expected, rtol=1e-12, atol=1e-13)
        assert (toy.weights(w) - done.down.anchor).norm() > 0.1


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_fixed_point_solves_the_objective_with_half_of_lambda(alpha, make_quadratic):
    toy = make_quadratic(1.0 / alpha)
    w = toy.weights(toy.run(FedAMP(Config(alpha=alpha, sigma=4, lam=1)), 150)[-1].state.w)
    pull = attention_gradient(w, 4)
    torch.testing.assert_close(w - toy.targets(), -0.5 * pull, rtol=1e-8, atol=1e-9)
    assert pull.norm() > 0.01


def test_narrow_attention_is_separate_with_a_pull_to_itself(make_quadratic):
    """`w+ = (b + rho w) / (1 + rho)` with the own upload as anchor."""
    toy = make_quadratic(1.0)
    w = toy.rows(2.0)
    done = toy.step_from(FedAMP(Config(alpha=1, sigma=1e-6, lam=1)), w)
    expected = (toy.targets() + toy.weights(w)) / 2
    torch.testing.assert_close(toy.weights(done.state.w), expected, rtol=1e-12, atol=0)


class TestDecay:
    def test_every_thirty_rounds(self):
        method = FedAMP(Config(alpha=1e4, alpha_decay=0.1))
        found = [method.alpha(round) for round in (1, 30, 31, 60, 61, 120, 121)]
        assert found == pytest.approx([1e4, 1e4, 1e3, 1e3, 1e2, 10, 1])

    def test_stops_before_models_freeze(self):
        """Undecayed, alpha would be 1e-12 in round 500 and the models nailed to their anchors."""
        method = FedAMP(Config(alpha=1e4, alpha_decay=0.1, lam=2))
        assert [method.alpha(round) for round in (121, 500)] == [2.0, 2.0]
        assert method.rho(500) == 1.0

    def test_does_not_raise_a_small_alpha(self):
        method = FedAMP(Config(alpha=0.5, alpha_decay=0.1, lam=2))
        assert [method.alpha(round) for round in (1, 500)] == [0.5, 0.5]

    def test_enters_the_weights_and_the_pull(self):
        method = FedAMP(Config(alpha=100, sigma=100, alpha_decay=0.1, lam=1))
        w_SP = normal(3, 4)
        torch.testing.assert_close(method.attraction(w_SP, 31), 0.1 * method.attraction(w_SP, 30))
        assert (method.rho(30), method.rho(31)) == pytest.approx((0.01, 0.1))


def test_proximal_weight_of_its_own():
    assert FedAMP(Config(rho=0.25, alpha_decay=0.1)).rho(100) == 0.25


@pytest.mark.parametrize(
    "options",
    [
        {"lam": -1},
        {"alpha": -1},
        {"sigma": 0},
        {"alpha_decay": 0},
        {"decay_every": 0},
        {"self_weight": 1.1},
        {"rho": -1},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        Config(**options)
