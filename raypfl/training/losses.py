"""Per-sample losses of K models at once, and the objective most methods start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from raypfl.training.batches import Batch
    from raypfl.training.network import Rows


def cross_entropy_per_sample(logits_KBC: Tensor, y_KB: Tensor) -> Tensor:
    """Softmax cross-entropy (natural logarithm) of every sample, `[K, B]`."""
    # Not classes last: for the few classes there are, a CPU sums over that axis without vector instructions.
    return F.cross_entropy(logits_KBC.transpose(1, 2), y_KB, reduction="none")


def cross_entropy(m: Rows, batch: Batch) -> Tensor:
    """The objective F_i: mean cross-entropy of each model on its own batch, `[K]`."""
    return batch.mean(cross_entropy_per_sample(m(batch.x), batch.y))


def divergence_per_sample(peer_KBC: Tensor, logits_KBC: Tensor) -> Tensor:
    """KL(softmax(peer) || softmax(logits)) of every sample, in nats, `[K, B]`; the peer gets no gradient."""
    peer = peer_KBC.detach().log_softmax(2)
    return (peer.exp() * (peer - logits_KBC.log_softmax(2))).sum(2)
