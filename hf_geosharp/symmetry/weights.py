"""Weights of linear maps: which part of which parameter a tensor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slab:
    """The part of a parameter that a linear map uses: indices start[d], start[d] + 1, ... along each dimension.

    ``out`` and ``inner`` are the dimensions that count outputs and inputs (several: together, the last one fastest);
    other dimensions have one index. ``shape`` is the parameter's.
    """

    parameter: str
    out: tuple[int, ...]
    inner: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Weights:
    """Tells the parameters of a model by their memory."""

    def __init__(self, owners: Mapping[int, list[tuple[str, Tensor]]]) -> None:
        """``owners`` has the names and parameters of each storage."""
        self._owners = owners

    def owned(self, tensor: Tensor) -> bool | None:
        """Whether a tensor is (a view of) a parameter; None where that cannot be told."""
        try:
            return tensor.untyped_storage().data_ptr() in self._owners
        except (NotImplementedError, RuntimeError):
            return None  # within vmap: no memory

    def slab(self, tensor: Tensor, out: Sequence[int], inner: Sequence[int]) -> Slab | None:
        """Where in a parameter a view of it lies, if its axes are dimensions of the parameter."""
        for name, p in self._owners.get(tensor.untyped_storage().data_ptr(), ()):
            offset = int(tensor.storage_offset() - p.storage_offset())
            if not 0 <= offset < max(p.numel(), 1):
                continue
            dims: dict[int, int] = {}
            for axis in (*out, *inner):
                fits = [
                    d
                    for d in range(p.ndim)
                    if (p.stride(d) == tensor.stride(axis) or tensor.shape[axis] == 1)
                    and p.shape[d] >= tensor.shape[axis]
                    and d not in dims.values()
                ]
                if not fits:
                    break
                dims[axis] = fits[0]
            else:
                start, rest = [0] * p.ndim, offset
                for d in sorted(range(p.ndim), key=p.stride, reverse=True):
                    start[d], rest = divmod(rest, p.stride(d))
                several = [d for axes in (out, inner) if len(axes) > 1 for d in (dims[a] for a in axes)]
                if rest == 0 and not any(start[d] for d in several):
                    return Slab(
                        name, tuple(dims[a] for a in out), tuple(dims[a] for a in inner), tuple(start), tuple(p.shape)
                    )
        return None
