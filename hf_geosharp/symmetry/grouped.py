"""Products of groups of rows with a matrix for each group, as mixtures of experts compute them, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

GROUPED = tuple(
    f for f in (getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None
)
"""The functions that do it at one go, in single and half precision only."""


def written_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """The same product, one group after the other, in any precision; None for other functions or other forms.

    ``mat_a`` is (rows, in), ``mat_b`` (groups, in, out), ``offs`` (groups,) where each group ends; rows after the
    last group are zero.
    """
    if func not in GROUPED or len(args) != 2 or {k for k, v in kwargs.items() if v is not None} != {"offs"}:
        return None
    rows: Tensor = args[0]
    matrices: Tensor = args[1]
    ends: Tensor = kwargs["offs"]
    if rows.ndim != 2 or matrices.ndim != 3:
        return None
    parts, start = [], 0
    for index, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(rows[start:end] @ matrices[index])
        start = max(start, end)
    rest = len(rows) - start
    if rest:
        parts.append(rows.new_zeros(rest, matrices.shape[-1]))
    return torch.cat(parts) if parts else rows.new_zeros(0, matrices.shape[-1])
