"""Layers that are alike: what was read off one attention holds for another that computes the same with other weights.

Two attentions are alike if the graphs of their logits and of what they mix are the same node by node: operations,
shapes, settings, the signs of the constants that enter (a rotary table, a mask), and the linear maps and parameters at
their ends, by their names within the module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hf_geosharp.symmetry.tracing.events import Linear, Softmax, Trace
from hf_geosharp.symmetry.tracing.weights import Slab

MAX_NODES = 2000
"""Size of the graphs that are compared: those of an attention are much smaller."""


@dataclass(frozen=True)
class Portrait:
    """What attentions that are alike have in common, to be compared, and the tensors at the ends of one's graph."""

    key: object
    ends: tuple[Tensor, ...]


def portrait(trace: Trace, softmax: Softmax, outputs: Sequence[Linear], scope: str) -> Portrait | None:
    """The portrait of an attention in a module; None where its graph cannot be looked at in full."""
    by_leaf = {id(x.leaf): x for x in trace.linears}

    def within(name: str) -> str:
        return name.removeprefix(f"{scope}.") if scope else name

    def slab(part: Slab | None) -> object:
        return None if part is None else (within(part.parameter), part.out, part.inner, part.start, part.shape)

    def linear(x: Linear) -> object:
        return slab(x.weight), slab(x.bias), x.axis, x.source_axis, x.inputs, x.outputs, x.grouped

    def end(leaf: Tensor) -> object:
        if id(leaf) in by_leaf:
            return "linear", tuple(leaf.shape), linear(by_leaf[id(leaf)])
        if id(leaf) in trace.parameters:
            return "parameter", tuple(leaf.shape), within(trace.parameters[id(leaf)])
        return "own" if leaf is softmax.leaf else "other", tuple(leaf.shape)

    ends: dict[int, Tensor] = {}
    roots = [softmax.logits, *(x.source for x in outputs)]
    try:
        graphs = tuple(tuple(_nodes(root, end, ends)) for root in roots)
    except (RuntimeError, _UnseenError):
        # Something was overwritten, or belongs to a function whose workings do not show.
        return None
    mixes = id(softmax) in trace.mixing
    return Portrait((graphs, mixes, tuple(map(linear, outputs))), tuple(ends.values()))


class _UnseenError(Exception):
    """A graph holds what cannot be compared."""


def _nodes(root: Tensor, end: Callable[[Tensor], object], ends: dict[int, Tensor]) -> Iterator[object]:
    """Every node of the graph of a tensor, each once and in an order that the graph alone decides."""
    if root.grad_fn is None:
        raise _UnseenError
    number: dict[Any, int] = {root.grad_fn: 0}
    queue = [root.grad_fn]
    for node in queue:
        variable = getattr(node, "variable", None)
        if variable is not None:
            ends.setdefault(id(variable), variable)
            yield end(variable), list(ends).index(id(variable))
            continue
        if isinstance(node, BackwardCFunction) or len(queue) > MAX_NODES:
            raise _UnseenError
        below = []
        for child, index in node.next_functions:
            if child is not None and child not in number:
                number[child] = len(queue)
                queue.append(child)
            below.append((None if child is None else number[child], index))
        yield node.name(), tuple(_settings(node)), tuple(below)


def _settings(node: Any) -> Iterator[object]:
    for name in dir(node):
        if name.startswith("_saved_"):
            # What a node has made, the mean that a layer norm takes out say, is no constant that enters it.
            yield name, _comparable(getattr(node, name), made=name.startswith("_saved_result"))


def _comparable(value: Any, made: bool = False) -> object:
    if isinstance(value, Tensor):
        constant = None if made or value.requires_grad else _signs(value)
        return tuple(value.shape), str(value.dtype), constant
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(v) for v in value)
    return repr(value)


def _signs(value: Tensor) -> bytes:
    """A digest of where a tensor is positive, negative and zero."""
    signs = torch.stack([value.detach() > 0, value.detach() < 0]) if not value.is_complex() else value.detach() != 0
    return hashlib.blake2b(signs.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()
