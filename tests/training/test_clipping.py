"""Clipping of rows against `torch.nn.utils.clip_grad_norm_`, model by model."""

import torch

from raypfl.training.clipping import clip_by_norm


def test_each_row_is_clipped_as_torch_clips_a_model():
    scale = torch.tensor([1e-3, 1.0, 30.0, 0.0], dtype=torch.float64)[:, None]
    g = scale * torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for row in g:
        parts = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (3, 4)]
        for part, own in zip(parts, row.split([3, 4]), strict=True):
            part.grad = own.clone()
        torch.nn.utils.clip_grad_norm_(parts, 1.5)
        expected.append(torch.cat([part.grad for part in parts]))
    before = g.clone()
    clip_by_norm(g, 1.5)
    torch.testing.assert_close(g, torch.stack(expected), rtol=1e-14, atol=0)
    assert torch.equal(g[[0, 3]], before[[0, 3]]) and 1.49 < g[2].norm() <= 1.5
