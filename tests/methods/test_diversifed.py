"""DiversiFed's server step against the loss it descends, and its closed-form properties.

Names T1 to T15 are those of the derivation: T1 rows of C sum to one, T2 two clients, T3 equidistant clients,
T4 vanishing step or temperature, T5 pull prevails, T6 bounded movement, T7 invariances, T8 limits of tau,
T9 values of the loss, T10 three clients, T11 gradient, T12 sign rule, T13 lambda = 0 (in test_cross), T14
quadratic objectives (in test_diversifed_rounds), T15 difference of the two forms.
"""

# K models, P parameters; n = K - 1.

import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from raypfl.algebra import pairwise_distances, pull_together
from raypfl.methods import diversifed
from raypfl.methods.diversifed import Config, DiversiFed, attraction

FORMS = ["net", "balanced"]
VARIANTS = [
    Config(form=form, coupling=coupling, reduction=reduction, distance=distance, tau=0.7)
    for form, coupling, reduction, distance in itertools.product(
        FORMS, ["own", "joint"], ["mean", "sum"], ["plain", "squared"]
    )
]

every_variant = pytest.mark.parametrize(
    "config", VARIANTS, ids=lambda c: f"{c.form}-{c.coupling}-{c.reduction}-{c.distance}"
)
both_forms = pytest.mark.parametrize("form", FORMS)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def models(num_models: int = 5, num_parameters: int = 6, scale: float = 0.7, seed: int = 0):
    return scale * normal(num_models, num_parameters, seed=seed)


def equidistant(num_models: int, distance: float):
    return distance / 2**0.5 * torch.eye(num_models, dtype=torch.float64)


def on_a_line(*places: float):
    return torch.tensor(places, dtype=torch.float64)[:, None]


def server_step(w_KP, config, eta=1.0):
    return pull_together(attraction(pairwise_distances(w_KP), config, eta), w_KP)


def coefficients(w_KP, config, eta=1.0):
    a_KK = attraction(pairwise_distances(w_KP), config, eta)
    return a_KK + torch.diag(1 - a_KK.sum(1))


def others(i: int, num_models: int) -> list[int]:
    return [j for j in range(num_models) if j != i]


def loss(w_KP, i, config):
    """R_i as the module's docstring has it."""
    measure_n = (w_KP[others(i, len(w_KP))] - w_KP[i]).square().sum(1)
    if config.distance == "plain":
        measure_n = measure_n.sqrt()
    pull = measure_n.mean() * (1 if config.form == "net" else config.tau)
    value = pull - torch.logsumexp(config.tau * measure_n, 0)
    return value * len(measure_n) if config.reduction == "sum" else value


def gradient(w_KP, config):
    """Of R_i with the other models held still (own), or of the sum of all R_i (joint), row by row."""
    leaf = w_KP.clone().requires_grad_()
    rows = range(len(w_KP))
    if config.coupling == "joint":
        return torch.autograd.grad(sum(loss(leaf, i, config) for i in rows), leaf)[0]
    return torch.stack([torch.autograd.grad(loss(leaf, i, config), leaf)[0][i] for i in rows])


@every_variant
def test_step_descends_the_gradient(config):
    """T11, by automatic differentiation."""
    w_KP = models()
    expected = w_KP - 0.3 * gradient(w_KP, config)
    assert (server_step(w_KP, config, 0.3) - expected).abs().max() < 1e-8


@every_variant
def test_step_agrees_with_finite_differences(config):
    """T11, without automatic differentiation: the slope along a random direction of one client."""
    w_KP, direction, h = models(), normal(6, seed=3), 1e-5
    moved = w_KP - server_step(w_KP, config)
    for i in range(len(w_KP)):
        ahead, behind = w_KP.clone(), w_KP.clone()
        ahead[i] += h * direction
        behind[i] -= h * direction
        felt = range(len(w_KP)) if config.coupling == "joint" else [i]
        slope = sum(loss(ahead, k, config) - loss(behind, k, config) for k in felt) / (2 * h)
        assert moved[i] @ direction == pytest.approx(float(slope), rel=1e-6, abs=1e-7)


