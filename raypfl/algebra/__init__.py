"""Matrix algebra over rows of models: distances, mixing, weighted means. Torch only."""

from raypfl.algebra.distances import all_rows_equal, pairwise_distances, pairwise_similarities
from raypfl.algebra.mixing import pull_together, replace_rows, weighted_mean

__all__ = [
    "all_rows_equal",
    "pairwise_distances",
    "pairwise_similarities",
    "pull_together",
    "replace_rows",
    "weighted_mean",
]
