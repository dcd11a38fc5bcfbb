"""Norms whose gain (and bias) only linear maps read: candidates seen by hooks, decided by moving them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import Gain, Reader
from hf_geosharp.symmetry.inputs import call
from hf_geosharp.symmetry.linear import LinearMap, as_linear
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.probe import LocalTwin, record_calls
from hf_geosharp.symmetry.verify import verify


def gains(model: nn.Module, names: Mapping[int, str], inputs: Mapping[str, Any]) -> tuple[Fold, ...]:
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
            gain = Gain(f"{path}.gain" if path else "gain", path, gain_name, bias_name, mapped, weight.shape[0], offset)
            # β in units of γ needs γ everywhere.
            return gain if gain.bias is None or gain.folds_bias or bool((gamma != 0).all()) else None
    return None
