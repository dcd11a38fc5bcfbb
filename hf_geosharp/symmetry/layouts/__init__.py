"""Declarative descriptions of where attention modules keep their projections: data, read from JSON.

They are for modules that a trace cannot see through. A description says what may be there; which symmetry it has is
probed and verified like everything else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from hf_geosharp.arguments import check, check_kind, whole
from hf_geosharp.errors import UsageError
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.linear import LinearMap, as_linear
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.views import View, parse

ROLES = ("q", "k", "v", "o")

ROTARY = {"half": ("c", "f"), "interleaved": ("f", "c")}
"""How rotary embeddings pair the columns of a head: real and imaginary part are c, the frequencies f."""


@dataclass(frozen=True)
class Layout:
    """One way to arrange an attention module.

    Attributes:
        name: for messages.
        paths: the submodule of each role.
        patterns: the axes of its output (of its input for "o"): n key heads, g query heads on each, h head dimension.
        select: the part of a fused projection.
        parts: how many parts there are.
        heads: (query heads, key heads) where the configuration does not say.
    """

    name: str
    paths: Mapping[str, str]
    patterns: Mapping[str, str]
    select: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parts: int = 1
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check(name=self.name)
        whole("parts", self.parts)
        check_kind("select", self.select, Mapping, "a mapping from q, k, v, o to the place on each axis")
        check_kind("heads", self.heads, (tuple, list, type(None)), "(query heads, key heads), or None")
        for number in self.heads or ():
            whole("a number of heads", number)
        for name, given, example in (("paths", self.paths, "to_q"), ("patterns", self.patterns, "(n h)")):
            if not isinstance(given, Mapping) or not all(isinstance(given.get(role), str) for role in ROLES):
                raise UsageError(
                    f"{name} of the layout {self.name!r} is {given!r:.60}; it is a mapping with a text for each of "
                    f"{', '.join(ROLES)}, such as {example!r}"
                )


@dataclass(frozen=True)
class Conventions:
    """Patterns and names of configuration attributes that layouts need not repeat."""

    patterns: Mapping[str, str]
    query_heads: tuple[str, ...]
    key_heads: tuple[str, ...]


@lru_cache(maxsize=1)
def _shipped() -> tuple[tuple[Layout, ...], Conventions]:
    data = json.loads(resources.files(__name__).joinpath("attention.json").read_text(encoding="utf-8"))
    conventions = Conventions(data["patterns"], tuple(data["heads"]["query"]), tuple(data["heads"]["key"]))
    return tuple(_layout(entry, conventions) for entry in data["layouts"]), conventions


_KEYS = {"name", *ROLES, "patterns", "select", "parts", "heads"}
_AXES = {"n", "g", "h", "s"}


def _layout(entry: Mapping[str, Any], conventions: Conventions) -> Layout:
    """The layout that an entry describes.

    Raises:
        ValueError: something in it is unknown or no name.
    """
    if unknown := set(entry) - _KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    if not all(isinstance(entry[k], str) for k in ("name", *ROLES)):
        raise ValueError("name, q, k, v and o are texts")
    for pattern in entry.get("patterns", {}).values():
        if unknown := {a for group in parse(pattern) for a in group} - _AXES:
            raise ValueError(f"unknown axes {sorted(unknown)} in {pattern!r}: there are {sorted(_AXES)}")
    heads = entry.get("heads")
    return Layout(
        entry["name"],
        {r: entry[r] for r in ROLES},
        {**conventions.patterns, **entry.get("patterns", {})},
        entry.get("select", {}),
        entry.get("parts", 1),
        None if heads is None else (int(heads["query"]), int(heads["key"])),
    )


_registered: list[Layout] = []


def register_layout(layout: Layout | Mapping[str, Any]) -> None:
    """Adds a layout for all models of this process: a :class:`Layout`, or a mapping as in a layout file.

    A model that it does not fit is scored and inspected without it, with a warning; where it fits and does not hold it
    is refused. ``find_symmetries(layouts=...)`` takes one for a single model.

    Raises:
        UsageError: it is something else.
    """
    try:
        _registered.append(layout if isinstance(layout, Layout) else _layout(layout, _shipped()[1]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"layout is {layout!r:.60}, which describes none ({_missing(error)}): it needs name, q, k, v and o, as one "
            "in a file for read_layouts does"
        ) from None


def unregister_layout(name: str) -> None:
    """Takes back the layouts of this name.

    Raises:
        UsageError: there is none.
    """
    if all(layout.name != name for layout in _registered):
        raise UsageError(f"No layout {name!r} is registered; there are {[layout.name for layout in _registered]}.")
    _registered[:] = [layout for layout in _registered if layout.name != name]


def registered() -> tuple[Layout, ...]:
    """The layouts that were added in this process."""
    return tuple(_registered)


def _missing(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__


def layouts_of(given: Any) -> tuple[Layout, ...]:
    """Layouts, or a single one, as they are handed to a call.

    Raises:
        UsageError: they are something else.
    """
    holds = isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))
    found = tuple(given) if holds else (given,)
    if all(isinstance(layout, Layout) for layout in found):
        return found
    raise UsageError(f"layouts is {given!r:.60}; it holds what read_layouts makes of a file of layouts")


def read_layouts(path: str | Path) -> tuple[Layout, ...]:
    """The layouts of a JSON file, ``{"schema": 1, "layouts": [{"name", "q", "k", "v", "o", ...}]}``.

    Raises:
        UsageError: the file cannot be read, or is not such a description.
    """
    check(path=path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"The layout file {path} cannot be read: {error}") from None
    try:
        if data["schema"] != 1:
            raise UsageError(f"The layout file {path} has schema {data['schema']!r}; this version reads schema 1.")
        return tuple(_layout(entry, _shipped()[1]) for entry in data["layouts"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"The layout file {path} does not describe layouts ({_missing(error)}): it needs "
            '{"schema": 1, "layouts": [{"name": ..., "q": ..., "k": ..., "v": ..., "o": ...}]}, and heads, if given, '
            '{"query": ..., "key": ...}.'
        ) from None


@dataclass(frozen=True)
class Declared:
    """A module that a layout fits: candidate pairs of both kinds, the largest group first."""

    module: str
    layout: str
    candidates: Mapping[str, tuple[Pair, ...]]


def declared(model: nn.Module, names: Mapping[int, str], layouts: Sequence[Layout] = ()) -> Iterator[Declared]:
    """Every module that some layout fits, outermost first; a projection belongs to one module.

    Args:
        model: the model.
        names: id of a parameter -> its name.
        layouts: tried before the registered and the shipped ones.
    """
    taken: set[object] = set()
    for path, module in model.named_modules():
        config = getattr(module, "config", None) or getattr(model, "config", None)
        for layout in (*layouts, *_registered, *_shipped()[0]):
            site = _match(path, module, layout, config, names)
            if site is None:
                continue
            used = {v.region for p in (c[0] for c in site.candidates.values()) for v in (*p.g, *p.h)}
            if not used & taken:
                taken |= used
                yield site
            break


def _match(path: str, module: nn.Module, layout: Layout, config: Any, names: Mapping[int, str]) -> Declared | None:
    """The pairs of a module under a layout, or None where shapes do not agree."""
    linears: dict[str, LinearMap] = {}
    for role in ROLES:
        found = as_linear(_submodule(module, layout.paths[role]))
        if found is None or id(found.weight) not in names:
            return None
        linears[role] = found
    sizes = _sizes(linears, layout, config)
    if sizes is None:
        return None
    views: dict[str, tuple[View, ...]] = {}
    for role, linear in linears.items():
        head, other = parse(layout.patterns[role])[0], ("o",) if role == "o" else ("i",)
        head_axis = linear.in_axis if role == "o" else linear.out_axis
        free = linear.out_features if role == "o" else linear.in_features
        group = ("g",) if "g" in head else ()
        select = dict(layout.select.get(role, {}))
        weight = View.pattern(
            names[id(linear.weight)],
            (head, other) if head_axis == 0 else (other, head),
            {**sizes, other[0]: free},
            ("n",),
            ("h",),
            (*group, *other),
            select=select,
        )
        views[role] = (weight,)
        bias = linear.bias
        if bias is not None and id(bias) in names and role != "o":
            views[role] += (View.pattern(names[id(bias)], (head,), sizes, ("n",), ("h",), group, select=select),)
    group_ = Group(sizes["h"])
    qk = Pair("", "qk", path, group_, views["q"], views["k"])
    vo = Pair("", "vo", path, group_, views["v"], views["o"])
    turned = tuple(p for p in (_rotary(qk, a) for a in ROTARY.values()) if p is not None)
    return Declared(path, layout.name, {"qk": (qk, *turned), "vo": (vo,)})


def _rotary(pair: Pair, axes: tuple[str, str]) -> Pair | None:
    """One complex number for each rotary frequency."""
    h = pair.group.dim
    if h % 2:
        return None

    def turn(view: View) -> View:
        split = view.split("h", axes, {"c": 2, "f": h // 2})
        return replace(split, copies=(*view.copies, "f"), dim=(), field="c")

    return replace(pair, group=Group(1, complex=True), g=tuple(map(turn, pair.g)), h=tuple(map(turn, pair.h)))


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split("."):
        if part not in module._modules:
            return None
        module = module._modules[part]  # type: ignore[assignment]
    return module


def _sizes(linears: Mapping[str, LinearMap], layout: Layout, config: Any) -> dict[str, int] | None:
    """n key heads, g query heads on each, h head dimension; None where the projections do not fit them."""
    if layout.heads is not None:
        query, key = layout.heads
    else:
        conventions = _shipped()[1]
        found = [
            next((n for a in attributes if isinstance(n := _setting(config, a), int)), None)
            for attributes in (conventions.query_heads, conventions.key_heads)
        ]
        if not found[0]:
            return None
        query, key = found[0], found[1] or found[0]
    inner = linears["o"].in_features
    if not key or query % key or inner % query:
        return None
    sizes = {"n": key, "g": query // key, "h": inner // query, "s": layout.parts}
    expected = {role: math.prod(sizes[axis] for axis in parse(layout.patterns[role])[0]) for role in ROLES}
    actual = {r: linear.in_features if r == "o" else linear.out_features for r, linear in linears.items()}
    return sizes if expected == actual else None


def _setting(config: Any, name: str) -> Any:
    """An attribute of a configuration; None where it has none, or one that differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None
