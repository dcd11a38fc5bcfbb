"""What a forward pass leaves in plain attributes and buffers of modules, where the next pass finds it.

Some models keep there what they have computed: position biases for an image size, projected positions for a length, in
a dictionary or in an attribute that is None, or absent, until it is needed; keys and values in a buffer. Such a thing
is true of the weights that it was computed from. A score runs the model at others, in another precision, a proof with
parameters moved; what they leave must neither reach their next pass nor stay with the user's model.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PERSISTENCE = "_non_persistent_buffers_set"

_OWN = frozenset(nn.Module().__dict__) - {"_buffers", _PERSISTENCE}
"""Attributes in which torch itself keeps parameters, submodules, hooks and the mode: others look after these."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
"""Those whose contents are watched. Subclasses may have rules of their own."""

_DEPTH = 3
"""Containers within containers that are watched."""

_LONG = 1000
"""A container of more entries is a table rather than a cache: its length alone is watched."""

_VALUES = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""What may change from pass to pass without a tensor: counters, the last length. By itself that is left as it is."""

_ABSENT = object()


class Carried:
    """The plain attributes and buffers of a model's modules as they are now, to be put back any number of times.

    They are all entries of a module's ``__dict__`` that torch does not keep there itself, with the contents of
    containers and of tensors (those on the memory of a parameter excepted: that is not theirs), and the buffers. Where
    anything but numbers and texts has changed in some module, everything is put back in all of them, for a flag may say
    what a tensor is; counters alone go on counting. Numbers and texts that are new stay where nothing else is new in
    their module: they may say that a first pass has set something up, such as hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [
            (own, len(own), {name: value for name, value in own.items() if name not in _OWN})
            for own in (module.__dict__ for module in model.modules())
        ]
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._tensors: list[tuple[Tensor, int | None, Tensor, object]] = []
        """Each with its version, a copy of what is in it, and its graph."""
        for _, _, kept in self._attributes:
            for value in kept.values():
                if isinstance(value, (*_CONTAINERS, tuple)):
                    self._watch(value, _DEPTH)
        found = {id(t): t for t in _tensors_of(model)}
        memory = {_memory(p) for p in model.parameters()} if found else set()
        for t in found.values():
            if type(t) is Tensor and t.layout == torch.strided and not t.is_meta and _memory(t) not in memory:
                self._tensors.append((t, _version(t), t.detach().clone(), t.grad_fn))

    def _watch(self, value: Any, depth: int) -> None:
        if type(value) in _CONTAINERS:
            if id(value) in self._contents:
                return
            self._contents[id(value)] = value, value.copy()
        if depth > 1 and len(value) <= _LONG:
            for entry in value.values() if isinstance(value, dict) else value:
                if isinstance(entry, (*_CONTAINERS, tuple)):
                    self._watch(entry, depth - 1)

    def put_back(self, *, whole: bool = False) -> None:
        """Puts everything back as it was if a pass has changed something.

        That tensors were written to is seen by their versions, or with ``whole`` by comparing what is in them.
        """
        written = [
            (t, value, graph)
            for t, version, value, graph in self._tensors
            if version != _version(t) or (whole and not _equal(t, value))
        ]
        if not written and not self._changed():
            return
        for own, _, kept in self._attributes:
            new = [n for n in own if n not in kept and n not in _OWN]
            if self._altered(own, kept, new):
                for name in new:
                    del own[name]
            own.update(kept)
        for container, contents in self._contents.values():
            if not _same_entries(container, contents):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(contents)
        for t, value, graph in written:
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                _take_off(t, graph)
                if not _equal(t, value):
                    _once(t.detach(), t).copy_(_once(value, t))
        self._tensors = [(t, _version(t), value, graph) for t, _, value, graph in self._tensors]

    def take_graphs(self) -> None:
        """Replaces tensors that passes of the user's have left with their graphs by copies without, to be put back.

        A pass that writes a part of such a tensor would go back through that graph, to weights that are others by now.
        """
        for own, _, kept in self._attributes:
            buffers = kept.get("_buffers")
            if not isinstance(buffers, dict):
                buffers = {}  # a scripted module keeps them elsewhere
            for place, names in ((own, list(kept)), (buffers, list(buffers))):
                for name in names:
                    t = place[name]
                    if type(t) is Tensor and t.grad_fn is not None:
                        place[name] = t.detach().clone()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What passes write into tensors meanwhile goes into other memory, which the graphs of these passes can keep.

        What is put back into the memory that a graph goes through ends that graph.
        """
        kept = [(t, t.data, graph) for t, _, _, graph in self._tensors if not t.is_inference()]
        memory: dict[object, Tensor] = {}
        for t, data, _ in kept:
            if _memory(data) not in memory:
                whole = torch.empty(0, dtype=data.dtype, device=data.device).set_(data.untyped_storage())
                memory[_memory(data)] = whole.clone()
            # Those that share memory share it here too.
            storage = memory[_memory(data)].untyped_storage()
            other = torch.empty(0, dtype=data.dtype, device=data.device)
            t.data = other.set_(storage, data.storage_offset(), data.shape, data.stride())
        try:
            yield
        finally:
            for t, data, graph in kept:
                _take_off(t, graph)
                t.data = data

    def _changed(self) -> bool:
        for own, size, kept in self._attributes:
            new = [n for n in own if n not in kept and n not in _OWN] if len(own) != size else []
            if self._altered(own, kept, new):
                return True
        return not all(_same_entries(*both) for both in self._contents.values())

    @staticmethod
    def _altered(own: dict[str, Any], kept: dict[str, Any], new: Sequence[str]) -> bool:
        """Whether anything but numbers and texts is new or other in a module."""
        if not all(isinstance(own[name], _VALUES) for name in new):
            return True
        for name, value in kept.items():
            now = own.get(name, _ABSENT)
            if now is not value and not (isinstance(now, _VALUES) and isinstance(value, _VALUES)):
                return True
        return False


@contextmanager
def emptied(model: nn.Module, run: Callable[[], Sequence[Tensor]]) -> Iterator[list[str]]:
    """The model without what its own passes have cached, so that the next computes it anew, of its parameters.

    Passes of the user's have filled the caches, under ``no_grad`` maybe: parameters behind them would have no
    gradient. But a plain attribute may as well be a constant that the model cannot do without, or have been set by its
    first data. So each is tried: it is a cache if, emptied (a container), None or absent, ``run`` puts tensors there
    again and the outputs stay as they were. Everything else stays in its place, and so do buffers. Most models have no
    such attribute, and are not run.

    What is yielded says, one text each, which attributes are computed anew but with other outputs.
    """
    groups = _holding(model)
    if not groups:
        yield []
        return
    carried = Carried(model)
    try:
        caches, odd = _caches(groups, carried, run)
        _empty(caches)
        yield odd
    finally:
        carried.put_back(whole=True)


_Place = tuple[dict[str, Any], str]
"""A module's ``__dict__`` and a name in it."""


