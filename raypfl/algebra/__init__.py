"""Matrix algebra over rows of models: distances, mixing, weighted means. Torch only."""

from raypfl.algebra.distances import (
    all_rows_equal,
    pairwise_distances,
    pairwise_similarities,
    row_distances,
)
from raypfl.algebra.masks import largest, overlaps, pack_bits, unpack_bits
from raypfl.algebra.mixing import mix, pull_together, replace_rows, rows_of, weighted_mean
from raypfl.algebra.simplex import project_onto_simplex
from raypfl.algebra.simplex_qp import Combination, combination_weights, require_certified

__all__ = [
    "Combination",
    "all_rows_equal",
    "combination_weights",
    "largest",
    "mix",
    "overlaps",
    "pack_bits",
    "pairwise_distances",
    "pairwise_similarities",
    "project_onto_simplex",
    "pull_together",
    "replace_rows",
    "row_distances",
    "rows_of",
    "require_certified",
    "unpack_bits",
    "weighted_mean",
]
