"""Means that nothing sees of what is written: to a stream that only layer norms read, or to the softmax of a router.

The derivatives of all that becomes of what a linear map wrote sum to zero over its outputs then, at every place and
whatever the parameters are that it meets on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.base import Move, Weights
from hf_geosharp.symmetry.events import Linear, Trace
from hf_geosharp.symmetry.feature_views import features_view
from hf_geosharp.symmetry.features import NEAR, Families, cancels, drawn
from hf_geosharp.symmetry.fold import LayerScale, Mean
from hf_geosharp.symmetry.layer_scales import writer_of
from hf_geosharp.symmetry.readers import private


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
    numbers = [
        None if scale is None else parameters[scale.scale.parameter].flatten()
        for scale in (by_writer.get(own[0].weight.parameter) for own in writers)
    ]
    for own, number in _unseen(trace, list(zip(writers, numbers, strict=True))):
        table = torch.arange(own[0].outputs).unsqueeze(0)
        views = features_view(families, families.outputs(own[0]), table)
        scale = by_writer.get(own[0].weight.parameter) if number is not None else None
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


_Writer = tuple[list[Linear], Tensor | None]
"""All uses of a linear map, and what it writes is multiplied by."""


def _unseen(trace: Trace, writers: Sequence[_Writer]) -> Iterator[_Writer]:
    """Those of which the mean of what they write reaches nothing."""
    softmaxes = {id(x.logits) for x in trace.softmaxes if x.direct}
    ends = [(x, id(x) in softmaxes) for x in (*trace.read_tensors, *trace.decided) if x.requires_grad]
    rest = [own for own in writers if own[0][0].outputs > 1]
    try:
        # What cancels by chance does not do so twice.
        for seed in (8, 9):
            grads = iter(_derivatives(ends, [x.leaf for events, _ in rest for x in events], seed))
            rest = [
                (events, scale)
                for events, scale in rest
                for rows in [_rows(events, [next(grads) for _ in events], scale)]
                if rows is not None and cancels(rows.detach()) and not _in_parts(rows.detach())
            ]
        if not rest or any(x.dtype in (torch.float16, torch.bfloat16) for x, _ in ends):
            yield from rest  # second derivatives in half precision are little but rounding
            return
        grads = iter(_derivatives(ends, [x.leaf for events, _ in rest for x in events], 10, graph=True))
        rows = [_rows(events, [next(grads) for _ in events], scale) for events, scale in rest]
        leaves = trace.small({id(s): s for x, _ in ends for s in trace.sources(x)}.values())
        known = [(own, found) for own, found in zip(rest, rows, strict=True) if found is not None]
        # All at once, first: each time the whole graph is gone through.
        together = _whatever_there_is([found for _, found in known], leaves)
        yield from (own for own, found in known if together or _whatever_there_is([found], leaves))
    except RuntimeError:
        # Something anywhere in the model has no derivative, or not twice: it is not known what becomes of the means.
        return


def _derivatives(
    ends: Sequence[tuple[Tensor, bool]], leaves: Sequence[Tensor], seed: int, graph: bool = False
) -> Sequence[Tensor | None]:
    """Of a random sum of all ends in the leaves; of those that are logits, of what a softmax makes of them."""
    if not ends or not leaves:
        return [None for _ in leaves]
    noise = []
    for k, (x, logits) in enumerate(ends):
        own = drawn(x.shape, x, seed + 3 * k)
        if logits:
            weights = x.detach().softmax(-1).nan_to_num()  # of rows in which all is masked
            own = weights * (own - (weights * own).sum(-1, keepdim=True))
        noise.append(own)
    outputs = [x for x, _ in ends]
    return torch.autograd.grad(outputs, leaves, noise, retain_graph=True, create_graph=graph, allow_unused=True)


def _rows(events: Sequence[Linear], grads: Sequence[Tensor | None], scale: Tensor | None) -> Tensor | None:
    """The derivatives in what was written as (places, outputs), those of them that are something."""
    found = [
        g.movedim(x.axis, -1).reshape(-1, x.outputs) for x, g in zip(events, grads, strict=True) if g is not None
    ]  # fmt: skip
    if not found:
        return None
    rows = torch.cat(found)
    rows = rows[(rows != 0).any(-1)]
    if scale is not None:
        if not bool((scale.detach() != 0).all()):
            return None
        rows = rows / scale
    return rows if len(rows) else None


def _in_parts(rows: Tensor) -> bool:
    """Whether parts of equal size, side by side or interleaved, sum to zero by themselves: heads, which are others'."""
    count = rows.shape[-1]
    for d in (d for d in range(2, count) if count % d == 0):
        parts = rows.view(-1, count // d, d), rows.view(-1, d, count // d).mT
        if any(cancels(p.flatten(0, 1)) for p in parts):
            return True
    return False


def _whatever_there_is(several: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether all sums stay zero whatever the parameters are, and what else was written: they do not depend on them."""
    pair = [
        sum((rows.sum(-1) * drawn(rows.shape[:1], rows, 11)).sum() for rows in several),
        sum((rows * drawn(rows.shape, rows, 12)).sum() for rows in several),
    ]
    moved, control = (
        math.fsum(
            float(g.abs().sum())
            for g in torch.autograd.grad(x, leaves, retain_graph=True, allow_unused=True)
            if g is not None
        )
        if isinstance(x, Tensor) and x.requires_grad else 0.0
        for x in pair
    )  # fmt: skip
    # One of many that does not must not be lost among the others.
    return moved <= NEAR / len(several) * control
