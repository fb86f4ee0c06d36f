"""The quadratic programmes of classifier collaboration: data, products, and the certificate of an answer.

Client i combines the K clients with weights `a` on the simplex that minimise

    F_i(a) = sum_j a_j^2 V_j + || h_i - sum_j a_j h_j ||^2 = a' P_i a,
    P_i[j, l] = V_j [j = l] + <h_j - h_i, h_l - h_i>

(FedPAC: Xu, Tong and Huang, Personalized Federated Learning with Feature Alignment and Classifier
Collaboration, ICLR 2023). No P_i is formed: with `G` the Gram matrix of the centred h,

    P_i[j, l] = V_j [j = l] + G[j, l] - G[i, j] - G[i, l] + G[i, i],

whose row and column i are zero but for V_i, so a product needs one row of G beside the shared product G a.
"""

# K clients, R of them receivers, P entries of a statistic.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.algebra.columns import column_blocks
from raypfl.errors import DataError, ShapeError

NEGLIGIBLE_VARIANCE = 1e-12
"""Least variance, over the mean squared distance to the centre: above the rounding errors of the Gram matrix,
so that every programme has one answer; also a client with one sample, whose variance is 0."""

NO_VARIANCE = 1e-200
"""Least variance where all clients are equal and none varies: the weights come out uniform."""

SCALE_FLOOR = 1e-6
"""Least scale of a residual, over the largest squared distance to the centre. Of smaller objectives the
rounding errors of the Gram matrix are more than a part in 1e8."""


class Problem(NamedTuple):
    """R programmes over one set of K clients."""

    gram_KK: Tensor
    """`G`: inner products of the centred statistics, float64, symmetric."""
    variance_K: Tensor
    """`V`: positive, float64."""
    receiver_R: Tensor
    """`i`: the client whose programme a row is, int64."""

    def narrow(self, rows: Tensor) -> Problem:
        """These programmes alone."""
        return self._replace(receiver_R=self.receiver_R[rows])

    def own_gram(self) -> tuple[Tensor, Tensor]:
        """`G[i, :]` as `[R, K]` and `G[i, i]` as `[R, 1]`."""
        own_RK = self.gram_KK[self.receiver_R]
        return own_RK, own_RK.gather(1, self.receiver_R[:, None])

    def costs(self, weights_RK: Tensor) -> Tensor:
        """`P_i a` for every row. The weight on the receiver itself meets V_i alone.

        Left out of the products, it costs no digits where V_i is far below the distances and a_i near 1.
        """
        receiver_R1 = self.receiver_R[:, None]
        own_RK, square_R1 = self.own_gram()
        others_RK = weights_RK.scatter(1, receiver_R1, 0.0)
        mass_R1 = others_RK.sum(1, keepdim=True)
        product_RK = others_RK @ self.gram_KK
        bias_RK = product_RK - product_RK.gather(1, receiver_R1) - (own_RK - square_R1) * mass_R1
        return self.variance_K * weights_RK + bias_RK.scatter_(1, receiver_R1, 0.0)


class Certificate(NamedTuple):
    """What is known about the distance of weights to the optimum, from them alone."""

    objective_R: Tensor
    """`F_i(a)`."""
    gap_R: Tensor
    """Duality gap: at least `F_i(a) - min F_i`, in the units of the objective."""
    residual_R: Tensor
    """Largest violation of the optimality conditions, over the row's objective."""


def certify(problem: Problem, weights_RK: Tensor) -> Certificate:
    """Judge weights by the optimality conditions alone, whatever produced them.

    With `g = grad F_i(a)` and `nu = <a, g>`: the gap is `max_j (nu - g_j)`, the residual the largest of the
    gap, `a_j |g_j - nu|` (both over `F_i(a)`, or over SCALE_FLOOR of the largest squared distance where
    that is more), `|sum a - 1|` and `max_j -a_j`.
    """
    gradient_RK = 2.0 * problem.costs(weights_RK)
    nu_R1 = (weights_RK * gradient_RK).sum(1, keepdim=True)
    gap_R = (nu_R1 - gradient_RK).amax(1).clamp_min(0.0)
    slack_R = (weights_RK * (gradient_RK - nu_R1)).abs().amax(1)
    objective_R = 0.5 * nu_R1[:, 0]
    floor = SCALE_FLOOR * problem.gram_KK.diagonal().amax()
    residual_R = torch.maximum(gap_R, slack_R) / torch.maximum(objective_R, floor)
    for violation_R in ((weights_RK.sum(1) - 1.0).abs(), -weights_RK.amin(1)):
        residual_R = torch.maximum(residual_R, violation_R)
    return Certificate(objective_R, gap_R, residual_R)


def read_statistics(mean_KP: Tensor, variance_K: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix of the centred statistics and usable variances, both float64, checked.

    A variance that rounding made negative counts as zero. Every variance is at least NEGLIGIBLE_VARIANCE of
    the mean squared distance to the centre and of the smallest positive variance, together.

    Raises:
        ShapeError: no client, or the two arguments disagree in K.
        DataError: an entry that is not finite or a negative variance; names the row.
    """
    num_clients = len(mean_KP)
    if num_clients == 0 or variance_K.shape != (num_clients,):
        raise ShapeError(
            f"classifier collaboration: feature means {list(mean_KP.shape)} and variances "
            f"{list(variance_K.shape)} must hold one row and one number for each of at least one client."
        )
    mean_KP = mean_KP.flatten(1)
    gram_KK = mean_KP.new_zeros(num_clients, num_clients, dtype=torch.float64)
    norm_K = mean_KP.new_zeros(num_clients, dtype=torch.float64)
    for columns in column_blocks(mean_KP.shape[1]):
        # A copy also of float64 rows: it is centred in place.
        part = mean_KP[:, columns].to(torch.float64, copy=True)
        norm_K += torch.linalg.vector_norm(part, dim=1).square()
        part -= part.mean(0)
        gram_KK.addmm_(part, part.T)
    _refuse(~norm_K.isfinite(), "sum of squares of the feature means", norm_K, "finite")
    variance_K = variance_K.double()
    _refuse(~variance_K.isfinite(), "variance", variance_K, "finite")
    rounding_K = NEGLIGIBLE_VARIANCE * norm_K
    _refuse(variance_K < -rounding_K, "variance", variance_K, "at least 0")
    variance_K = variance_K.clamp_min(0.0)
    positive = variance_K[variance_K > 0.0]
    smallest = positive.min() if len(positive) else variance_K.new_zeros(())
    least = (NEGLIGIBLE_VARIANCE * (gram_KK.diagonal().mean() + smallest)).clamp_min(NO_VARIANCE)
    return 0.5 * (gram_KK + gram_KK.T), torch.maximum(variance_K, least)


def _refuse(wrong_K: Tensor, what: str, value_K: Tensor, must: str) -> None:
    """Name the first row that is marked as wrong.

    Raises:
        DataError: a row is marked.
    """
    if bool(wrong_K.any()):
        row = int(wrong_K.to(torch.uint8).argmax())
        raise DataError(
            f"classifier collaboration: row {row} (of {len(wrong_K)}): the {what} is "
            f"{float(value_K[row]):g}; it must be {must}. Check what this client uploaded."
        )
