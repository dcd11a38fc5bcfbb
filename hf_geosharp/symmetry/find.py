"""Finds the symmetries of a live model: sites from a trace, groups on local twins, folds from who reads what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from hf_geosharp.arguments import check, check_choice
from hf_geosharp.carried import emptied
from hf_geosharp.errors import UsageError, first_line, warn
from hf_geosharp.randomness import the_same_drawn
from hf_geosharp.symmetry import cache
from hf_geosharp.symmetry.attention.blocks import Analysis, analyse
from hf_geosharp.symmetry.attention.candidates import (
    alike_blocks,
    betweens_of,
    bias_folds,
    isometries,
    lengths,
    norm_bias_folds,
    of_another,
    pairs_of_blocks,
)
from hf_geosharp.symmetry.attention.couplings import Couplings
from hf_geosharp.symmetry.attention.exchange import exchanges, joins
from hf_geosharp.symmetry.attention.head_means import head_means
from hf_geosharp.symmetry.attention.sites import ONE_SIDED, Attention, attentions, common
from hf_geosharp.symmetry.fold import Fold, Gain, KeyBias, Mean, ReadMean, ValueBias
from hf_geosharp.symmetry.folding.added_means import added_means
from hf_geosharp.symmetry.folding.gains import gains
from hf_geosharp.symmetry.folding.layer_scales import layer_scales
from hf_geosharp.symmetry.folding.read_means import read_means
from hf_geosharp.symmetry.folding.stream_biases import stream_biases
from hf_geosharp.symmetry.folding.written_means import written_means
from hf_geosharp.symmetry.hidden.experts import unvisited
from hf_geosharp.symmetry.hidden.units import units
from hf_geosharp.symmetry.inputs import call, output_tensors, synthetic
from hf_geosharp.symmetry.layouts import Declared, Layout, declared, layouts_of, registered
from hf_geosharp.symmetry.layouts.traced import disagreement
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Between, Pair
from hf_geosharp.symmetry.parameters import canonical_names, widened
from hf_geosharp.symmetry.partition import Partition
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.events import Trace
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


HIDDEN = "what it mixes has no derivatives (under torch.no_grad, inference_mode, or in an autograd.Function?)"
"""Of a module of whose attention no more than its weights is seen."""

ROWS = "queries or keys are computed by matrices in a way that is not seen as a linear map: numbers are claimed alone"
"""Of matrices that pass for the weights of norms: each coordinate can be scaled, but there is more to it."""

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
        folds = tuple(f for f in known.folds if f.usable(weights))
        return replace(known, folds=folds).supported()

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
    found = _Found()
    sites = list(attentions(traced, families))
    forms = {"qk": [s.qk for s in sites], "vo": [s.vo for s in sites]}
    for kind, own in forms.items():
        groups = [([sites[i] for i in members], [own[i] for i in members]) for members in _sharing(own)]
        dead = [group for group in groups if not _attend(found, kind, *group, traced, families, trials)]
        for group in dead:
            _attend(found, kind, *group, traced, families, trials, last=True)
    biases = [f for f in found.biases if f.kind in kinds]
    for f in biases:
        trials.holds(f, f.module)  # of those where nothing shows, others that are alike say what they are
    found.biases = [
        replace(f, name=found.names(f.module, f.kind))  # type: ignore[type-var]
        for f in _held(biases, trials)
    ]
    # In the order of the modules, whatever kind was searched first: the same seed gives the same element.
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    found.biases.sort(key=lambda f: order[f.module])
    unlike = partial(disagreement, forms=forms, families=families)
    described = list(_declared_pairs(model, names, layouts, found, trials, unlike))
    found.pairs += described
    understood = tuple(f"{p.module or MODEL}.{p.kind}: " for p in described)
    found.unrecognised = [text for text in found.unrecognised if not text.startswith(understood)]
    pairs = sorted(found.pairs, key=lambda p: order[p.module])
    outside = list(units(traced, families, trials, found.names)) if kinds & {"mlp", "lora"} else []
    outside += unvisited(model, traced.calls, outside, trials, found.names)
    known = [set(p.parameters) for p in pairs]
    pairs += [u for u in outside if isinstance(u, Pair) and not any(set(u.parameters) <= k for k in known)]
    scales = [s for s in (*found.scales, *outside) if isinstance(s, Scale) and s.kind in kinds]
    used = tuple(p for p in pairs if p.kind in kinds)
    own_gains = list(_gains(model, names, traced, used, kinds))
    taken = {g.gain for g in own_gains}
    scaled = [
        replace(f, name=found.names(f.module, f.kind))
        for f in (layer_scales(model, names, traced) if "layer_scale" in kinds else ())
        if f.scale.parameter not in taken
    ]
    read, written = [], []
    if {"read_mean", "written_mean"} <= kinds:
        heads = [f for f in found.biases if isinstance(f, Mean)]
        taken_up = {p for f in heads for p in f.parameters}
        written = [
            replace(mean, name=found.names(mean.module, mean.kind))
            for mean in (
                *written_means(model, names, traced, families, scaled, taken_up, trials.holds),
                *added_means(model, names, traced, taken_up),
            )
        ]
        read = list(_read_means(model, names, traced, own_gains, [*heads, *written], found.names))
    # What is read is centred before biases are taken away: that adds to them.
    folds: list[Fold] = [*own_gains, *read, *found.biases, *scaled, *written]
    if "stream_bias" in kinds:
        gone = frozenset(v.parameter for f in folds for v in f.fixed)
        constants = [
            replace(f, name=found.names(f.module, f.kind))
            for f in stream_biases(model, names, traced, gone, [f for f in written if not f.scale])
        ]
        # Where readers take up a norm's bias, theirs are folded afterwards.
        folds = [*(f for f in constants if f.readers), *folds, *(f for f in constants if not f.readers)]
    notes = (*dict.fromkeys(found.unrecognised), *_overlooked(traced, sites, found.pairs), *_not_tried(trials))
    missed = tuple(text for text in notes if not text.endswith(f": {ONE_SIDED}"))
    notes += tuple(inactive(getattr(model, "config", None)))
    whole = SymmetryMap(used, tuple(folds), (), notes, tuple(scales)).supported()
    limits = tuple(
        f"{s.name}: on inputs {probe.LARGER:g} times as large outputs move by {moved:.1e}"
        for s in whole.symmetries
        if (moved := trials.limit(s))
    )
    # Not claims that failed: the preset does not fold what they need.
    notes, missed = (*notes, *whole.dropped), (*missed, *whole.dropped)
    return replace(whole, dropped=(), unrecognised=notes, missed=missed, limited=limits), trials.conclusive


def _held(biases: Sequence[Fold], trials: Trials) -> Iterator[Fold]:
    """Folds that hold; what folds by itself does not fold with others again."""
    taken: set[object] = set()
    for f in biases:
        own = {v.region for v in f.biases} if isinstance(f, (KeyBias, ValueBias)) else set()
        if not own & taken and trials.holds(f, f.module):
            taken |= own
            yield f


def _gains(
    model: nn.Module, names: Mapping[int, str], traced: Trace, pairs: Sequence[Pair], kinds: frozenset[str]
) -> Iterator[Gain]:
    """The folds of norms: of all, or of those that stand between the factors of a pair where biases fold, too."""
    between = {p.between.gain for p in pairs if p.between is not None}
    if "norm_gain" in kinds or (between and "value_bias" in kinds):
        yield from (g for g in gains(model, names, traced) if "norm_gain" in kinds or g.gain in between)


def _read_means(
    model: nn.Module, names: Mapping[int, str], traced: Trace, folding: Sequence[Gain], others: Sequence[Mean],
    named: _Names,
) -> Iterator[ReadMean]:  # fmt: skip
    """The folds of the means of what reads a norm, beside ``others``, of what is written."""
    for mean in read_means(model, names, traced, folding):
        # What adds the same to all weights is among both.
        twice = sum(v.count for f in others for v in f.views if any(v.meets(w) for w in mean.views))
        yield replace(mean, name=named(mean.module, mean.kind), overlap=twice)


def inactive(config: Any, prefix: str = "config") -> Iterator[str]:
    """What a configuration switches on that inputs need not reach, as text: it would end the symmetries."""
    for name, value in sorted(vars(config).items() if hasattr(config, "__dict__") else ()):
        if name in _CLIPS and isinstance(value, (int, float)) and value:
            yield f"{prefix}.{name} = {value:g}: {_CLIPS[name]}"
        elif hasattr(value, "to_dict") and not isinstance(value, type):
            yield from inactive(value, f"{prefix}.{name}")


_CLIPS = {
    "clip_qkv": "queries, keys and values are cut off there; the symmetries hold only while nothing reaches it",
}
"""Settings of configurations under which a symmetry ends at large values."""


def _proved(model: nn.Module, found: SymmetryMap, inputs: Mapping[str, Any]) -> SymmetryMap:
    """The map less what does not hold on the model; a small model is proved kind by kind, in double precision.

    What hardly matters at these weights, or not at all, is kept: it has been proved on a twin.
    """
    if sum(p.numel() for p in model.parameters()) <= SMALL:
        try:
            with widened(model, torch.float64):
                return _less(found, verify(model, found, [inputs], each=True), ROUNDING[torch.float64])
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


class _Names:
    """Names of symmetries: the module and the kind, with a number where one module has several."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def __call__(self, module: str, kind: str) -> str:
        name = f"{module}.{kind}" if module else kind
        self._used[name] = self._used.get(name, 0) + 1
        return name if self._used[name] == 1 else f"{name}.{self._used[name]}"