def _holding(model: nn.Module) -> dict[tuple[str, str], list[_Place]]:
    """Attributes that hold tensors other than parameters and buffers, by the class of the module and their name."""
    groups: dict[tuple[str, str], list[_Place]] = {}
    memory: set[object] | None = None
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in _OWN or name in ("_buffers", _PERSISTENCE):
                continue
            tensors = _tensors_in(value)
            if tensors:
                memory = _memory_of(model) if memory is None else memory
                if any(_memory(t) not in memory for t in tensors):
                    groups.setdefault((type(module).__qualname__, name), []).append((module.__dict__, name))
    return groups


def _caches(
    groups: dict[tuple[str, str], list[_Place]], carried: Carried, run: Callable[[], Sequence[Tensor]]
) -> tuple[list[tuple[_Place, bool]], list[str]]:
    """Places of caches, each with whether it is to be absent, and those that are filled again otherwise.

    The model is as it was afterwards.
    """
    found: list[tuple[_Place, bool]] = []
    odd: list[str] = []
    base = _tried([], carried, run)
    if base is None:
        return [], []
    for (kind, name), places in groups.items():
        before = [t for own, _ in places for t in _tensors_in(own[name])]
        for absent in (False, True):
            filled: list[_Place] = []
            outputs = _tried([(place, absent) for place in places], carried, run, filled)
            if outputs is not None and filled:
                if _alike(outputs, base, before):
                    found += [(place, absent) for place in filled]
                else:
                    odd.append(f"{kind}.{name}")
                break
    tensors = [t for (own, name), _ in found for t in _tensors_in(own[name])]
    together = _tried(found, carried, run) if len(groups) > 1 and found else base
    return (found, odd) if together is not None and _alike(together, base, tensors) else ([], odd)


