"""Finds the symmetries of a live model: sites from a trace, groups on local twins, folds from who reads what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from hf_geosharp.arguments import check, check_choice
from hf_geosharp.carried import emptied
from hf_geosharp.errors import first_line
from hf_geosharp.randomness import the_same_drawn
from hf_geosharp.symmetry import cache
from hf_geosharp.symmetry.attention.search import MODEL, Heads
from hf_geosharp.symmetry.attention.sites import ONE_SIDED
from hf_geosharp.symmetry.folding.folds import folds
from hf_geosharp.symmetry.hidden.experts import unvisited
from hf_geosharp.symmetry.hidden.units import units
from hf_geosharp.symmetry.inputs import call, output_tensors, synthetic
from hf_geosharp.symmetry.layouts import Layout, layouts_of, registered
from hf_geosharp.symmetry.layouts.traced import disagreement
from hf_geosharp.symmetry.layouts.tried import described_pairs
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.names import Names
from hf_geosharp.symmetry.overlooked import inactive, not_tried, overlooked
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import canonical_names, widened
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.features import Families
from hf_geosharp.symmetry.tracing.trace import differentiable, trace
from hf_geosharp.symmetry.trials import probe
from hf_geosharp.symmetry.trials.narrow import cuts
from hf_geosharp.symmetry.trials.probe import Trials
from hf_geosharp.symmetry.verify import Verified, verify
from hf_geosharp.wrappers import check_module, uncompiled

_ALL = (
    "qk", "vo", "qk_norm", "qk_mean", "mlp", "lora", "key_bias", "value_bias", "norm_gain", "layer_scale",
    "read_mean", "written_mean", "stream_bias",
)  # fmt: skip

PRESETS: dict[str, frozenset[str]] = {
    "full": frozenset(_ALL),
    "attention": frozenset({"qk", "vo", "key_bias", "value_bias"}),
    "paper": frozenset({"qk", "vo"}),
}
"""Which kinds of symmetry each preset uses."""


SMALL = 1 << 26
"""Parameters of a model that is proved kind by kind already when it is searched, and in double precision."""


NOT_APART = "it cannot be taken apart"
"""Said of a model whose code no derivative goes through."""


def find_symmetries(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    preset: str = "full",
    layouts: Sequence[Layout] = (),
    cached: bool = True,
    prove: bool = True,
    alive: Callable[[], None] = lambda: None,
) -> SymmetryMap:
    """Finds the continuous symmetries of a model: of attention, hidden units, experts and adapters, and their folds.

    The projections are found in a traced forward pass (:mod:`hf_geosharp.symmetry.tracing.trace`); each group is the
    largest of the templates that holds on a randomised local twin of the modules concerned. No claim rests on the name
    of a class.
    Run :func:`hf_geosharp.symmetry.verify.verify` to prove the map on the weights.

    Args:
        model: any module; it is not changed.
        inputs: an example batch; made up from the configuration if None.
        preset: "full", "attention" (nothing outside attention) or "paper" (the paper's pairs, nothing is folded).
        layouts: descriptions of attention modules that cannot be traced.
        cached: use the symmetries found before and kept on disk, and add to them (:mod:`hf_geosharp.symmetry.cache`).
        prove: leave out claims that do not hold on the model itself; False is for callers that verify the map anyway.
        alive: called repeatedly during the search, which may take minutes.

    Raises:
        InputsError: no inputs were given and none can be made up.
        UsageError: the preset is unknown; a layout fits no module of the model, or does not hold where it fits.
    """
    check_module(model, "load it first, as hf_geosharp.load_pretrained does")
    check(inputs=inputs, cached=cached, prove=prove, alive=alive)
    check_choice("preset", preset, PRESETS)
    layouts = layouts_of(layouts)
    inputs = synthetic(model) if inputs is None else inputs
    digest = cache.key(model, preset, inputs, prove) if cached and not layouts and not registered() else None
    # What is missed or refuted may be so on these inputs alone.
    places = [digest, cache.on(digest, inputs)] if digest else []
    known = next((found for place in places if (found := cache.load(place)) is not None), None)
    if known is not None:
        weights = dict(model.named_parameters(remove_duplicate=False))
        usable = tuple(f for f in known.folds if f.usable(weights))
        return replace(known, folds=usable).supported()

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return output_tensors(call(model, inputs))

    with (
        torch.inference_mode(False), torch.enable_grad(), differentiable(model), the_same_drawn(), emptied(model, run),
        uncompiled(),
    ):  # fmt: skip
        try:
            found, conclusive = _find(model, inputs, PRESETS[preset], layouts, alive)
        except (CheckpointError, RuntimeError) as error:
            # Its code does what no derivative can be taken through twice, or at all: checkpoints, kernels of its own.
            if not _without_derivative(error) or layouts or not _runs(model, inputs):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
            notes = (f"{type(model).__name__}: {NOT_APART} ({why})",)
            return SymmetryMap(unrecognised=notes, missed=notes)
    # A twin knows one module; what else reads its weights shows on the model alone.
    if prove:
        found = _proved(model, found, inputs)
    # Where nothing shows, other weights may be enough for more.
    if places and conclusive:
        cache.store(places[bool(found.missed or found.dropped)], found)
    return found


def _without_derivative(error: Exception) -> bool:
    """Whether it says that something has no derivative, of the order that is asked for."""
    known = isinstance(error, (CheckpointError, NotImplementedError))
    return known or ("derivative" in str(error) and "not implemented" in str(error))


def _runs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    try:
        with torch.no_grad():
            call(model, inputs)
    except Exception:
        return False
    return True


def _find(
    model: nn.Module,
    inputs: Mapping[str, Any],
    kinds: frozenset[str],
    layouts: Sequence[Layout],
    alive: Callable[[], None],
) -> tuple[SymmetryMap, bool]:
    """The map before it is proved, and whether nothing in it is open for the sake of this example or these weights."""
    names = canonical_names(model)
    traced = trace(model, inputs)
    families = Families()
    trials = Trials(model, traced.calls, names, alive, partial(cuts, traced), traced.operations)
    named = Names()
    heads = Heads(traced, families, trials, named)
    heads.search(kinds)
    unlike = partial(disagreement, forms=heads.forms, families=families)
    described = list(described_pairs(model, names, layouts, heads, trials, named, unlike))
    understood = tuple(f"{p.module or MODEL}.{p.kind}: " for p in described)
    unrecognised = [text for text in heads.unrecognised if not text.startswith(understood)]
    # In the order of the modules, whatever kind was searched first: the same seed gives the same element.
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    pairs = sorted([*heads.pairs, *described], key=lambda p: order[p.module])
    in_heads = sorted(heads.folds, key=lambda f: order[f.module])
    outside = list(units(traced, families, trials, named)) if kinds & {"mlp", "lora"} else []
    outside += unvisited(model, traced.calls, outside, trials, named)
    known = [set(p.parameters) for p in pairs]
    pairs += [u for u in outside if isinstance(u, Pair) and not any(set(u.parameters) <= k for k in known)]
    scales = [s for s in (*heads.scales, *outside) if isinstance(s, Scale) and s.kind in kinds]
    used = tuple(p for p in pairs if p.kind in kinds)
    folded = folds(model, names, traced, families, kinds, used, in_heads, named, trials.holds)
    silent = overlooked(traced, heads.sites, [*heads.pairs, *described])
    notes = (*dict.fromkeys(unrecognised), *silent, *not_tried(trials))
    missed = tuple(text for text in notes if not text.endswith(f": {ONE_SIDED}"))
    notes += tuple(inactive(getattr(model, "config", None)))
    whole = SymmetryMap(used, tuple(folded), (), notes, tuple(scales)).supported()
    limits = tuple(
        f"{s.name}: on inputs {probe.LARGER:g} times as large outputs move by {moved:.1e}"
        for s in whole.symmetries
        if (moved := trials.limit(s))
    )
    # Not claims that failed: the preset does not fold what they need.
    notes, missed = (*notes, *whole.dropped), (*missed, *whole.dropped)
    return replace(whole, dropped=(), unrecognised=notes, missed=missed, limited=limits), trials.conclusive


def _proved(model: nn.Module, found: SymmetryMap, inputs: Mapping[str, Any]) -> SymmetryMap:
    """The map less what does not hold on the model; a small model is proved kind by kind, in double precision.

    What hardly matters at these weights, or not at all, is kept: it has been proved on a twin.
    """
    if sum(p.numel() for p in model.parameters()) <= SMALL:
        try:
            with widened(model, torch.float64):
                return _less(found, verify(model, found, [inputs], each=True, apart=False), ROUNDING[torch.float64])
        except (RuntimeError, ValueError, TypeError):
            # Some models have operations that know single precision only.
            pass
    rounding = ROUNDING[torch.float32]
    return _less(found, verify(model, found, [inputs], enough=rounding), rounding)


def _less(found: SymmetryMap, proof: Verified, rounding: float) -> SymmetryMap:
    wrong = [c for c in proof.claims if c.status == "failed" and (c.deviation or 0.0) > rounding]
    return found.without(
        {c.name: f"outputs move by {c.deviation:.1e}, by {c.control:.1e} when broken on purpose" for c in wrong}
    )


ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative change of the outputs that says nothing about a claim whose control hardly moves them either."""
