"""Calls that keep features apart: each feature of what they return is made of the same feature of what they read.

Rows that are picked, repeated, put in another order, averaged, summed or multiplied scale with the weight of the norm
that wrote them, as the norm's output itself does. Whether a call is such a one is tried: it is made again on rows that
have the number of its place in every feature, and on rows of ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_geosharp.symmetry.tracing.recorded import mapped

COPIES = {
    Tensor.contiguous, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.clone, torch.clone,
    Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
}  # fmt: skip
"""What returns the same numbers; of further arguments no number is read."""

LIKE = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
"""What reads the shape and the type of a tensor, but none of its numbers."""

FINITE = {torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf, torch.isfinite, Tensor.isfinite}
"""What asks of each number whether it is one: no multiple of it says otherwise."""

LINEAR = {
    Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.gather, Tensor.gather, torch.take_along_dim,
    Tensor.take_along_dim, torch.repeat_interleave, Tensor.repeat_interleave, Tensor.repeat, torch.tile, Tensor.tile,
    torch.flip, Tensor.flip, torch.roll, Tensor.roll, torch.cat, torch.concat, torch.stack, *COPIES,
    torch.mean, Tensor.mean, torch.sum, Tensor.sum, functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d,
    torch.adaptive_avg_pool1d, functional.avg_pool1d, functional.avg_pool2d, torch.avg_pool1d,
    torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__,
    torch.div, torch.divide, Tensor.div, Tensor.divide, Tensor.__truediv__,
    torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__,
    torch.einsum, torch.functional.einsum, functional.pad, torch.masked_fill, Tensor.masked_fill, torch.where,
    Tensor.where,
}  # fmt: skip
"""Functions that are linear in each of their arguments (but for divisors); others are not tried."""

TIMES = {
    torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__,
    torch.div, torch.divide, Tensor.div, Tensor.divide, Tensor.__truediv__, torch.sum, Tensor.sum,
}  # fmt: skip
"""What multiplies rows by other tensors, or adds up how many there are; numbers may be one in an example alone."""

CHOOSING = {torch.masked_fill, Tensor.masked_fill, torch.where, Tensor.where}
"""What takes rows or something else in their place, as a mask says; it may say otherwise on other inputs."""

CLOSE = 1e-9


def features_of(x: Tensor, count: int, stride: int) -> int | None:
    """The axis of ``x`` that counts the ``count`` features, which lie ``stride`` apart in its memory."""
    axes = [a for a in range(x.ndim) if x.stride(a) == stride and x.shape[a] == count > 1]
    return axes[0] if len(axes) == 1 else None


def keeps_apart(func: Callable[..., Any], args: Any, kwargs: Any, x: Tensor, axis: int) -> tuple[int, bool] | None:
    """Of a call that keeps the features of ``x`` apart: the axis of its own, and whether rows are taken as they are.

    ``axis`` counts the features of ``x``. As they are: picked or averaged, not multiplied, masked or summed, even if
    it is by ones here. None where the features of the result, one tensor, are not those of ``x``, each times numbers
    that do not depend on it.
    """
    if func not in LINEAR or (len(args) == 2 and args[1] is x and "div" in getattr(func, "__name__", "")):
        return None
    kept = _kept(func, args, kwargs, x, axis)
    if func in CHOOSING:
        args, kwargs = mapped(
            (tuple(args), dict(kwargs)), lambda v: ~v if isinstance(v, Tensor) and v.dtype == torch.bool else v
        )
        kept = {found: False for found in _kept(func, args, kwargs, x, axis) if found in kept}
    if not kept:
        return None
    found, as_they_are = min(kept.items())
    return found, as_they_are and not _weighs(func, args, kwargs, x)


def _weighs(func: Callable[..., Any], args: Any, kwargs: Any, x: Tensor) -> bool:
    """Whether a call multiplies each row of ``x`` by something that the example has at hand."""
    if func in (torch.einsum, torch.functional.einsum) and isinstance(args[0], str) and "->" in args[0]:
        # What sums over rows of x may average them.
        terms, made = args[0].replace(" ", "").split("->")
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        return any(v is x and set(term) <= set(made) for term, v in zip(terms.split(","), operands, strict=False))
    given = (*args, *kwargs.values())
    return func in TIMES and (
        func in (torch.sum, Tensor.sum) or any(isinstance(v, Tensor) and v is not x for v in given)
    )


def _kept(func: Callable[..., Any], args: Any, kwargs: Any, x: Tensor, axis: int) -> dict[int, bool]:
    """Axes that may count the features in the result, and whether rows come as they are, by this one call."""
    places = torch.arange(1, x.shape[axis] + 1, device=x.device, dtype=torch.float64)
    made: list[Tensor] = []
    for code in (places, torch.ones_like(places)):
        result = _again(func, args, kwargs, x, code.view(-1, *[1] * (x.ndim - 1 - axis)).expand(x.shape))
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return {}
        made.append(result.double())
    kept = {}
    for found in (a for a in range(made[0].ndim) if made[0].shape[a] == len(places)):
        shares = made[0].movedim(found, -1) / places, made[1].movedim(found, -1)
        if torch.allclose(*shares, rtol=CLOSE, atol=0.0):
            kept[found] = bool(((shares[1] - 1).abs() <= CLOSE).all())
    return kept


def _again(func: Callable[..., Any], args: Any, kwargs: Any, x: Tensor, instead: Tensor) -> Any:
    """What the call returns with another tensor in the place of ``x``, in double precision; None if it cannot."""

    def wide(v: Any) -> Any:
        if v is x:
            return instead
        return v.detach().double() if isinstance(v, Tensor) and v.is_floating_point() else v

    args, kwargs = mapped((tuple(args), dict(kwargs)), wide)
    try:
        with torch.no_grad():
            return func(*args, **kwargs)
    except Exception:  # it may want the numbers that it had
        return None
