"""Local training over rows: networks bound to rows, cohorts of clients, losses and optimizers."""

from raypfl.training.batches import Batch, Samples
from raypfl.training.cohort import ClientData, Cohort, Fit
from raypfl.training.config import TrainingConfig
from raypfl.training.losses import (
    cross_entropy,
    cross_entropy_per_sample,
    divergence_of_logs,
    divergence_per_sample,
    log_probabilities,
)
from raypfl.training.network import Network, Rows
from raypfl.training.optim import SGD, Adam, AdamW, Moments
from raypfl.training.two_heads import TwoHeads, fit_two_heads

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Batch",
    "ClientData",
    "Cohort",
    "Fit",
    "Moments",
    "Network",
    "Rows",
    "Samples",
    "TrainingConfig",
    "TwoHeads",
    "cross_entropy",
    "cross_entropy_per_sample",
    "divergence_of_logs",
    "divergence_per_sample",
    "fit_two_heads",
    "log_probabilities",
]
