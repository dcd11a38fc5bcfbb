"""What the oldest libraries that are supported cannot do, for tests that need it."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn import functional

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])

needs_fully_shard = pytest.mark.skipif(TORCH < (2, 6), reason="fully_shard came with torch 2.6")

needs_grouped_attention = pytest.mark.skipif(
    TORCH < (2, 5), reason="torch's own attention knows grouped queries from 2.5 on"
)


def _sampling_has_a_second_derivative() -> bool:
    image, grid = torch.ones(1, 1, 2, 2, requires_grad=True), torch.zeros(1, 1, 1, 2, requires_grad=True)
    (first,) = torch.autograd.grad(
        functional.grid_sample(image, grid, align_corners=False).sum(), grid, create_graph=True
    )
    try:
        torch.autograd.grad(first.sum(), image)
    except RuntimeError:
        return False
    return True


needs_sampling = pytest.mark.skipif(
    not _sampling_has_a_second_derivative(), reason="torch 2.4 has no second derivative of grid_sample"
)
