"""Products of groups of rows with a matrix for each group, as mixtures of experts compute them, written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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


class _Doubles(TorchFunctionMode):
    """Writes out products in double precision."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Everything else runs as it is."""
        product = None
        if func in GROUPED and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            product = written_out(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if product is None else product


@contextmanager
def in_double_precision(model: nn.Module) -> Iterator[None]:
    """Experts in double precision can be run, which torch's own product does not know."""
    if not any(p.ndim == 3 and p.dtype == torch.float64 for p in model.parameters()):
        yield
        return
    with _Doubles():
        yield
