"""What of a gradient lies in some rows of a parameter."""

from __future__ import annotations

import pytest
import torch

from hf_geosharp.sharpness.loose import lies_in


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_in_other_rows_are_seen_whatever_the_width(dtype: torch.dtype, width: int) -> None:
    """Pairs of single-precision numbers are counted as one word, where rows are whole words."""
    rows, wanted = torch.zeros(9, width, dtype=dtype), torch.tensor([1, 4])
    rows[wanted] = 1.0
    for given in (rows, rows.T.contiguous().T):  # also as transposed weights have it
        assert lies_in(given, wanted)
        for column in range(width):
            other = given.clone()
            other[7, column] = torch.finfo(dtype).tiny / 2
            assert not lies_in(other, wanted)