def _tried(
    emptying: Sequence[tuple[_Place, bool]],
    carried: Carried,
    run: Callable[[], Sequence[Tensor]],
    filled: list[_Place] | None = None,
) -> list[Tensor] | None:
    """The outputs with these places emptied; None where the model does not run then. ``filled`` gets those refilled."""
    try:
        _empty(emptying)
        outputs = list(run())
        if filled is not None:
            filled += [(own, name) for (own, name), _ in emptying if _tensors_in(own.get(name))]
        return outputs
    except Exception:  # its code may raise anything without what it counts on
        return None
    finally:
        carried.put_back(whole=True)


def _empty(places: Sequence[tuple[_Place, bool]]) -> None:
    for (own, name), absent in places:
        if absent:
            del own[name]
        elif type(own[name]) in _CONTAINERS:
            own[name].clear()  # others may know it, too
        else:
            own[name] = None


def _alike(outputs: Sequence[Tensor], base: Sequence[Tensor], cached: Sequence[Tensor]) -> bool:
    """Whether outputs are the same but for the rounding of what was cached, in half precision maybe."""
    eps = [torch.finfo(torch.float32).eps, *(torch.finfo(t.dtype).eps for t in cached if t.is_floating_point())]
    tolerance = max(eps) ** 0.5
    if [t.shape for t in outputs] != [t.shape for t in base]:
        return False
    for now, before in zip(outputs, base, strict=True):
        now, before = now.detach().double().nan_to_num(), before.detach().double().nan_to_num()
        if not float((now - before).norm()) <= tolerance * float(before.norm()):
            return False
    return True


def _tensors_in(value: Any, depth: int = _DEPTH) -> list[Tensor]:
    """The tensors that an attribute is or holds, parameters left out."""
    if isinstance(value, Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if depth and (type(value) in _CONTAINERS or isinstance(value, tuple)) and len(value) <= _LONG:
        entries = value.values() if isinstance(value, dict) else value
        return [t for entry in entries for t in _tensors_in(entry, depth - 1)]
    return []


def _same_entries(now: Any, before: Any) -> bool:
    """Whether a container holds the very same things."""
    if len(now) != len(before):
        return False
    if len(now) > _LONG:
        return True
    if isinstance(now, dict):
        return all(now.get(key, _ABSENT) is value for key, value in before.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(a is b for a, b in zip(now, before, strict=True))


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """The buffers of a model, and the tensors in plain attributes."""
    yield from model.buffers()
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in _OWN:
                yield from _tensors_in(value)


def _take_off(t: Tensor, graph: object) -> None:
    """Takes the graph off a tensor that it has got since it had this one: the next pass would add to it."""
    if t.grad_fn is not graph and not t._is_view():
        t.detach_()


def _equal(t: Tensor, value: Tensor) -> bool:
    """Whether they hold the same numbers, NaN being one of them."""
    return torch.equal(t, value) or bool(((t == value) | ((t != t) & (value != value))).all())


def _once(values: Tensor, t: Tensor) -> Tensor:
    """The values of a tensor like ``t`` without the copies that an expanded one has of what is stored once."""
    for axis, stride in enumerate(t.stride()):
        values = values.narrow(axis, 0, 1) if stride == 0 else values
    return values


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _memory(t: Tensor) -> object:
    """The same for tensors that share memory; what is no plain tensor shares none."""
    if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_meta:
        return id(t)
    return t.device, t.untyped_storage().data_ptr()


def _memory_of(model: nn.Module) -> set[object]:
    return {_memory(t) for t in (*model.parameters(), *model.buffers())}
