"""Rows and sparse weights that several tests of mixing use."""

import torch
from torch import Tensor

from raypfl.algebra import Csr, csr_from_pairs


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def neighbours(num_peers: int, degree: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every peer hears itself and `degree` others: receivers and senders, in no order."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.stack(
        [torch.randperm(num_peers - 1, generator=generator)[:degree] for _ in range(num_peers)]
    )
    everyone = torch.arange(num_peers)[:, None]
    senders = torch.cat([others + (others >= everyone).long(), everyone], 1)
    return everyone.expand_as(senders).flatten(), senders.flatten()


def mixing(num_peers: int, degree: int, seed: int = 0) -> Csr:
    """Row-stochastic weights with different entries."""
    receivers, senders = neighbours(num_peers, degree, seed)
    shares = torch.rand(num_peers, degree + 1, generator=torch.Generator().manual_seed(seed)) + 0.1
    values = shares.double() / shares.double().sum(1, keepdim=True)
    return csr_from_pairs(receivers, senders, values.flatten(), num_peers)