class _Found:
    """What has been found so far."""

    def __init__(self) -> None:
        self.names = _Names()
        self.pairs: list[Pair] = []
        self.biases: list[Fold] = []
        self.scales: list[Scale] = []
        self.unrecognised: list[str] = []
        self.alone: dict[tuple[int, str], list[Pair]] = {}
        """By identity and kind the pairs of attentions that share no weights with others."""
        self.partly: dict[tuple[int, str], str] = {}
        """Of the same, why they are not all that there is."""


def _sharing(forms: Sequence[Couplings]) -> Iterator[list[int]]:
    """Forms that have features in common, together: shared modules, keys that several layers read."""
    owner: dict[tuple[int, int], int] = {}
    partition = Partition(range(len(forms)))
    for i, form in enumerate(forms):
        for node in form.nodes:
            j = owner.setdefault(node, i)
            partition.join(i, j)
    yield from partition.groups().values()


def _attend(
    found: _Found, kind: str, sites: Sequence[Attention], forms: Sequence[Couplings], traced: Trace,
    families: Families, trials: Trials, *, last: bool = False,
) -> bool:  # fmt: skip
    """Pairs and bias folds of one side of attention, for sites that share it.

    False where nothing shows on this example, as in a first layer that mixes zeros: those that are alike, once they
    are known, say what it has. The ``last`` time it is told.
    """
    scope = common([s.softmax.scope for s in sites]) if len(sites) > 1 else sites[0].scope
    pairs, partly, reason = list(_carried(found, kind, scope, sites, trials)), "", ""
    if pairs:
        partly = found.partly.get((id(sites[0].like), kind), "")
    else:
        analysis = analyse(forms, families)
        pairs = list(_pairs(kind, scope, analysis, families, trials, found.names, betweens_of(sites, forms, traced)))
        # Of a head that is normalised in part, that part.
        reason, partly = analysis.reason, analysis.reason if pairs else ""
        if kind == "qk" and (partly or not pairs):
            exchanged = _exchanged(scope, sites, traced, families, trials, found.names)
            pairs += exchanged
            if _of_matrices(exchanged, sites, traced, families):
                partly = partly or reason or ROWS
        if not pairs:
            isometric = next((p for p in isometries(kind, scope, forms, families) if trials.holds(p, scope)), None)
            pairs = [replace(isometric, name=found.names(scope, kind))] if isometric else []
    found.scales += [
        replace(s, name=found.names(scope, f"{kind}_scale")) for s in lengths(pairs) if trials.holds(s, scope)
    ]
    centred = []
    if kind == "qk" and (partly or all(p.group.isometric or p.kind != "qk" for p in pairs)):
        centred = [m for m in head_means(sites, scope, traced, families) if trials.holds(m, scope)]
        found.biases += centred
    mixed = traced.mixing | traced.weighing
    if not pairs and kind == "vo" and all(not s.outputs and id(s.softmax) not in mixed for s in sites):
        return True  # shares that are handed out as they are
    if not pairs and not centred:
        if not last and not reason and not trials.shows(scope, kind):
            return False
        found.unrecognised.append(f"{_place(scope, sites)}.{kind}: {reason or trials.why_not(scope, kind)}")
        return True
    if partly:
        found.unrecognised.append(f"{_place(scope, sites)}.{kind}: in part: {partly}")
    found.pairs += pairs
    if len(sites) == 1:
        found.alone[id(sites[0]), kind], found.partly[id(sites[0]), kind] = pairs, partly
    for pair in pairs:
        if pair.kind in ("qk", "vo") and not pair.group.complex:
            found.biases += bias_folds(pair, sites)
        elif pair.kind == "qk_norm":
            found.biases += norm_bias_folds(pair, traced)
    return True


