"""Means that nothing sees of what is written: to a stream that only layer norms read, or to the softmax of a router.

The derivatives of all that becomes of what a linear map wrote sum to zero over its outputs then, at every place and
whatever the parameters are that it meets on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import torch
from torch import nn

from hf_geosharp.symmetry.attention.feature_views import features_view
from hf_geosharp.symmetry.base import Move, Weights
from hf_geosharp.symmetry.fold import LayerScale, Mean
from hf_geosharp.symmetry.folding.layer_scales import writer_of
from hf_geosharp.symmetry.folding.readers import private
from hf_geosharp.symmetry.folding.unseen import Written, unseen
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.features import Families


def written_means(
    model: nn.Module, names: Mapping[int, str], trace: Trace, families: Families, scales: Sequence[LayerScale],
    taken: Container[str], holds: Callable[[Mean, str], bool],
) -> Iterator[Mean]:  # fmt: skip
    """The folds, without names, of the means of what linear maps write that nothing sees.

    ``names`` are those of the model's parameters, by identity; ``scales`` are those that what is written is multiplied
    by; parameters that are ``taken`` are left out. Whether one ``holds`` in a module is tried where what is written is
    the logits of a softmax: code may look at those in ways that have no derivative.
    """
    alone = private(model, names, trace)
    writers = [own for name, own in trace.uses.items() if name not in taken and _writes(own, alone)]
    by_writer = {w.weight: s for s in scales if s.dimension > 1 for w in s.writers}
    parameters = dict(model.named_parameters())
    found = [by_writer.get(own[0].weight.parameter) for own in writers]
    numbers = [None if scale is None else parameters[scale.scale.parameter].flatten() for scale in found]
    written = [Written([(x.leaf, x.axis) for x in own], n) for own, n in zip(writers, numbers, strict=True)]
    for own, scale in ((writers[i], found[i]) for i in unseen(trace, written)):
        table = torch.arange(own[0].outputs).unsqueeze(0)
        views = features_view(families, families.outputs(own[0]), table)
        if views:
            module = own[0].weight.parameter.rpartition(".")[0]
            mean = Mean("", module, tuple(views), "written_mean", None if scale is None else scale.scale)
            place = _chooses(trace, own)
            if place is None or holds(_Far(**vars(mean)), place):
                yield mean


class _Far(Mean):
    """The same, moved by so much that code would notice that compares logits with how large they are."""

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """A thousand times as much."""
        return {name: 1e3 * v for name, v in super().random(weights, generator, condition).items()}


def _chooses(trace: Trace, events: Sequence[Linear]) -> str | None:
    """The module of both a linear map and the softmax of what it writes, as routers have; None where there is none."""
    for x in events:
        bit = trace.leaves.bits([x.leaf])
        for logits, scope in trace.logits:
            if trace.behind(logits) & bit:
                shared = [a for a, b in zip(x.scope, scope, strict=False) if a == b]
                return next((n for n in reversed(shared) if x.weight.parameter.startswith(f"{n}." if n else "")), "")
    return None


def _writes(events: Sequence[Linear], alone: set[str]) -> bool:
    """Whether these are uses of all of a parameter, and of a bias, which are used for nothing else."""
    writers = {writer_of(x) for x in events if x.exact and not x.grouped}
    if len(writers) != 1 or not all(x.exact and not x.grouped for x in events):
        return False
    (writer,) = writers
    return writer is not None and alone.issuperset({writer.weight, writer.bias or writer.weight})
