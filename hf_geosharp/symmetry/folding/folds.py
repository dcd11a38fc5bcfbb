"""All that folds in a model, in the order in which it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from hf_geosharp.symmetry.fold import Fold, Gain, Mean, ReadMean
from hf_geosharp.symmetry.folding.added_means import added_means
from hf_geosharp.symmetry.folding.gains import gains
from hf_geosharp.symmetry.folding.layer_scales import layer_scales
from hf_geosharp.symmetry.folding.read_means import read_means
from hf_geosharp.symmetry.folding.stream_biases import stream_biases
from hf_geosharp.symmetry.folding.written_means import written_means
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.tracing.features import Families


def folds(
    model: nn.Module, names: Mapping[int, str], traced: Trace, families: Families, kinds: frozenset[str],
    pairs: Sequence[Pair], in_heads: Sequence[Fold],
    named: Callable[[str, str], str], holds: Callable[[Mean, str], bool],
) -> list[Fold]:  # fmt: skip
    """The folds of these kinds.

    ``names`` are those of the model's parameters, by identity; ``pairs`` are those that are used, ``in_heads`` the
    folds that attention has (:mod:`hf_geosharp.symmetry.attention`). Each gets a name by its module and kind; whether a
    mean ``holds`` in a module is tried where that does not show.
    """
    scales = list(_gains(model, names, traced, pairs, kinds))
    taken = {g.gain for g in scales}
    layers = [
        replace(f, name=named(f.module, f.kind))
        for f in (layer_scales(model, names, traced) if "layer_scale" in kinds else ())
        if f.scale.parameter not in taken
    ]
    read, written = [], []
    if {"read_mean", "written_mean"} <= kinds:
        heads = [f for f in in_heads if isinstance(f, Mean)]
        taken_up = {p for f in heads for p in f.parameters}
        written = [
            replace(mean, name=named(mean.module, mean.kind))
            for mean in (
                *written_means(model, names, traced, families, layers, taken_up, holds),
                *added_means(model, names, traced, taken_up),
            )
        ]
        read = list(_read_means(model, names, traced, scales, [*heads, *written], named))
    # What is read is centred before biases are taken away: that adds to them.
    found: list[Fold] = [*scales, *read, *in_heads, *layers, *written]
    if "stream_bias" not in kinds:
        return found
    gone = frozenset(v.parameter for f in found for v in f.fixed)
    constants = [
        replace(f, name=named(f.module, f.kind))
        for f in stream_biases(model, names, traced, gone, [f for f in written if not f.scale])
    ]
    # Where readers take up a norm's bias, theirs are folded afterwards.
    return [*(f for f in constants if f.readers), *found, *(f for f in constants if not f.readers)]


def _gains(
    model: nn.Module, names: Mapping[int, str], traced: Trace, pairs: Sequence[Pair], kinds: frozenset[str]
) -> Iterator[Gain]:
    """The folds of norms: of all, or of those that stand between the factors of a pair where biases fold, too."""
    between = {p.between.gain for p in pairs if p.between is not None}
    if "norm_gain" in kinds or (between and "value_bias" in kinds):
        yield from (g for g in gains(model, names, traced) if "norm_gain" in kinds or g.gain in between)


def _read_means(
    model: nn.Module, names: Mapping[int, str], traced: Trace, folding: Sequence[Gain], others: Sequence[Mean],
    named: Callable[[str, str], str],
) -> Iterator[ReadMean]:  # fmt: skip
    """The folds of the means of what reads a norm, beside ``others``, of what is written."""
    for mean in read_means(model, names, traced, folding):
        # What adds the same to all weights is among both.
        twice = sum(v.count for f in others for v in f.views if any(v.meets(w) for w in mean.views))
        yield replace(mean, name=named(mean.module, mean.kind), overlap=twice)
