"""Means that a norm takes out of heads: what adds the same number to all coordinates of a query or a key is nothing.

A layer norm on queries and keys subtracts the mean of what the projection wrote. The logits' derivative in what was
written then sums to zero over the coordinates that are normalised together, wherever and whatever was written: which
those are is read off the zeros of these sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_geosharp.symmetry.attention.feature_views import features_view
from hf_geosharp.symmetry.attention.sites import Attention
from hf_geosharp.symmetry.fold import Mean
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.tracing.features import Families, cancels, drawn


def head_means(sites: Sequence[Attention], scope: str, trace: Trace, families: Families) -> Iterator[Mean]:
    """The folds of the means of all queries and keys of these sites, one for each linear map that writes them."""
    seen: set[tuple[object, ...]] = set()
    for site in sites:
        logits = site.softmax.logits
        behind = {id(s) for s in trace.sources(logits)}
        writers = [x for x in trace.linears if id(x.leaf) in behind]
        if not writers:
            continue
        noise = drawn(logits.shape, logits, 4)
        grads = torch.autograd.grad(logits, [x.leaf for x in writers], noise, retain_graph=True, allow_unused=True)
        for writer, gradient in zip(writers, grads, strict=True):
            heads = None if gradient is None else _heads(gradient.detach().movedim(writer.axis, -1).flatten(0, -2))
            if heads is None:
                continue
            views = features_view(families, families.outputs(writer), heads)
            key = tuple(v.region for v in views or ())
            if views and key not in seen:
                seen.add(key)
                yield Mean("", scope, tuple(views))


def _heads(gradient: Tensor) -> Tensor | None:
    """(copies, d) features of which each copy's derivatives sum to zero, the smallest d, from (places, features).

    The coordinates of a head lie side by side, or as far apart as there are heads. Features without any derivative
    belong to none.
    """
    count = gradient.shape[1]
    alive = (gradient != 0).any(0)
    # What is zero at every place is so for any sum over places.
    terms = drawn((2, gradient.shape[0]), gradient, 5) @ gradient
    for d in _divisors(count)[1:]:
        for apart in _divisors(count // d):
            table = torch.arange(count).view(-1, d, apart).mT.flatten(0, 1)
            heads = alive[table].any(1)
            chosen = terms[:, table[heads]]
            if bool(heads.any()) and cancels(chosen):
                return table[heads]
    return None


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
