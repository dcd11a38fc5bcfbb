"""The parameters of a model as pieces of storage: tied, shared and overlapping ones are one thing, counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_geosharp.errors import UnsupportedModelError


@dataclass(frozen=True)
class Leaf:
    """A piece of storage that is perturbed as one.

    ``tensor`` shares it. ``members`` are the parameters on it with their offset in the piece; ``alike`` says that
    there is one layout (the usual case), so that ``tensor`` has the shape of its parameters; otherwise it is flat.
    """

    name: str
    tensor: Tensor
    members: tuple[tuple[nn.Parameter, int], ...]
    alike: bool

    @property
    def shape(self) -> torch.Size:
        """Of the whole piece, of which a process may hold a part."""
        return self.tensor.shape

    def here(self, whole: Tensor) -> Tensor:
        """The part of a tensor of :attr:`shape` that belongs to what is held here; a view."""
        return whole

    def rows_here(self, rows: Tensor) -> Tensor:
        """Those of some rows of the whole piece that are held here, as rows of ``tensor``."""
        return rows

    def gradient(self) -> Tensor:
        """The sum of the members' gradients, in the shape of ``tensor``; zero for a parameter that got none."""
        first = self.members[0][0]
        if self.alike:
            grads = [p.grad for p, _ in self.members if p.grad is not None]
            if not grads:
                return torch.zeros_like(first)
            return grads[0] if len(grads) == 1 else torch.stack(grads).sum(0)
        total = torch.zeros_like(self.tensor)
        for p, offset in self.members:
            if p.grad is not None:
                total.as_strided(p.shape, p.stride(), offset).add_(p.grad)
        return total


def leaves(model: nn.Module) -> dict[str, Leaf]:
    """All floating-point parameters of a model, by the name of the first on each piece of storage.

    Raises:
        UnsupportedModelError: a parameter is on the meta device, or its elements share memory with each other.
    """
    groups: dict[tuple[torch.device, int], list[tuple[str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        if p.is_meta:
            raise UnsupportedModelError(
                f"{name} is on the meta device (offloaded or not loaded); load the whole model into memory first"
            )
        if any(s == 0 and n > 1 for s, n in zip(p.stride(), p.shape, strict=True)):
            raise UnsupportedModelError(f"{name} is an expanded tensor whose elements share memory; call .contiguous()")
        groups.setdefault((p.device, p.untyped_storage().data_ptr()), []).append((name, p))
    return {leaf.name: leaf for group in groups.values() for leaf in _leaves_of(group)}


def _span(p: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True)) if p.numel() else 0


def _leaves_of(group: list[tuple[str, nn.Parameter]]) -> Iterable[Leaf]:
    """The leaves on one storage: parameters whose address ranges overlap belong together."""
    clusters: list[tuple[int, list[tuple[str, nn.Parameter]]]] = []
    for name, p in sorted(group, key=lambda item: item[1].storage_offset()):
        start = int(p.storage_offset())
        end = start + _span(p)
        if clusters and start < clusters[-1][0]:
            clusters[-1] = (max(end, clusters[-1][0]), [*clusters[-1][1], (name, p)])
        else:
            clusters.append((end, [(name, p)]))
    order = {name: i for i, (name, _) in enumerate(group)}
    for end, members in clusters:
        members.sort(key=lambda item: order[item[0]])
        name, first = members[0]
        layouts = {(p.storage_offset(), p.shape, p.stride(), p.dtype) for _, p in members}
        if len(layouts) == 1:
            yield Leaf(name, first.data, tuple((p, 0) for _, p in members), True)
            continue
        if len({p.dtype for _, p in members}) > 1:
            raise UnsupportedModelError(f"{[n for n, _ in members]} share memory in different dtypes")
        start = min(int(p.storage_offset()) for _, p in members)
        flat = first.data.as_strided((end - start,), (1,), start)
        yield Leaf(name, flat, tuple((p, int(p.storage_offset()) - start) for _, p in members), False)


def canonical_names(model: nn.Module) -> dict[int, str]:
    """id(parameter) -> the name of its leaf, for parameters that have a leaf of their own shape."""
    return {id(p): leaf.name for leaf in leaves(model).values() if leaf.alike for p, _ in leaf.members}


def wide_copy(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """float64 copies of the parameters named."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {n: parameters[n].detach().to(torch.float64, copy=True) for n in names}


class Copies(dict[str, Tensor]):
    """Copies of parameters in double precision, each made when it is first asked for."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters

    def __missing__(self, name: str) -> Tensor:
        """A copy of a parameter that was not asked for before."""
        self[name] = self._parameters[name].detach().to(torch.float64, copy=True)
        return self[name]


class Saved:
    """Parameters that are written to for a while, over and over, and come back bit for bit."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._kept: dict[str, Tensor] = {}
        self._open: list[tuple[Tensor, Tensor]] = []

    def open(self, name: str) -> Tensor:
        """The parameter, to be written to; what is in it is saved, once for all times that it is opened."""
        parameter = self._parameters[name]
        if name not in self._kept:
            value = _copied(parameter)
            if any(_memory(p) == _memory(parameter) for p, _ in self._open):
                # It has been written to already, under another name.
                self._open.append((parameter, value))
                return parameter
            self._kept[name] = value
        self._open.append((parameter, self._kept[name]))
        return parameter

    def put_back(self) -> None:
        """Puts back all that was opened, the last first: parameters may share memory."""
        while self._open:
            parameter, value = self._open[-1]
            parameter.copy_(value)
            self._open.pop()


def _copied(x: Tensor) -> Tensor:
    """A copy, in a narrower dtype where that loses nothing: what was widened."""
    copy = x
    for wide, narrow in ((torch.float64, torch.float32), (torch.float32, torch.bfloat16)):
        if copy.dtype == wide and x.ndim and _fits(copy[:1], narrow) and _fits(copy, narrow):
            copy = copy.to(narrow)
    return x.clone() if copy is x else copy


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return bool((x.to(dtype) == x).all())


def put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies a mapping of weights into the model's parameters, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)


def _memory(data: Tensor) -> object:
    """The same for tensors that share memory; what is no plain tensor (spread over processes, say) shares none."""
    plain = type(data) in (Tensor, nn.Parameter) and data.layout == torch.strided and not data.is_meta
    return (data.device, data.untyped_storage().data_ptr()) if plain else id(data)


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Holds parameters and buffers that are narrower than ``dtype`` in it for a while; the stored ones come back.

    What shares memory shares it meanwhile too.
    """
    narrow = (torch.float16, torch.bfloat16, *((torch.float32,) if dtype == torch.float64 else ()))
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in narrow]
    stored = [(t, t.data) for t in tensors]
    together: dict[object, list[tuple[Tensor, Tensor]]] = {}
    for t, data in stored:
        together.setdefault((_memory(data), data.dtype), []).append((t, data))
    try:
        for members in together.values():
            if len(members) == 1:
                members[0][0].data = members[0][1].to(dtype)
                continue
            first = members[0][1]
            whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).to(dtype)
            for t, data in members:
                t.data = whole.as_strided(data.shape, data.stride(), int(data.storage_offset()))
        yield
    finally:
        for t, data in stored:
            t.data = data