def _exchanged(
    scope: str, sites: Sequence[Attention], traced: Trace, families: Families, trials: Trials, names: _Names
) -> list[Pair]:
    """What the weights of norms on queries and keys can exchange."""
    pairs: list[Pair] = []
    for candidates in exchanges(sites, scope, traced, families):
        held = next((p for p in candidates if trials.holds(p, scope)), None)
        if held is not None and joins(held, pairs, families):
            pairs.append(replace(held, name=names(scope, held.kind)))
    return pairs


def _of_matrices(pairs: Sequence[Pair], sites: Sequence[Attention], traced: Trace, families: Families) -> bool:
    """Whether what passes for the weights of norms are matrices that were not seen as linear maps.

    A norm has no more weights than a linear map before it has outputs.
    """
    sources = {id(s) for site in sites for s in traced.sources(site.softmax.logits)}
    outputs = max((x.outputs for x in traced.linears if id(x.leaf) in sources), default=0)
    sizes = {f.parameter: math.prod(f.shape) for f in families.members}
    return any(v.height > 1 and sizes[v.parameter] > outputs for p in pairs for v in (*p.g, *p.h))


def _place(scope: str, sites: Sequence[Attention]) -> str:
    """Where to look for sites: the modules of their softmaxes, or that of it all where those are many."""
    inside = list(dict.fromkeys(s.softmax.scope[-1] for s in sites if s.softmax.scope))
    return ", ".join(n or MODEL for n in inside) if 0 < len(inside) <= MAX_PLACES else scope or MODEL


