"""Classifier collaboration: closed forms, an independent solver, certificates, and refusals."""

# K clients, R receivers, P entries of a statistic.

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from raypfl.algebra import Combination, combination_weights, require_certified, simplex_qp
from raypfl.algebra import simplex_qp_pivoting as pivoting
from raypfl.errors import DataError, RaypflError, ShapeError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decades(num: int, low: float, high: float, seed: int = 1) -> torch.Tensor:
    """Numbers from `10 ** low` to `10 ** high`, uniform in the exponent."""
    uniform = torch.rand(num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 10.0 ** (low + (high - low) * uniform)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def clustered(num_clients: int, size: int, groups: int, distance: float, seed: int = 0) -> torch.Tensor:
    """Client k is near the centre of group k mod groups; distance between centres over the spread."""
    centre = distance * normal(groups, size, seed=seed)
    return centre[torch.arange(num_clients) % groups] + normal(num_clients, size, seed=seed + 1)


def with_duplicates() -> torch.Tensor:
    mean_KP = normal(12, 7)
    mean_KP[[3, 5, 9]] = mean_KP[0].clone()
    return mean_KP


def with_outlier() -> torch.Tensor:
    mean_KP = normal(12, 30)
    mean_KP[4] *= 1e5
    return mean_KP


def single_samples() -> torch.Tensor:
    """Every third client has one sample, so no variance."""
    variance_K = decades(12, -2, 0)
    variance_K[::3] = 0.0
    return variance_K


PROBLEMS = {
    "one client": (normal(1, 4), numbers(2.0)),
    "two clients": (normal(2, 4), numbers(2.0, 0.1)),
    "random": (normal(12, 30), decades(12, -1, 1)),
    "fewer entries than clients": (normal(40, 3), decades(40, -3, 0)),
    "clustered": (clustered(20, 30, 4, 10.0), decades(20, -1, 1)),
    "tight clusters": (clustered(20, 30, 4, 1e4), decades(20, -1, 1)),
    "nearly identical": (1.0 + 1e-9 * normal(15, 40), decades(15, -19, -16)),
    "ill-conditioned": (normal(15, 15) * decades(15, -6, 0), decades(15, -8, 0)),
    "variances over 16 decades": (normal(15, 20), decades(15, -8, 8)),
    "variances over 24 decades": (1e-3 * normal(15, 20), decades(15, -12, 12)),
    "no variance": (normal(10, 30), torch.zeros(10, dtype=torch.float64)),
    "single samples": (normal(12, 30), single_samples()),
    "duplicates": (with_duplicates(), decades(12, -1, 0)),
    "duplicates without variance": (with_duplicates(), torch.zeros(12, dtype=torch.float64)),
    "all equal": (torch.ones(6, 5, dtype=torch.float64), decades(6, -2, 0)),
    "zero means": (torch.zeros(6, 5, dtype=torch.float64), decades(6, -2, 0)),
    "all zero": (torch.zeros(6, 5, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)),
    "one outlier": (with_outlier(), decades(12, -1, 1)),
    "tiny": (1e-12 * normal(12, 30), 1e-24 * decades(12, -1, 1)),
    "huge": (1e12 * normal(12, 30), 1e24 * decades(12, -1, 1)),
}
each_problem = pytest.mark.parametrize(("mean_KP", "variance_K"), PROBLEMS.values(), ids=PROBLEMS)


def cost_matrix(mean_KP, variance_K, receiver: int) -> torch.Tensor:
    """`P_i` as it is defined, from differences."""
    difference_KP = mean_KP - mean_KP[receiver]
    return torch.diag(variance_K) + difference_KP @ difference_KP.T


def floored(mean_KP, variance_K) -> torch.Tensor:
    """Variances as they enter: none is less than 1e-12 of the spread of the means and of the least other."""
    spread = (mean_KP - mean_KP.mean(0)).square().sum(1).mean()
    positive = variance_K[variance_K > 0]
    least = 1e-12 * (spread + (positive.min() if len(positive) else 0.0))
    return torch.maximum(variance_K, least.clamp_min(1e-200))


def rounding(mean_KP) -> torch.Tensor:
    """What sums of squares of the centred means lose in float64."""
    return 1e-15 * (mean_KP - mean_KP.mean(0)).square().sum(1).max()


def objectives(mean_KP, variance_K, weights_KK) -> torch.Tensor:
    """Variance plus squared bias, term by term."""
    bias = [weights_K @ (mean_KP - mean_KP[i]) for i, weights_K in enumerate(weights_KK)]
    return (weights_KK.square() * variance_K).sum(1) + torch.stack(bias).square().sum(1)


def nnls_weights(mean_KP, variance_K, receiver: int) -> torch.Tensor:
    """The same programme as least squares with non-negative unknowns: `|| [B; s 1'] x - [0; s] ||`.

    `B' B = P_i`. With `x = t a`, a on the simplex, the best t leaves `q / (1 + q / s^2)`, which grows with
    `q = a' P_i a`: the best a is the answer, for any s.
    """
    difference_KP = mean_KP - mean_KP[receiver]
    rows = torch.cat([variance_K.sqrt().diag(), difference_KP.T])
    typical = rows.square().sum(0).mean().sqrt()
    system = torch.cat([rows / typical, torch.ones(1, len(mean_KP), dtype=torch.float64)]).numpy()
    target = np.zeros(len(system))
    target[-1] = 1.0
    solution, _ = nnls(system, target, maxiter=1000)
    return torch.from_numpy(solution / solution.sum())


@each_problem
def test_conditions_of_optimality(mean_KP, variance_K):
    """Every certificate is true: all conditions hold for `P_i` formed entry by entry from the inputs."""
    found = combination_weights(mean_KP, variance_K)
    used_K = floored(mean_KP, variance_K)
    largest = (mean_KP - mean_KP.mean(0)).square().sum(1).max()
    assert (found.residual_R <= 1e-8).all()
    assert (found.weights_RK >= 0).all()
    torch.testing.assert_close(found.weights_RK.sum(1), torch.ones(len(mean_KP)).double(), rtol=0, atol=1e-13)
    for i, a_K in enumerate(found.weights_RK):
        gradient_K = 2 * cost_matrix(mean_KP, used_K, i) @ a_K
        nu = a_K @ gradient_K
        scale = max(nu / 2, 1e-6 * largest)
        assert (nu - gradient_K).max() <= 1e-8 * scale
        assert (a_K * (gradient_K - nu)).abs().max() <= 1e-8 * scale
        assert abs(found.objective_R[i] - nu / 2) <= 1e-8 * scale


@each_problem
def test_against_nnls(mean_KP, variance_K):
    """No worse than an independent solver to nine digits, and the same weights where they are unique."""
    found = combination_weights(mean_KP, variance_K).weights_RK
    used_K = floored(mean_KP, variance_K)
    other = torch.stack([nnls_weights(mean_KP, used_K, i) for i in range(len(mean_KP))])
    ours, theirs = (objectives(mean_KP, used_K, weights) for weights in (found, other))
    assert (ours <= theirs * (1 + 1e-9) + rounding(mean_KP)).all()


@pytest.mark.parametrize("name", ["random", "clustered", "fewer entries than clients", "nearly identical"])
def test_weights_against_nnls(name):
    mean_KP, variance_K = PROBLEMS[name]
    other = torch.stack([nnls_weights(mean_KP, variance_K, i) for i in range(len(mean_KP))])
    torch.testing.assert_close(combination_weights(mean_KP, variance_K).weights_RK, other, rtol=0, atol=1e-8)


@each_problem
def test_own_weight_is_objective_over_variance(mean_KP, variance_K):
    """Row i of P_i is zero but for V_i: nobody drops its own classifier, nobody uses it alone."""
    found = combination_weights(mean_KP, variance_K)
    own_K = found.weights_RK.diagonal()
    used_K = floored(mean_KP, variance_K)
    torch.testing.assert_close(own_K, found.objective_R / used_K, rtol=1e-7, atol=1e-10)
    assert (own_K > 0).all()


def test_two_clients():
    """Distance 5: (V_2 + 25) / (V_1 + V_2 + 25) on the own one."""
    found = combination_weights(numbers(0, 0, 3, 4).reshape(2, 2), numbers(3, 2)).weights_RK
    torch.testing.assert_close(found, numbers(27, 3, 2, 28).reshape(2, 2) / 30, rtol=1e-14, atol=0)


def test_equal_means_share_by_precision():
    variance_K = decades(7, -12, 12)
    found = combination_weights(7.0 + torch.zeros(7, 3, dtype=torch.float64), variance_K).weights_RK
    share_K = (1 / variance_K) / (1 / variance_K).sum()
    torch.testing.assert_close(found, share_K.expand(7, -1), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("variance", [0.0, 2.5])
def test_identical_clients_are_uniform(variance):
    found = combination_weights(numbers(1, 2, 3).expand(5, -1), torch.full((5,), variance))
    torch.testing.assert_close(found.weights_RK, torch.full((5, 5), 0.2, dtype=torch.float64))
    assert (found.residual_R <= 1e-15).all()


@pytest.mark.parametrize("variance", [1e-7, 1e-9, 0.0])
def test_without_variance_everyone_keeps_its_own(variance):
    """`1 - a_ii` falls with V_i, in proportion."""
    found = combination_weights(normal(8, 30), torch.full((8,), variance)).weights_RK
    rest_K = found.sum(1) - found.diagonal()
    assert (rest_K <= max(variance, 1e-9)).all()


def test_shift_scale_and_unit():
    mean_KP, variance_K = PROBLEMS["clustered"]
    found = combination_weights(mean_KP, variance_K).weights_RK
    for scale in (1e-12, 3.0, 1e12, 1e-90, 1e140):
        changed = combination_weights(scale * mean_KP, scale * (scale * variance_K))
        torch.testing.assert_close(changed.weights_RK, found, rtol=0, atol=1e-11)
    shifted = combination_weights(mean_KP + 100 * normal(1, 30, seed=9), variance_K)
    torch.testing.assert_close(shifted.weights_RK, found, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["random", "clustered", "fewer entries than clients", "duplicates"])
def test_permuted_clients(name):
    mean_KP, variance_K = PROBLEMS[name]
    order = torch.randperm(len(mean_KP), generator=torch.Generator().manual_seed(3))
    found = combination_weights(mean_KP, variance_K).weights_RK
    permuted = combination_weights(mean_KP[order], variance_K[order]).weights_RK
    torch.testing.assert_close(permuted, found[order][:, order], rtol=0, atol=1e-10)


def test_combining_never_costs_and_more_clients_help():
    mean_KP, variance_K = PROBLEMS["clustered"]
    full = combination_weights(mean_KP, variance_K)
    fewer = combination_weights(mean_KP[:-3], variance_K[:-3])
    uniform = torch.full((20, 20), 1 / 20, dtype=torch.float64)
    assert (full.objective_R <= variance_K).all()
    assert (full.objective_R <= objectives(mean_KP, variance_K, uniform)).all()
    assert (full.objective_R[:-3] <= fewer.objective_R * (1 + 1e-12)).all()


def test_a_duplicate_shares_equally():
    mean_KP, variance_K = PROBLEMS["random"][0], 30 * PROBLEMS["random"][1]
    alone = combination_weights(mean_KP, variance_K).weights_RK
    twice = combination_weights(mean_KP[[*range(12), 2]], variance_K[[*range(12), 2]]).weights_RK[:12]
    others = torch.arange(12) != 2
    torch.testing.assert_close(twice[others, 2], twice[others, 12], rtol=0, atol=1e-12)
    assert (twice[:, 2] + twice[:, 12] >= alone[:, 2] - 1e-12).all()
    assert ((twice[:, 2] + twice[:, 12])[others] > alone[others, 2] + 1e-3).any()


def test_weight_stays_in_the_group():
    """Five groups, 20 clients, little noise: at least 0.99 of every row on the four of its own group."""
    mean_KP = clustered(20, 30, 5, 30.0)
    found = combination_weights(mean_KP, torch.full((20,), 30.0)).weights_RK
    same = torch.arange(20)[:, None] % 5 == torch.arange(20) % 5
    assert ((found * same).sum(1) >= 0.99).all()
    assert (found[same].reshape(20, 4) > 0.05).all()


@each_problem
def test_a_start_changes_nothing(mean_KP, variance_K):
    cold = combination_weights(mean_KP, variance_K)
    used_K = floored(mean_KP, variance_K)
    for start_RK in (cold.weights_RK, normal(*cold.weights_RK.shape, seed=5), cold.weights_RK.flip(1)):
        warm = combination_weights(mean_KP, variance_K, start_RK=start_RK)
        assert (warm.residual_R <= 1e-8).all()
        moved = objectives(mean_KP, used_K, warm.weights_RK) - cold.objective_R
        assert (moved.abs() <= 1e-9 * cold.objective_R + rounding(mean_KP)).all()
    if len(mean_KP) > 2:
        torch.testing.assert_close(warm.weights_RK, cold.weights_RK, rtol=0, atol=1e-6)


def test_a_good_start_needs_no_gradient_steps():
    mean_KP, variance_K = PROBLEMS["clustered"]
    cold = combination_weights(mean_KP, variance_K)
    warm = combination_weights(mean_KP, variance_K, start_RK=cold.weights_RK)
    assert (cold.iterations_R >= simplex_qp.STEPS).all()
    assert (warm.iterations_R <= 1).all()


@pytest.mark.parametrize("name", ["random", "clustered", "single samples", "duplicates"])
def test_one_receiver_alone(name):
    """The batch is no more than its rows."""
    mean_KP, variance_K = PROBLEMS[name]
    together = combination_weights(mean_KP, variance_K)
    for i in range(len(mean_KP)):
        alone = combination_weights(mean_KP, variance_K, receivers_R=torch.tensor([i]))
        torch.testing.assert_close(alone.weights_RK[0], together.weights_RK[i], rtol=0, atol=1e-9)
        assert float(alone.residual_R) <= 1e-8


def test_a_start_with_nothing_positive():
    """Such as weights of before, none of them on today's participants."""
    mean_KP, variance_K = PROBLEMS["clustered"]
    cold = combination_weights(mean_KP, variance_K)
    warm = combination_weights(mean_KP, variance_K, start_RK=-torch.eye(20))
    torch.testing.assert_close(warm.weights_RK, cold.weights_RK, rtol=0, atol=1e-10)


def test_receivers_keep_their_order():
    mean_KP, variance_K = PROBLEMS["random"]
    some = torch.tensor([7, 0, 7])
    found = combination_weights(mean_KP, variance_K, receivers_R=some).weights_RK
    torch.testing.assert_close(found, combination_weights(mean_KP, variance_K).weights_RK[some])


def test_float32_means_per_class():
    """`[K, C, D]` in float32 is read as it is and computed in float64; the inputs are left alone."""
    mean_KCD = (50.0 + normal(6, 3, 5)).float()
    variance_K = decades(6, -1, 0).float()
    before = mean_KCD.clone(), variance_K.clone()
    found = combination_weights(mean_KCD, variance_K)
    wide = combination_weights(mean_KCD.double().flatten(1), variance_K.double())
    assert found.weights_RK.dtype == torch.float64
    assert torch.equal(found.weights_RK, wide.weights_RK)
    assert torch.equal(mean_KCD, before[0]) and torch.equal(variance_K, before[1])


def test_every_support_of_a_small_problem():
    """Exhaustive: the best of all supports, each solved by itself, for every receiver of five."""
    mean_KP, variance_K = normal(5, 2), decades(5, -1, 0)
    found = combination_weights(mean_KP, variance_K)
    for i in range(5):
        costs = cost_matrix(mean_KP, variance_K, i)
        best = math.inf
        for size in range(1, 6):
            for support in itertools.combinations(range(5), size):
                y = torch.linalg.solve(costs[support, :][:, support], torch.ones(size, dtype=torch.float64))
                if (y >= 0).all():
                    best = min(best, 1 / float(y.sum()))
        assert float(found.objective_R[i]) == pytest.approx(best, rel=1e-12)


SETTINGS = {
    "one client at a time": (pivoting, "MAX_EXCHANGES", 1),
    "one system at a time": (pivoting, "CHUNK_ENTRIES", 1),
    "all supports are too large": (simplex_qp, "CHEAP_SUPPORT", 0),
    "no gradient steps to speak of": (simplex_qp, "STEPS", 1),
}


@pytest.mark.parametrize(("module", "name", "value"), SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("problem", ["random", "clustered", "fewer entries than clients", "duplicates"])
def test_the_way_to_the_answer_does_not_matter(module, name, value, problem, monkeypatch):
    mean_KP, variance_K = PROBLEMS[problem]
    usual = combination_weights(mean_KP, variance_K).weights_RK
    monkeypatch.setattr(module, name, value)
    found = combination_weights(mean_KP, variance_K)
    assert (found.residual_R <= 1e-8).all()
    torch.testing.assert_close(found.weights_RK, usual, rtol=0, atol=1e-9)


def test_problems_on_which_exchanging_many_cycles(monkeypatch):
    """76 clients in 10 dimensions, variances over eight decades: row 5 settles only by descending."""
    mean_KP, variance_K = clustered(76, 10, 45, 420.0, seed=11), decades(76, -8, 0, seed=11)
    assert (combination_weights(mean_KP, variance_K).residual_R <= 1e-8).all()
    monkeypatch.setattr(pivoting, "descend", lambda problem, start_RK: pivoting.Solved(start_RK, None, 0))
    assert (combination_weights(mean_KP, variance_K).residual_R > 1e-8).any()


def test_gradient_steps_converge_by_themselves(monkeypatch):
    """Nothing solved for: the same answer."""
    mean_KP, variance_K = clustered(20, 30, 4, 3.0), torch.full((20,), 5.0)
    usual = combination_weights(mean_KP, variance_K)
    monkeypatch.setattr(simplex_qp, "CHEAP_SUPPORT", 0)
    monkeypatch.setattr(simplex_qp, "MAX_STEPS", 2000)
    found = combination_weights(mean_KP, variance_K)
    assert (found.gap_R <= 1e-12 * found.objective_R).all()
    assert (found.iterations_R % simplex_qp.STEPS == 0).all()
    torch.testing.assert_close(found.weights_RK, usual.weights_RK, rtol=0, atol=1e-9)


def unsolvable(problem, weights_RK):
    """As if every system were singular."""
    return torch.full_like(weights_RK, math.nan), torch.ones_like(problem.receiver_R)


def test_unfinished_rows_are_reported_not_hidden(monkeypatch):
    mean_KP, variance_K = PROBLEMS["fewer entries than clients"]
    best = combination_weights(mean_KP, variance_K).objective_R
    monkeypatch.setattr(simplex_qp, "MAX_STEPS", simplex_qp.STEPS)
    monkeypatch.setattr(simplex_qp, "solve_exactly", unsolvable)
    found = combination_weights(mean_KP, variance_K)
    assert (found.residual_R > 1e-6).any()
    assert (found.objective_R - best <= found.gap_R * (1 + 1e-9) + 1e-15).all()
    torch.testing.assert_close(found.weights_RK.sum(1), torch.ones(40).double(), rtol=0, atol=1e-12)
    worst = int(found.residual_R.argmax())
    with pytest.raises(RaypflError, match=rf"client c{worst} .* scaled residual \d.* of 40 clients fail"):
        require_certified(found, names=[f"c{k}" for k in range(40)])


def test_certified_weights_pass():
    found = combination_weights(*PROBLEMS["random"])
    assert require_certified(found) is found.weights_RK


def test_a_residual_that_is_not_a_number_is_not_certified():
    ones = torch.ones(2, dtype=torch.float64)
    found = Combination(torch.eye(2), ones, ones, numbers(0.0, math.nan), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RaypflError, match="client 1 .* 1 of 2"):
        require_certified(found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_means_must_be_finite(value):
    mean_KP = normal(4, 3)
    mean_KP[2, 1] = value
    with pytest.raises(DataError, match=r"row 2 \(of 4\): .* feature means is (nan|inf); it must be finite"):
        combination_weights(mean_KP, torch.ones(4))


@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (math.inf, "inf"), (-0.5, "-0.5")])
def test_variances_must_be_finite_and_not_negative(value, said):
    with pytest.raises(DataError, match=rf"row 1 \(of 3\): the variance is {said}; it must be"):
        combination_weights(normal(3, 2), numbers(1.0, value, 1.0))


def test_a_variance_that_rounding_made_negative_is_zero():
    mean_KP = normal(3, 2)
    zero = combination_weights(mean_KP, numbers(1.0, 0.0, 1.0)).weights_RK
    assert torch.equal(combination_weights(mean_KP, numbers(1.0, -1e-16, 1.0)).weights_RK, zero)


@pytest.mark.parametrize(("means", "variances"), [((0, 3), 0), ((3, 2), 4), ((3, 2), 1)])
def test_shapes_must_agree(means, variances):
    with pytest.raises(ShapeError, match="feature means"):
        combination_weights(torch.zeros(means), torch.ones(variances))


@pytest.mark.parametrize("start", [torch.ones(3, 2), torch.full((3, 3), math.nan)], ids=["shape", "nan"])
def test_a_start_must_fit(start):
    with pytest.raises(ShapeError, match=r"start has shape .* expected \[3, 3\]"):
        combination_weights(normal(3, 2), torch.ones(3), start_RK=start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    mean_KP, variance_K = PROBLEMS["clustered"]
    found = combination_weights(mean_KP.cuda(), variance_K.cuda())
    assert found.weights_RK.is_cuda
    torch.testing.assert_close(
        found.weights_RK.cpu(), combination_weights(mean_KP, variance_K).weights_RK, rtol=0, atol=1e-10
    )
