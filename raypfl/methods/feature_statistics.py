"""Sums over a client's features, class by class, and what follows from them; one pass, in float64.

With the features z of the n samples of a client and `S_k` their sum over class k, the matrix `e_y z'` (one
row a class) has over these samples

    mean      h = (S_1; ...; S_C) / n,  so row k is the share of class k times its mean feature,
    variance  V = (sum ||z||^2 / n - ||h||^2) / n,  in total, of that mean.
"""

# K clients of a cohort, k of them in a batch, B samples a batch, C classes, D features.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from raypfl.training import Batch, Cohort, Network, Rows

Features = Callable[[Rows, Batch], Tensor]
"""The features `[k, B, D]` of a batch."""


class FeatureSums(NamedTuple):
    """Sums over the training samples of each client, float64."""

    sum_KCD: Tensor
    """Of features, by class; 0 for a class without samples."""
    square_K: Tensor
    """Of squared norms."""
    count_KC: Tensor
    """Samples of each class, int64."""

    def centroids(self) -> Tensor:
        """Mean feature of each class, `[K, C, D]`; 0 for a class without samples."""
        return self.sum_KCD / self.count_KC.clamp_min(1)[:, :, None]

    def mean(self) -> Tensor:
        """`h`, `[K, C, D]`."""
        return self.sum_KCD / self.count_KC.sum(1)[:, None, None]

    def variance(self) -> Tensor:
        """`V`, `[K]`; 0 for a client with one sample."""
        size_K = self.count_KC.sum(1)
        return (self.square_K / size_K - self.mean().square().sum((1, 2))).clamp_min(0.0) / size_K


def extracted(m: Rows, batch: Batch) -> Tensor:
    """Features that the models' extractors compute."""
    return m.features(batch.x)


def kept(m: Rows, batch: Batch) -> Tensor:
    """Features that were computed before, see `Cohort.on_features`."""
    return batch.x


def class_sums(z_kBD: Tensor, batch: Batch, num_classes: int) -> Tensor:
    """Sums of a batch's features by class, float64 `[k, C, D]`."""
    # A product with indicators: adding by label has no fixed order of summation on a GPU.
    label_kBC = torch.nn.functional.one_hot(batch.y, num_classes).double()
    if batch.mask is not None:
        label_kBC *= batch.mask[:, :, None]
    return label_kBC.transpose(1, 2) @ z_kBD.double()


def feature_sums(cohort: Cohort, w: Tensor, features: Features = extracted) -> FeatureSums:
    """Sums over one pass of each client's training samples, in evaluation mode.

    Args:
        cohort: the clients; with features in place of samples if `features` is `kept`.
        w: rows `[K, width]`.
        features: where features come from.
    """
    num_classes = cohort.data.num_classes

    def measure(m: Rows, batch: Batch) -> Tensor:
        z_kBD = features(m, batch)
        sum_kCD = class_sums(z_kBD, batch, num_classes)
        return torch.cat([sum_kCD.flatten(1), batch.sum(z_kBD.double().square().sum(2))[:, None]], 1)

    total = cohort.pass_over(w, measure)
    return FeatureSums(total[:, :-1].unflatten(1, (num_classes, -1)), total[:, -1], cohort.label_counts)


def mean_centroids(count_SC: Tensor, centroid_SCD: Tensor) -> Tensor:
    """`c_k = sum_i n_ik c_ik / sum_i n_ik`: `[1, C, D]` in the dtype of the centroids; 0 where nobody has k.

    Summed in float64, one class at a time.
    """
    total_C = count_SC.sum(0).clamp_min(1).double()
    parts = [
        (count_SC[:, label].double() @ centroid_SCD[:, label].double()) / total_C[label]
        for label in range(count_SC.shape[1])
    ]
    return torch.stack(parts)[None].to(centroid_SCD.dtype)


def num_features(net: Network, num_classes: int) -> int:
    """D: inputs of a head that is one linear layer; its weight is the first tensor of a row."""
    weight = net.tensors[0]
    return (weight.stop - weight.start) // num_classes