MAX_PLACES = 4

MODEL = "the model"
"""What the module is called that has no name."""


def _overlooked(traced: Trace, sites: Sequence[Attention], pairs: Sequence[Pair]) -> Iterator[str]:
    """Modules that multiply what is computed, of which nothing is claimed and which are no site."""
    within = {s.softmax.scope[-1] for s in sites if s.softmax.scope}
    claimed = {p.module for p in pairs if p.kind in ("qk", "vo", "qk_norm")}

    def told(module: str) -> bool:
        return any(f"{m}.".startswith(f"{module}.") for m in within) or any(
            f"{module}.".startswith(f"{m}.") or m.startswith(f"{module}.") for m in claimed
        )

    for module in traced.scripted:
        yield f"{module or MODEL}: it is compiled to TorchScript, which cannot be looked into"
    for module in traced.hidden:
        if not told(module):
            yield f"{module}: {HIDDEN}"
    for module in traced.products:
        if module not in traced.hidden and not told(module):
            yield f"{module}: multiplies what its linear maps write without a softmax"


def _not_tried(trials: Trials) -> Iterator[str]:
    for module, size in trials.too_large.items():
        yield (
            f"{module or MODEL}: its {size:,} parameters are more than are copied for a trial "
            f"({probe.LARGEST:,}); what would have to be tried on it as a whole is not claimed"
        )


