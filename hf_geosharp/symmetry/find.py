"""Finds the symmetries of a live model: sites from layouts, groups by probing, folds by tracing who reads what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import Fold, Gain, KeyBias, Reader, ValueBias
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.inputs import call, synthetic
from hf_geosharp.symmetry.layouts import ROLES, Layout, shipped
from hf_geosharp.symmetry.linear import LinearMap, as_linear
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import canonical_names
from hf_geosharp.symmetry.probe import LocalTwin, record_calls
from hf_geosharp.symmetry.verify import verify
from hf_geosharp.symmetry.views import View, parse

PRESETS: dict[str, frozenset[str]] = {
    "full": frozenset({"key_bias", "value_bias", "norm_gain"}),
    "attention": frozenset({"key_bias", "value_bias"}),
    "paper": frozenset(),
}
"""Which folds each preset uses; the pairs are those of attention in all of them."""

ROTARY = {"half": ("c", "f"), "interleaved": ("f", "c")}
"""How rotary embeddings pair the columns of a head: real and imaginary part are c, the frequencies f."""


@dataclass(frozen=True)
class Site:
    """An attention module and its four projections as views, weight and bias apart."""

    name: str
    module: nn.Module
    weights: Mapping[str, View]
    biases: Mapping[str, View]
    out_bias: View | None


def find_symmetries(model: nn.Module, inputs: Mapping[str, Any] | None = None, *, preset: str = "full") -> SymmetryMap:
    """The continuous symmetries of a model's attention, and the folds that go with them.

    Each group is the largest of the templates that holds on a randomised local twin of its module; nothing is
    claimed by the name of a class. Run :func:`hf_geosharp.symmetry.verify.verify` to prove the map on the weights.

    Args:
        model: any module; left as it is.
        inputs: an example batch; made up from the configuration if None.
        preset: "full", "attention" (nothing outside attention folds) or "paper" (nothing folds).

    Raises:
        ValueError: no inputs were given and none can be made up.
    """
    folding = PRESETS[preset]
    names = canonical_names(model)
    sites = list(_sites(model, names))
    if not sites:
        return SymmetryMap()
    inputs = synthetic(model) if inputs is None else inputs
    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        calls = record_calls(model, [s.module for s in sites], inputs)
        pairs: list[Pair] = []
        folds: list[Fold] = []
        dropped: list[str] = []
        for site in sites:
            if site.module not in calls:
                dropped.append(f"{site.name}: not called on the example batch")
                continue
            twin = LocalTwin(site.module, calls[site.module], names)
            site_folds = [f for f in _bias_folds(site) if f.kind in folding and twin.holds(f)]
            site_pairs = list(_pairs(site, twin))
            pairs += site_pairs
            # A key bias that softmax ignores is a fold even where the pair is not; it is claimed with the pair only.
            folds += site_folds if site_pairs else []
            dropped += [
                f"{site.name}.{kind}: no symmetry of the templates holds"
                for kind in ("qk", "vo")
                if kind not in {p.kind for p in site_pairs}
            ]
        gains = _gains(model, names, inputs) if "norm_gain" in folding else ()
    finally:
        for module, mode in training.items():
            module.training = mode
    return SymmetryMap(tuple(pairs), (*gains, *folds), tuple(dropped))


# ---------------------------------------------------------------------------------------------------------- sites


def _sites(model: nn.Module, names: Mapping[int, str]) -> Iterator[Site]:
    """Every module that some layout fits, outermost first; a projection belongs to one site."""
    taken: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
    for path, module in model.named_modules():
        for layout in shipped().layouts:
            site = _match(
                path, module, layout, getattr(module, "config", None) or getattr(model, "config", None), names
            )
            if site is None:
                continue
            used = {(v.parameter, tuple(v.select.items())) for v in site.weights.values()}
            if not used & taken:
                taken |= used
                yield site
            break


def _match(path: str, module: nn.Module, layout: Layout, config: Any, names: Mapping[int, str]) -> Site | None:
    """The site of a module under a layout, or None where shapes do not agree."""
    linears: dict[str, LinearMap] = {}
    for role in ROLES:
        found = as_linear(_submodule(module, layout.paths[role]))
        if found is None or id(found.weight) not in names:
            return None
        linears[role] = found
    sizes = _sizes(linears, layout, config)
    if sizes is None:
        return None
    weights: dict[str, View] = {}
    biases: dict[str, View] = {}
    for role, linear in linears.items():
        head, other = parse(layout.patterns[role])[0], ("o",) if role == "o" else ("i",)
        head_axis = linear.in_axis if role == "o" else linear.out_axis
        free = linear.out_features if role == "o" else linear.in_features
        group = ("g",) if "g" in head else ()
        select = dict(layout.select.get(role, {}))
        base = View(
            names[id(linear.weight)],
            (head, other) if head_axis == 0 else (other, head),
            {**sizes, other[0]: free},
            ("n",),
            ("h",),
            (*group, *other),
            select=select,
        )
        weights[role] = base
        bias = linear.bias
        if bias is not None and id(bias) in names and role != "o":
            biases[role] = replace(base, parameter=names[id(bias)], axes=(head,), rows=group)
    out = linears["o"].bias
    out_bias = None
    if out is not None and id(out) in names:
        out_bias = View(names[id(out)], (("o",),), {"o": out.shape[0]}, (), (), ("o",))
    return Site(path, module, weights, biases, out_bias)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split("."):
        if part not in module._modules:
            return None
        module = module._modules[part]  # type: ignore[assignment]
    return module


def _sizes(linears: Mapping[str, LinearMap], layout: Layout, config: Any) -> dict[str, int] | None:
    """n key heads, g query heads on each, h head dimension; None where the projections do not fit them."""
    query = next((getattr(config, a) for a in shipped().query_heads if isinstance(getattr(config, a, None), int)), None)
    if not query:
        return None
    key = next((getattr(config, a) for a in shipped().key_heads if isinstance(getattr(config, a, None), int)), query)
    if not key or query % key:
        return None
    inner = linears["o"].in_features
    sizes = {"n": key, "g": query // key, "h": inner // query, "s": layout.parts}
    if inner % query:
        return None
    expected = {role: _product(layout.patterns[role], sizes) for role in ROLES}
    actual = {r: linear.in_features if r == "o" else linear.out_features for r, linear in linears.items()}
    return sizes if expected == actual else None


def _product(pattern: str, sizes: Mapping[str, int]) -> int:
    out = 1
    for axis in parse(pattern)[0]:
        out *= sizes[axis]
    return out


# ----------------------------------------------------------------------------------------------- groups by probing


def _pairs(site: Site, twin: LocalTwin) -> Iterator[Pair]:
    """For query/key and value/output the largest template that holds on the twin."""
    w, b = site.weights, site.biases
    q, k, v = ((w[r], *([b[r]] if r in b else [])) for r in "qkv")
    for kind, g, h, templates in (
        ("qk", q, k, (_general, *(_rotary(p) for p in ROTARY))),
        ("vo", v, (w["o"],), (_general,)),
    ):
        for template in templates:
            pair = template(Pair(f"{_label(site.name)}{kind}", kind, site.name, Group(w["q"].sizes["h"]), g, h))
            if pair is not None and twin.holds(pair):
                yield pair
                break


def _label(path: str) -> str:
    return f"{path}." if path else ""


def _general(pair: Pair) -> Pair:
    return pair


def _rotary(pairing: str) -> Any:
    """Template of one complex number for each rotary frequency."""
    axes = ROTARY[pairing]

    def template(pair: Pair) -> Pair | None:
        h = pair.group.dim
        if h % 2:
            return None

        def turn(view: View) -> View:
            split = view.split("h", axes, {"c": 2, "f": h // 2})
            return replace(split, copies=(*view.copies, "f"), dim=(), field="c")

        return replace(pair, group=Group(1, complex=True), g=tuple(map(turn, pair.g)), h=tuple(map(turn, pair.h)))

    return template


def _bias_folds(site: Site) -> Iterator[Fold]:
    """Key and value biases that may fold."""
    if "k" in site.biases:
        yield KeyBias(f"{_label(site.name)}key_bias", site.name, site.biases["k"], site.weights["k"])
    if "v" in site.biases and site.out_bias is not None:
        yield ValueBias(f"{_label(site.name)}value_bias", site.name, site.biases["v"], site.weights["o"], site.out_bias)


# ---------------------------------------------------------------------------------------------------- norm gains


def _gains(model: nn.Module, names: Mapping[int, str], inputs: Mapping[str, Any]) -> tuple[Fold, ...]:
    """Norms whose output goes into linear maps and nowhere else.

    Hooks show which linear maps read a norm; whether something else does (a residual, as in post-norm blocks) shows
    when the gain is moved on the model.
    """
    candidates = SymmetryMap(folds=tuple(_gain_candidates(model, names, inputs)))
    return verify(model, candidates, [inputs]).map.folds


def _gain_candidates(model: nn.Module, names: Mapping[int, str], inputs: Mapping[str, Any]) -> Iterator[Gain]:
    """Norms whose output is seen going into linear maps, and into none that reads something else as well."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                owners[id(p)] = owners.get(id(p), 0) + 1
    norms = {m: n for n, m in model.named_modules() if _is_norm(m, names)}
    linears = {m: linear for m in model.modules() if (linear := as_linear(m)) is not None}
    outputs: dict[int, nn.Module | None] = {}
    reads: dict[nn.Module, set[nn.Module | None]] = {}
    alive: list[Tensor] = []  # storage that is still alive cannot be used again under the same address

    def after_norm(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            alive.append(output)
            outputs[output.untyped_storage().data_ptr()] = module

    def before_linear(module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            alive.append(args[0])
            reads.setdefault(module, set()).add(outputs.get(args[0].untyped_storage().data_ptr()))

    handles = [m.register_forward_hook(after_norm) for m in norms]
    handles += [m.register_forward_pre_hook(before_linear) for m in linears]
    try:
        with torch.no_grad():
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()

    calls = record_calls(model, norms, inputs)
    for norm, path in norms.items():
        readers = [m for m, sources in reads.items() if norm in sources]
        params = [linears[m].weight for m in readers] + [b for m in readers if (b := linears[m].bias) is not None]
        exclusive = all(reads[m] == {norm} for m in readers)
        private = all(owners[id(p)] == 1 and id(p) in names for p in params)
        if not readers or not exclusive or not private or norm not in calls:
            continue
        gain = _gain(norm, path, [linears[m] for m in readers], names, LocalTwin(norm, calls[norm], names))
        if gain is not None:
            yield gain


def _is_norm(module: nn.Module, names: Mapping[int, str]) -> bool:
    """A leaf module with a vector weight: what it does is probed."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and not list(module.children()) and id(weight) in names


def _gain(
    norm: nn.Module, path: str, readers: list[LinearMap], names: Mapping[int, str], twin: LocalTwin
) -> Gain | None:
    """The fold of a norm, with the offset (weight or 1 + weight) under which its output scales with the gain."""
    weight, bias = norm._parameters["weight"], norm._parameters.get("bias")
    assert weight is not None
    gain_name = names[id(weight)]
    bias_name = names[id(bias)] if bias is not None else None
    base = twin.run(twin.weights)
    if len(base) != 1 or base[0].shape[-1] != weight.shape[0]:
        return None
    t = torch.rand(weight.shape[0], generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(weight.device)
    t = t + 0.5
    for offset in (0.0, 1.0):
        moved = dict(twin.weights)
        moved[gain_name] = (twin.weights[gain_name] + offset) * t - offset
        if bias_name:
            moved[bias_name] = twin.weights[bias_name] * t
        if torch.allclose(twin.run(moved)[0], base[0] * t, rtol=1e-6, atol=1e-9):
            mapped = tuple(
                Reader(names[id(x.weight)], x.in_axis, names[id(x.bias)] if x.bias is not None else None)
                for x in readers
            )
            gamma = weight.detach() + offset
            gain = Gain(f"{_label(path)}gain", path, gain_name, bias_name, mapped, weight.shape[0], offset)
            # β in units of γ needs γ everywhere.
            return gain if gain.bias is None or gain.folds_bias or bool((gamma != 0).all()) else None
    return None