def test_the_loss_above_has_the_values_of_the_derivation():
    """T9: -log n where distances are alike, less elsewhere; net adds (1 - tau) times the mean distance."""
    net, balanced = (Config(form=form, tau=0.7) for form in FORMS)
    alike, spread = equidistant(5, 3.0), models(5, 6, 3.0)
    assert loss(alike, 0, balanced) == pytest.approx(-math.log(4))
    assert loss(alike, 0, net) == pytest.approx(-math.log(4) + 0.3 * 3.0)
    assert all(loss(spread, i, balanced) < -math.log(4) for i in range(5))
    mean = (spread[1:] - spread[0]).norm(dim=1).mean()
    assert loss(spread, 0, net) == pytest.approx(float(loss(spread, 0, balanced) + 0.3 * mean))


@every_variant
@pytest.mark.parametrize("num_models", [2, 3, 8])
def test_rows_of_c_sum_to_one(config, num_models):
    """T1; so a constant vector added to all models is added to all anchors."""
    w_KP, constant = models(num_models), 10 * normal(1, 6, seed=4)
    torch.testing.assert_close(
        coefficients(w_KP, config).sum(1), torch.ones(num_models, dtype=torch.float64), rtol=0, atol=1e-12
    )
    shifted = server_step(w_KP + constant, config)
    torch.testing.assert_close(shifted, server_step(w_KP, config) + constant, rtol=0, atol=1e-11)


@both_forms
@pytest.mark.parametrize("tau", [0.5, 1.0, 1.5])
def test_two_clients(form, tau):
    """T2: nothing in the balanced form, `c_12 = eta (1 - tau) / d_12` in the net form; here d = 5."""
    c_KK = coefficients(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), Config(form=form, tau=tau), eta=2.0)
    pull = 2.0 * (1 - tau) / 5 if form == "net" else 0.0
    expected = torch.tensor([[1 - pull, pull], [pull, 1 - pull]], dtype=torch.float64)
    torch.testing.assert_close(c_KK, expected, rtol=0, atol=1e-14)


@both_forms
@pytest.mark.parametrize("tau", [0.5, 1.0, 1.1])
def test_equidistant_clients(form, tau):
    """T3: only the net form moves them, towards (tau < 1) or away from (tau > 1) their mean."""
    w_KP = equidistant(6, 2.0)
    share = 6 / 5 * 0.8 * (1 - tau) / 2.0 if form == "net" else 0.0
    expected = w_KP - share * (w_KP - w_KP.mean(0))
    torch.testing.assert_close(
        server_step(w_KP, Config(form=form, tau=tau), 0.8), expected, rtol=0, atol=1e-14
    )


@every_variant
def test_no_step_without_step_size(config):
    """T4."""
    assert torch.equal(coefficients(models(), config, eta=0.0), torch.eye(5, dtype=torch.float64))