def _carried(found: _Found, kind: str, scope: str, sites: Sequence[Attention], trials: Trials) -> Iterator[Pair]:
    """What was found at an attention that is alike, under the names of this one; nothing where it does not hold."""
    if len(sites) > 1 or sites[0].like is None:
        return
    names = sites[0].renamed
    pairs = found.alone.get((id(sites[0].like), kind), [])
    if any(n not in names for p in pairs for n in p.parameters):
        return
    here = [of_another(p, scope, names) for p in pairs]
    if all(trials.holds(p, scope) for p in here):
        yield from (replace(p, name=found.names(scope, p.kind)) for p in here)


def _pairs(
    kind: str, scope: str, analysis: Analysis, families: Families, trials: Trials, names: _Names,
    betweens: Sequence[Between] = (),
) -> Iterator[Pair]:  # fmt: skip
    """For each kind of block the largest group that holds on the twin."""
    for blocks in alike_blocks(analysis.blocks):
        for pair in pairs_of_blocks(kind, scope, blocks, families, betweens):
            if trials.holds(pair, scope):
                yield replace(pair, name=names(scope, kind))
                break


def _declared_pairs(
    model: nn.Module, names: Mapping[int, str], layouts: Sequence[Layout], found: _Found, trials: Trials,
    unlike: Callable[[Pair], str | None],
) -> Iterator[Pair]:  # fmt: skip
    """Pairs of modules that a layout describes and the trace did not see; ``unlike`` says what it saw otherwise.

    Raises:
        UsageError: a layout of the user's fits no module, or one where it does not hold. One that is registered for
            all models need not fit this one; that is warned of.
    """
    taken = {name for p in found.pairs for name in p.parameters}
    given = [layout.name for layout in (*layouts, *registered())]
    used: set[str] = set()
    for site in declared(model, names, layouts):
        used.add(site.layout)
        for kind, candidates in site.candidates.items():
            known = any(name in taken for name in candidates[0].parameters)
            if known and site.layout not in given:
                continue
            if not trials.called(site.module):
                found.unrecognised.append(f"{site.module}.{kind}: not called on the example batch")
                continue
            held = next((p for p in candidates if trials.holds(p, site.module)), None)
            if held is not None:
                if not known:
                    yield replace(held, name=found.names(site.module, kind))
            elif site.layout in given and (seen := unlike(candidates[0])) != "":
                _refuse(site, kind, trials.measure(candidates[0], site.module), seen)
    for name in (name for name in given if name not in used):
        text = (
            f"The layout {name!r} fits no module of this {type(model).__name__}: check its submodules and head counts."
        )
        if any(layout.name == name for layout in layouts):
            raise UsageError(text)
        warn(text)


def _refuse(site: Declared, kind: str, measured: tuple[float, float] | None, seen: str | None) -> NoReturn:
    """Says by how much a layout of the user's does not hold, and what was seen instead if anything was."""
    why = "the module cannot be run by itself"
    if measured is not None:
        why = f"the output moves by {measured[0]:.1e} (by {measured[1]:.1e} when broken on purpose)"
    raise UsageError(
        f"The layout {site.layout!r} does not hold for the {kind} of {site.module}: {f'{seen}, and ' if seen else ''}"
        f"{why}. Correct its projections, patterns or heads, or leave it out."
    )
