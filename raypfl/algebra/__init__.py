"""Matrix algebra over rows of models: distances, mixing, weighted means. Torch only."""

from raypfl.algebra.csr import (
    Csr,
    csr_copying,
    csr_degrees,
    csr_from_dense,
    csr_from_pairs,
    csr_receivers,
    csr_row_sums,
    csr_take,
    csr_to_dense,
)
from raypfl.algebra.distances import (
    all_rows_equal,
    pairwise_distances,
    pairwise_similarities,
    row_distances,
    row_norms,
)
from raypfl.algebra.divergence import every_pair, jeffreys, jensen_shannon
from raypfl.algebra.masked_mean import masked_mean
from raypfl.algebra.masks import largest, overlaps, pack_bits, unpack_bits
from raypfl.algebra.mixing import mix, pull_together, replace_rows, rows_of, weighted_mean
from raypfl.algebra.quantizer import dequantize, quantize
from raypfl.algebra.simplex import project_onto_simplex
from raypfl.algebra.simplex_qp import Combination, combination_weights, require_certified
from raypfl.algebra.sparse_mixing import mix_groups, mix_sparse
from raypfl.algebra.sparse_training import erk_counts, erk_densities, exchange_counts, prune_and_regrow

__all__ = [
    "Combination",
    "Csr",
    "all_rows_equal",
    "combination_weights",
    "csr_copying",
    "csr_degrees",
    "csr_from_dense",
    "csr_from_pairs",
    "csr_receivers",
    "csr_row_sums",
    "csr_take",
    "csr_to_dense",
    "dequantize",
    "erk_counts",
    "erk_densities",
    "every_pair",
    "exchange_counts",
    "jeffreys",
    "jensen_shannon",
    "largest",
    "masked_mean",
    "mix",
    "mix_groups",
    "mix_sparse",
    "overlaps",
    "pack_bits",
    "pairwise_distances",
    "pairwise_similarities",
    "project_onto_simplex",
    "prune_and_regrow",
    "pull_together",
    "quantize",
    "replace_rows",
    "row_distances",
    "row_norms",
    "require_certified",
    "rows_of",
    "unpack_bits",
    "weighted_mean",
]