@both_forms
def test_temperature_zero(form):
    """T4: pure attraction `eta / (n d_ij)` in the net form, nothing in the balanced form."""
    config = Config(form=form).model_copy(update={"tau": 0.0})
    a_KK = attraction(pairwise_distances(on_a_line(0, 1, 3)), config, 1.0)
    expected = torch.tensor([[0, 1 / 2, 1 / 6], [1 / 2, 0, 1 / 4], [1 / 6, 1 / 4, 0]], dtype=torch.float64)
    torch.testing.assert_close(a_KK, expected if form == "net" else 0 * expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "form, tau", [("balanced", 0.1), ("balanced", 1.0), ("balanced", 5.0), ("net", 0.5), ("net", 1.0)]
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_pull_prevails(form, tau, scale):
    """T5: `c_ii <= 1`."""
    for seed in range(20):
        a_KK = attraction(pairwise_distances(models(8, 5, scale, seed)), Config(form=form, tau=tau), 1.0)
        assert a_KK.sum(1).min() > -1e-12 / scale


def test_push_prevails_above_temperature_one_in_the_net_form():
    """T5 fails there, as it should."""
    a_KK = attraction(pairwise_distances(equidistant(4, 1.0)), Config(form="net", tau=1.1), 1.0)
    torch.testing.assert_close(a_KK.sum(1), torch.full((4,), -0.1, dtype=torch.float64), rtol=1e-9, atol=0)


def largest_step(form: str, eta: float, tau: float, n: int) -> float:
    if form == "balanced":
        return 2 * eta * tau * (1 - 1 / n)
    return eta * ((n - 1) / n + abs(1 / n - tau))


EXTREMES = {
    "alike": lambda: models(9, 20, 1.0),
    "tiny": lambda: models(9, 20, 1e-5),
    "huge": lambda: models(9, 20, 1e6),
    "outlier": lambda: torch.cat([models(8, 20, 1e-3), 1e6 * torch.ones(1, 20, dtype=torch.float64)]),
    "two_clusters": lambda: models(8, 20, 1e-4) + 50 * (torch.arange(8) % 2)[:, None],
    "all_scales": lambda: on_a_line(*(10.0**power for power in range(-4, 5))),
    "coincident": lambda: torch.cat([torch.zeros(4, 20, dtype=torch.float64), models(4, 20)]),
}


@both_forms
@pytest.mark.parametrize("tau", [0.05, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("place", EXTREMES)
def test_step_is_bounded_whatever_the_distances(form, tau, place):
    """T6."""
    w_KP = EXTREMES[place]()
    step_K = (server_step(w_KP, Config(form=form, tau=tau), 2.0) - w_KP).norm(dim=1)
    bound = largest_step(form, 2.0, tau, len(w_KP) - 1)
    assert step_K.isfinite().all()
    assert step_K.max() <= bound * (1 + 1e-9) + 1e-15 * w_KP.abs().max()


@both_forms
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_bound_is_reached(form, tau):
    """T6: pulled to the left by a near client, pushed to the left by a far one on the right."""
    w_KP = on_a_line(0, -1, 1000)
    step = (server_step(w_KP, Config(form=form, tau=tau), 3.0) - w_KP)[0, 0]
    assert step == pytest.approx(-largest_step(form, 3.0, tau, 2))


def test_only_joint_coupling_throws_out_an_outlier():
    """T6: 39 clients 7 sqrt 2 apart and one far from all: it moves by eta tau (n - 1) = 38, or not at all.

    The others contract by `eta tau / d` a step, about a tenth; joint coupling doubles that.
    """
    w_KP = torch.cat([7 * torch.eye(39, 40, dtype=torch.float64), torch.zeros(1, 40, dtype=torch.float64)])
    w_KP[39, 39] = 1e5
    contraction = 1 / (7 * 2**0.5)
    for coupling, step, rate in (("own", 0.0, contraction), ("joint", 38.0, 2 * contraction)):
        moved = server_step(w_KP, Config(form="balanced", coupling=coupling, tau=1.0))
        assert (moved - w_KP)[39].norm() == pytest.approx(step, abs=1e-6)
        assert 1 - (moved[0] - moved[1]).norm() / (w_KP[0] - w_KP[1]).norm() == pytest.approx(rate, rel=1e-3)


@every_variant
def test_invariances(config):
    """T7: translation and orthogonal maps leave C, a permutation of clients permutes it."""
    w_KP = models()
    c_KK = coefficients(w_KP, config)
    rotation = torch.linalg.qr(normal(6, 6, seed=5)).Q
    order = torch.tensor([3, 0, 4, 1, 2])
    for moved, expected in (
        (w_KP + 7.0, c_KK),
        (w_KP @ rotation, c_KK),
        (w_KP[order], c_KK[order][:, order]),
    ):
        torch.testing.assert_close(coefficients(moved, config), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("coupling", ["own", "joint"])
@pytest.mark.parametrize("distance, power", [("plain", 1), ("squared", 2)])
def test_balanced_form_has_no_unit_of_length(coupling, distance, power):
    """T7: `(k W, tau / k, k^2 eta)` leaves C; squared distances need `tau / k^2`. The net form has a unit."""
    k, w_KP = 4.0, models()

    def change(form):
        config = Config(form=form, coupling=coupling, distance=distance, tau=0.8)
        scaled = config.model_copy(update={"tau": config.tau / k**power})
        return (coefficients(k * w_KP, scaled, k**2 * 0.5) - coefficients(w_KP, config, 0.5)).abs().max()

    assert change("balanced") < 1e-12
    assert change("net") > 0.1


@both_forms
def test_low_temperature(form):
    """T8: the leading terms in tau are right, for what is left falls as tau^3."""
    distance_KK = pairwise_distances(on_a_line(0, 1, 3, 7))
    n = 3
    off_diagonal = ~torch.eye(4, dtype=torch.bool)

    def left_over(tau):
        mean_K1 = distance_KK.sum(1, keepdim=True) / n
        leading = tau**2 * (mean_K1 - distance_KK) + ((1 - tau) if form == "net" else 0.0)
        a_KK = attraction(distance_KK, Config(form=form, tau=tau), 1.0)
        return (a_KK - leading / (n * distance_KK))[off_diagonal].abs().max()

    assert left_over(1e-2) / left_over(5e-3) == pytest.approx(8, rel=0.1)


def test_high_temperature_pushes_the_farthest_alone():
    """T8: 1, 3 and 20 from client 0: `1 / (n d)` for the near ones, `(1 / n - 1) / d` for the last."""
    distance_KK = pairwise_distances(on_a_line(0, 1, 3, 20))
    a_K = attraction(distance_KK, Config(form="balanced", tau=10.0), 0.1)[0]
    expected = torch.tensor([0, 1 / 3, 1 / 9, -2 / 60], dtype=torch.float64)
    torch.testing.assert_close(a_K, expected, rtol=1e-12, atol=0)


@both_forms
def test_step_spreads_nearly_equal_distances(form):
    """T9: equidistance is where the balanced loss is largest; own steps leave it, in both forms."""
    w_KP = equidistant(5, 2.0) + 0.01 * normal(5, 5)

    def spread(rows):
        return (w_KP[1:] - rows[0]).norm(dim=1).var()

    config = Config(form=form, tau=1.0)
    assert spread(server_step(w_KP, config, 0.1)) > spread(w_KP)


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.1])
@both_forms
def test_three_clients(form, tau):
    """T10: `R_1 = -log 2 cosh(tau (d13 - d12) / 2)`, in the net form plus `(1 - tau) (d12 + d13) / 2`."""
    a_K = attraction(pairwise_distances(on_a_line(0, 1, -3)), Config(form=form, tau=tau), 1.0)[0]
    swing = tau / 2 * math.tanh(tau * (3 - 1) / 2)
    pull = (1 - tau) / 2 if form == "net" else 0.0
    torch.testing.assert_close(
        a_K,
        torch.tensor([0, (swing + pull) / 1, (pull - swing) / 3], dtype=torch.float64),
        rtol=1e-12,
        atol=0,
    )


@both_forms
@pytest.mark.parametrize("tau", [0.3, 0.5, 0.9, 1.2])
@pytest.mark.parametrize("distance", ["plain", "squared"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sign_rule(form, tau, distance, reduction):
    """T12, Lemma 1: attraction below a threshold distance, repulsion above it."""
    distance_KK = pairwise_distances(models(9, 4, 1.5))
    measure_KK = distance_KK if distance == "plain" else distance_KK.square()
    a_KK = attraction(distance_KK, Config(form=form, tau=tau, distance=distance, reduction=reduction), 1.0)
    for i in range(9):
        measure_n, a_n = measure_KK[i, others(i, 9)], a_KK[i, others(i, 9)]
        soft_mean = float((torch.logsumexp(tau * measure_n, 0) - math.log(8)) / tau)
        threshold = soft_mean - (math.log(tau) / tau if form == "net" else 0.0)
        assert torch.equal(a_n > 0, measure_n < threshold)


def test_coefficients_fall_with_distance():
    """Lemma 1."""
    a_K = attraction(pairwise_distances(on_a_line(0, 1, 2, 3, 5, 8)), Config(tau=0.9), 1.0)[0, 1:]
    assert (a_K.diff() < 0).all()
    assert a_K[0] > 0 > a_K[-1]


def test_nobody_is_repelled_below_one_over_n():
    """T12 of the net form: `p < 1 <= 1 / (n tau)`."""
    distance_KK = pairwise_distances(models(6, 4, 30.0))
    assert (attraction(distance_KK, Config(tau=0.2), 1.0) >= 0).all()
    assert (attraction(distance_KK, Config(tau=0.25), 1.0) < 0).any()


@pytest.mark.parametrize("coupling, times", [("own", 1), ("joint", 2)])
@pytest.mark.parametrize("reduction, terms", [("mean", 1), ("sum", 4)])
@pytest.mark.parametrize("distance", ["plain", "squared"])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_difference_of_the_forms(coupling, times, reduction, terms, distance, tau):
    """T15: `A_net = A_bal + eta (1 - tau) / (n D)`; a step with sums is n steps with means."""
    distance_KK = pairwise_distances(models())
    net, balanced = (
        attraction(
            distance_KK,
            Config(form=form, coupling=coupling, reduction=reduction, distance=distance, tau=tau),
            3.0,
        )
        for form in FORMS
    )
    slope = (
        1 / distance_KK.fill_diagonal_(torch.inf) if distance == "plain" else 2.0 * (distance_KK > 0).double()
    )
    torch.testing.assert_close(
        net - balanced, 3.0 * times * terms * (1 - tau) / 4 * slope, rtol=1e-10, atol=1e-12
    )


@every_variant
def test_joint_coupling_keeps_the_mean_model(config):
    """Its A is symmetric; own coupling keeps the mean only by accident."""
    w_KP = models()
    a_KK = attraction(pairwise_distances(w_KP), config, 1.0)
    drift = (server_step(w_KP, config) - w_KP).mean(0).norm()
    if config.coupling == "joint":
        assert torch.equal(a_KK, a_KK.T)
        assert drift < 1e-13
    else:
        assert drift > 1e-3


class TestCoincidentModels:
    def test_exert_no_force_but_count(self):
        """Clients 0 and 1 coincide; 2 and 3 are 3 and 4 from them and 5 apart. n stays 3."""
        w_KP = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
        a_KK = attraction(pairwise_distances(w_KP), Config(tau=0.5), 1.0)
        weight = {d: math.exp(0.5 * d) for d in (0, 3, 4, 5)}
        first = weight[0] + weight[3] + weight[4]
        third = 2 * weight[3] + weight[5]
        assert a_KK[0, 1] == a_KK[1, 0] == 0
        assert a_KK[0, 2] == pytest.approx((1 / 3 - 0.5 * weight[3] / first) / 3)
        assert a_KK[2, 0] == pytest.approx((1 / 3 - 0.5 * weight[3] / third) / 3)
        assert a_KK[2, 3] == pytest.approx((1 / 3 - 0.5 * weight[5] / third) / 5)
        assert torch.equal(a_KK[0, 2:], a_KK[1, 2:])

    @every_variant
    @pytest.mark.parametrize("scale", ["none", "median", "rms"])
    def test_are_no_trouble(self, config, scale):
        """Most participants still have the common start, when few take part in each round."""
        w_KP = torch.full((8, 50), 0.1)
        w_KP[7] += 0.01
        method = DiversiFed(config.model_copy(update={"distance_scale": scale}))
        a_KK = method.attraction(w_KP, 2)
        assert a_KK.isfinite().all()
        assert not a_KK[:7, :7].any()

    @every_variant
    def test_all_coincident_is_no_force_at_all(self, config):
        """Exactly, whatever the rounding of a mean of 40 equal rows."""
        w_KP = normal(1, 62_006).float().expand(40, -1)
        assert not DiversiFed(config).attraction(w_KP, 1).any()

    def test_equality_is_seen_in_the_rows(self, monkeypatch):
        """Where products of equal rows are summed in different orders, distances are noise, not zero."""
        noise = pairwise_distances(1e-8 * normal(4, 6))
        monkeypatch.setattr(diversifed, "pairwise_distances", lambda w_KP: noise)
        assert not DiversiFed(Config()).attraction(torch.ones(4, 6), 1).any()

    @both_forms
    def test_one_client(self, form):
        assert DiversiFed(Config(form=form)).attraction(torch.ones(1, 4), 1).tolist() == [[0.0]]
        assert attraction(torch.zeros(1, 1, dtype=torch.float64), Config(form=form), 1.0).tolist() == [[0.0]]


@pytest.mark.parametrize("coupling", ["own", "joint"])
def test_capped_pull_shrinks_all_forces_alike(coupling):
    """The cap is on the sum of a row, in which pushes count against pulls."""
    distance_KK = pairwise_distances(on_a_line(0, 1, 2, 3, 5))
    free, capped, loose = (
        attraction(distance_KK, Config(tau=0.9, coupling=coupling, max_pull=cap), 2.0)
        for cap in (None, 0.1, 1e3)
    )
    assert free.min() < 0 < 0.1 < free.sum(1).max()
    torch.testing.assert_close(capped, free * (0.1 / free.sum(1).max()), rtol=1e-12, atol=0)
    assert torch.equal(loose, free)


@pytest.mark.parametrize("scale, typical", [("median", 2.0), ("rms", math.sqrt(14 / 3))])
def test_scaled_distances_only_enter_the_softmax(scale, typical):
    """Places 0, 1 and 3: distances 1, 2 and 3. The balanced force keeps the factor tau in front."""
    distance_KK = pairwise_distances(on_a_line(0, 1, 3))
    scaled = attraction(distance_KK, Config(form="balanced", tau=0.8, distance_scale=scale), 1.0)
    plain = attraction(distance_KK, Config(form="balanced", tau=0.8 / typical), 1.0)
    torch.testing.assert_close(scaled, typical * plain, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 0},
        {"tau": -1},
        {"tau": 11},
        {"eta": 0},
        {"lam": -0.1},
        {"max_pull": 0},
        {"form": "nett"},
        {"temperature": 1},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        Config(**options)
