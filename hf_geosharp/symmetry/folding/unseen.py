"""What nothing in a model sees of what is written: sums whose derivatives are zero, first and second ones.

A number that is added to several coordinates at once is not seen if the derivatives of all that becomes of them, in
each, sum to zero: at every place, and whatever the parameters are that it meets on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.features import NEAR, cancels, drawn
from hf_geosharp.symmetry.tracing.graph import NoDerivativeError, gradients


@dataclass(frozen=True, eq=False)
class End:
    """Something that is read: by a ``linear`` map, by a softmax as its ``logits``, or as an output."""

    tensor: Tensor
    linear: Linear | None = None
    logits: bool = False


@dataclass(eq=False)
class Written:
    """What is written, in a trace: tensors, each with the axis that counts its coordinates.

    Attributes:
        scale: numbers that it is multiplied by, one for each coordinate.
        over_places: it is asked for the sum over all places, for each coordinate, instead of that over coordinates.
    """

    tensors: Sequence[tuple[Tensor, int]]
    scale: Tensor | None = None
    over_places: bool = False

    @property
    def terms(self) -> int:
        """How many coordinates there are, or places."""
        count = self.tensors[0][0].shape[self.tensors[0][1]]
        return sum(x.numel() for x, _ in self.tensors) // max(count, 1) if self.over_places else count

    def rows(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The derivatives as (sums, terms), those of them that are something."""
        found = [
            g.movedim(axis, -1).reshape(-1, x.shape[axis])
            for (x, axis), g in zip(self.tensors, grads, strict=True)
            if g is not None
        ]
        if not found:
            return None
        rows = torch.cat(found)
        if self.over_places:
            rows = rows.T
        rows = rows[(rows != 0).any(-1)]
        if self.scale is not None:
            if not bool((self.scale.detach() != 0).all()):
                return None
            rows = rows / self.scale
        return rows if len(rows) else None


def ends_of(trace: Trace) -> list[End]:
    """All that is read of what is written."""
    read = [End(x.source, linear=x) for x in trace.linears]
    read += [End(x.logits, logits=x.direct) for x in trace.softmaxes]
    return [e for e in (*read, *map(End, (*trace.ends, *trace.decided))) if e.tensor.requires_grad]


def noise(ends: Sequence[End], seed: int) -> list[Tensor]:
    """What makes one random sum of all ends; of those that are logits, of what a softmax makes of them."""
    made = []
    for k, end in enumerate(ends):
        x = end.tensor
        own = drawn(x.shape, x, seed + 3 * k)
        if end.logits:
            weights = x.detach().softmax(-1).nan_to_num()  # of rows in which all is masked
            own = weights * (own - (weights * own).sum(-1, keepdim=True))
        made.append(own)
    return made


def derivatives(
    ends: Sequence[End], tensors: Sequence[Tensor], seed: int, graph: bool = False
) -> Sequence[Tensor | None]:
    """Of a random sum of all ends in some tensors, of their shapes.

    Raises:
        NoDerivativeError: there are none, or none that can be taken once more.
    """
    if not ends or not tensors:
        return [None for _ in tensors]
    outputs = [end.tensor for end in ends]
    return gradients(outputs, tensors, noise(ends, seed), graph=graph)


def rounds(ends: Sequence[End]) -> bool:
    """Whether second derivatives are little but rounding: in half precision."""
    return any(end.tensor.dtype in (torch.float16, torch.bfloat16) for end in ends)


def unseen(trace: Trace, written: Sequence[Written]) -> Iterator[int]:
    """The places in the list of those of which the sums reach nothing."""
    ends = ends_of(trace)
    rest = [i for i, w in enumerate(written) if w.terms > 1]
    try:
        # What cancels by chance does not do so twice.
        parts: dict[int, list[set[tuple[int, bool]]]] = {i: [] for i in rest}
        for seed in (8, 9):
            made = _rows(ends, [(i, written[i]) for i in rest], seed)
            known = {i: r.detach() for i, r in made if r is not None and cancels(r.detach())}
            for i, rows in known.items():
                parts[i].append(set() if written[i].over_places else _parts(rows))
            rest = list(known)
        rest = [i for i in rest if not set.intersection(*parts[i])]
        if not rest or rounds(ends):
            yield from rest
            return
        twice = _rows(ends, [(i, written[i]) for i in rest], 10, graph=True)
        leaves = leaves_behind(trace, ends)
        exact = [(i, found) for i, found in twice if found is not None]
        # All at once, first: each time the whole graph is gone through.
        together = always([found for _, found in exact], leaves)
        yield from (i for i, found in exact if together or always([found], leaves))
    except NoDerivativeError:
        # Of something anywhere in the model: it is not known what becomes of the means.
        return


def leaves_behind(trace: Trace, ends: Sequence[End]) -> list[Tensor]:
    """Parameters and cuts that these are made of, but for tables."""
    return trace.small({id(s): s for end in ends for s in trace.sources(end.tensor)}.values())


def _rows(
    ends: Sequence[End], written: Sequence[tuple[int, Written]], seed: int, graph: bool = False
) -> list[tuple[int, Tensor | None]]:
    grads = iter(derivatives(ends, [x for _, w in written for x, _ in w.tensors], seed, graph))
    return [(i, w.rows([next(grads) for _ in w.tensors])) for i, w in written]


def _parts(rows: Tensor) -> set[tuple[int, bool]]:
    """Sizes of parts, side by side or interleaved (True), that sum to zero by themselves: heads, which are others'."""
    count, found = rows.shape[-1], set()
    for d in (d for d in range(2, count) if count % d == 0):
        for interleaved, parts in ((False, rows.view(-1, count // d, d)), (True, rows.view(-1, d, count // d).mT)):
            if cancels(parts.flatten(0, 1)):
                found.add((d, interleaved))
    return found


def always(several: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Whether all sums stay zero whatever the parameters are, and what else was written: they do not depend on them.

    Args:
        several: derivatives with their graph, each (sums, terms).
        leaves: parameters and cuts.

    Raises:
        NoDerivativeError: there are none of second order.
    """
    pair = [
        sum((rows.sum(-1) * drawn(rows.shape[:1], rows, 11)).sum() for rows in several),
        sum((rows * drawn(rows.shape, rows, 12)).sum() for rows in several),
    ]
    moved, control = (
        math.fsum(
            float(g.abs().sum())
            for g in gradients(x, leaves)
            if g is not None
        )
        if isinstance(x, Tensor) and x.requires_grad else 0.0
        for x in pair
    )  # fmt: skip
    # One of many that does not must not be lost among the others.
    return moved <= NEAR / len(several) * control
