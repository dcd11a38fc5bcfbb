"""Products with parameters of which only what becomes of them tells what they are.

A matrix on the left, or one for each of several parts, may be a linear map of features. But a learned query meets keys
in such a product too, and so does a table of positions queries; and what maps tokens to tokens mixes no features. Those
stay in the graph as they are, with the parameters among what logits are made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_geosharp.symmetry.tracing.events import Open, Trace
from hf_geosharp.symmetry.tracing.features import drawn, only
from hf_geosharp.symmetry.tracing.graph import nodes_behind

_PRODUCTS = ("MmBackward", "BmmBackward", "AddmmBackward", "BaddbmmBackward")


def maps_among(trace: Trace) -> frozenset[int]:
    """The numbers of the open products of a trace that are linear maps of features."""
    opened = {n: x for n, x in enumerate(trace.open) if x is not None and x.result.grad_fn is not None}
    if not opened:
        return frozenset()
    compared = _first_products(trace, {x.result.grad_fn for x in opened.values()})
    return frozenset(n for n, x in opened.items() if x.result.grad_fn not in compared and _of_features(trace, x))


def _first_products(trace: Trace, nodes: set[object]) -> set[object]:
    """Those of some nodes from which logits are made without another product."""

    def beyond(node: Any) -> bool:
        return node not in nodes and not node.name().startswith(_PRODUCTS)

    return {node for node in nodes_behind(*(s.logits for s in trace.softmaxes), beyond=beyond) if node in nodes}


def _of_features(trace: Trace, product: Open) -> bool:
    """Whether the axis that is summed over counts features: one index of it is made at as many places as all are.

    Of tokens each is at a place of its own. Where nothing that has places is behind it, the inputs of the model are
    say, nothing is lost that way; but the weights of a softmax are no features.
    """
    places = {id(x.leaf): x.axis for x in trace.linears}
    tables = dict.fromkeys(trace.looked_up, 1)
    sources = trace.sources(product.source)
    ends = [(s, places.get(id(s), tables.get(trace.parameters.get(id(s), "")))) for s in sources]
    behind = [(s, axis) for s, axis in ends if axis is not None]
    if not behind:
        return not {id(s) for s in sources} & {id(s.leaf) for s in trace.softmaxes}
    source, counts = product.source, []
    noise = drawn(source.shape, source, 8)
    for weights in (only(noise, product.axis, 0), noise):
        grads = torch.autograd.grad(source, [s for s, _ in behind], weights, retain_graph=True, allow_unused=True)
        counts.append([_places(g, axis) for g, (_, axis) in zip(grads, behind, strict=True)])
    felt = [(own, every) for own, every in zip(*counts, strict=True) if own]
    return bool(felt) and all(own == every for own, every in felt)


def _places(gradient: Tensor | None, axis: int) -> int:
    """At how many places some feature has a derivative."""
    return 0 if gradient is None else int((gradient != 0).any(axis).sum())
