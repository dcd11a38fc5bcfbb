"""Loose parameters: what of the leaves belongs to no pair, small ones bundled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.sharpness.stacks import device_of
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import Leaf
from hf_geosharp.symmetry.views import View

_SMALL = 1 << 17
"""Parameters of at most this many entries are bundled."""


@dataclass(frozen=True)
class Loose:
    """A leaf, or what of it neither belongs to a pair nor is fixed nor is out of reach for a batch.

    ``index`` picks entries of the flattened leaf, ``rows`` rows; neither is all of it.
    """

    leaf: Leaf
    index: Tensor | None = None
    rows: Tensor | None = None

    def take(self, of: Callable[[str], Tensor]) -> Tensor:
        """Its entries (1, n) of the tensor that ``of`` gives for its name; a view where that is possible."""
        tensor = of(self.leaf.name)
        if self.rows is not None:
            return tensor.index_select(0, self.rows).view(1, -1)
        flat = tensor.reshape(1, -1)
        return flat if self.index is None else flat[:, self.index]

    @property
    def numel(self) -> int:
        """How many entries that is."""
        if self.rows is not None:
            return self.rows.numel() * self.leaf.tensor.shape[1:].numel()
        return self.leaf.tensor.numel() if self.index is None else self.index.numel()

    def window(self) -> Tensor | None:
        """The leaf's own memory as (1, n) where it is all of a contiguous leaf, else None."""
        whole = self.index is None and self.rows is None and self.leaf.tensor.is_contiguous()
        return self.leaf.tensor.view(1, -1) if whole else None

    def put(self, value: Tensor) -> None:
        """Writes its entries (1, n) into the leaf."""
        tensor = self.leaf.tensor
        if self.rows is not None:
            tensor.index_copy_(0, self.rows, value.view(-1, *tensor.shape[1:]))
        elif self.index is None:
            tensor.copy_(value.view(tensor.shape))
        else:
            flat = tensor.reshape(-1)
            flat[self.index] = value[0]
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


@dataclass(frozen=True)
class Bundle:
    """Several small leaves as one part: biases and norms are many, and each operation has its price."""

    items: tuple[Loose, ...]

    @property
    def sizes(self) -> list[int]:
        """Entries of each."""
        return [i.numel for i in self.items]

    def take(self, of: Callable[[str], Tensor]) -> Tensor:
        """Their entries (1, n) of the tensors that ``of`` gives for their names."""
        taken = [item.take(of) for item in self.items]
        out = taken[0].new_empty(1, sum(x.numel() for x in taken))
        torch._foreach_copy_(out.split([x.numel() for x in taken], dim=1), taken)
        return out

    def put(self, value: Tensor) -> None:
        """Writes their entries (1, n)."""
        pieces = value.split(self.sizes, dim=1)
        windows = [item.window() for item in self.items]
        pairs = [(w, p) for w, p in zip(windows, pieces, strict=True) if w is not None]
        if pairs:
            torch._foreach_copy_([w for w, _ in pairs], [p for _, p in pairs])
        for item, window, piece in zip(self.items, windows, pieces, strict=True):
            if window is None:
                item.put(piece)


def views_by_parameter(pairs: Sequence[Pair], fixed: Sequence[View]) -> dict[str, list[View]]:
    """What pairs, and folds that fix it, see of each parameter."""
    views: dict[str, list[View]] = {}
    for view in (*(v for p in pairs for v in (*p.g, *p.h)), *fixed):
        views.setdefault(view.parameter, []).append(view)
    return views


def free_entries(leaf: Leaf, views: Sequence[View]) -> Tensor:
    """Which entries of the whole of a leaf none of the views sees."""
    free = torch.ones(leaf.shape, dtype=torch.bool, device=leaf.tensor.device)
    for view in views:
        view.of(free).fill_(False)
    return free


def is_small(leaf: Leaf) -> bool:
    """Whether a leaf is bundled with others."""
    return leaf.shape.numel() <= _SMALL


def bundled(loose: Sequence[Loose]) -> list[Loose | Bundle]:
    """The same leaves with the small ones of each device together."""
    small: dict[torch.device, list[Loose]] = {}
    large: list[Loose | Bundle] = [i for i in loose if not is_small(i.leaf)]
    for item in loose:
        if is_small(item.leaf):
            small.setdefault(device_of(item.leaf.tensor), []).append(item)
    return [*large, *(Bundle(tuple(items)) for items in small.values())]


def lies_in(gradient: Tensor, rows: Tensor) -> bool:
    """Whether all that is not zero of a gradient, (rows, ...), lies in some of its rows."""
    every, part = gradient, gradient.index_select(0, rows)
    if gradient.is_contiguous() and gradient[:1].numel() * gradient.element_size() % 8 == 0:
        # By words of eight bytes it takes a fifth of the time.
        every, part = every.view(torch.int64), part.view(torch.int64)
    return int(torch.count_nonzero(every)) == int(torch.count_nonzero(part))
