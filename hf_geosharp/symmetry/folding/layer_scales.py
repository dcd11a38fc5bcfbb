"""Numbers that what linear maps write is multiplied by, and nothing else is: seen in the graph of a trace.

A layer scale has one for each feature of the stream, a gate on a residual branch a single one. In the graph they are
one factor of a product whose other factor is what a linear map wrote, as it was written.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import LayerScale, Writer, whole
from hf_geosharp.symmetry.folding.readers import private
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.graph import leaf_at, nodes_from

_HANDED_ON = re.compile(
    r"(Alias|Clone|Expand|Permute|ReshapeAlias|Squeeze|T|ToCopy|Transpose|UnsafeView|Unsqueeze|View)Backward\d"
)
"""Nodes that hand on numbers; whether in their places, and as they were, is for the values to say."""


def layer_scales(model: nn.Module, names: Mapping[int, str], trace: Trace) -> Iterator[LayerScale]:
    """The folds, without names, of all parameters that only multiply what linear maps wrote, which nothing else reads.

    ``names`` are those of the model's parameters, by identity.
    """
    roots = [x.grad_fn for x in trace.read_tensors]
    nodes = list(nodes_from(roots))
    readers = Counter([*roots, *(child for node in nodes for child, _ in node.next_functions)])
    written = {id(x.leaf): x for x in trace.linears}
    scaled: dict[str, list[Linear]] = {}
    products: dict[str, int] = {}
    for node in nodes:
        ends = [_end(child, readers) for child, _ in node.next_functions] if _multiplies(node) else []
        for (scale, count), (leaf, alone) in zip(ends, ends[::-1], strict=True):
            linear = written.get(id(leaf))
            if scale is None or linear is None or alone > 1 or id(scale) not in names:
                continue
            if _multiplied(scale, linear, node):
                scaled.setdefault(names[id(scale)], []).append(linear)
                products[names[id(scale)]] = count
    own = private(model, names, trace)
    uses = Counter(x.weight.parameter for x in trace.linears)
    for name in (name for name in names.values() if name in scaled and name in own):
        linears = sorted(scaled[name], key=trace.linears.index)
        writers = [w for w in dict.fromkeys(map(writer_of, linears)) if w and {w.weight, w.bias or name} <= own]
        # No more products, and no more uses of what writes, than are accounted for.
        if products[name] == len(linears) == sum(uses[w.weight] for w in writers):
            shape = model.get_parameter(name).shape
            yield LayerScale("", name.rpartition(".")[0], whole(name, *shape), tuple(writers))


def _multiplies(node: Any) -> bool:
    return type(node).__name__.startswith("MulBackward") and len(node.next_functions) == 2


def _end(node: Any, readers: Mapping[Any, int]) -> tuple[Tensor | None, int]:
    """The leaf that a node hands on, and by how many nodes it is read; None where it is not that, or not that alone."""
    while node is not None and _HANDED_ON.fullmatch(type(node).__name__) and readers[node] == 1:
        node = next((child for child, _ in node.next_functions if child is not None), None)
    leaf = None if node is None else leaf_at(node)
    return leaf, 0 if leaf is None else readers[node]


def _multiplied(scale: Tensor, linear: Linear, node: Any) -> bool:
    """Whether these are the factors of a product as they are, each number with the output of its own place."""
    if scale.numel() not in (1, linear.outputs):
        return False
    try:
        factors = node._saved_self, node._saved_other
    except RuntimeError:  # one was overwritten since
        return False
    rows = linear.leaf.detach().movedim(linear.axis, -1).reshape(-1, linear.outputs)
    for one, other in (factors, factors[::-1]):
        if one is None or other is None or one.ndim > other.ndim or other.numel() != rows.numel():
            continue
        for axis in range(-other.ndim, 0):
            # Along which axis numbers lie their shape says: they may be all alike.
            if other.shape[axis] != linear.outputs or one.numel() != scale.numel() or (
                one.numel() > 1 and (axis < -one.ndim or one.shape[axis] != linear.outputs)
            ):  # fmt: skip
                continue
            columns = other.detach().movedim(axis, -1).reshape(-1, linear.outputs)
            if torch.equal(columns, rows.to(columns)) and torch.equal(one.flatten(), scale.flatten().to(one)):
                return True
    return False


def writer_of(linear: Linear) -> Writer | None:
    """What writes, if it is all of a parameter, and of a bias."""
    weight, bias = linear.weight, linear.bias
    if len(weight.out) != 1 or linear.outputs * linear.inputs != math.prod(weight.shape):
        return None
    if weight.shape[weight.out[0]] != linear.outputs or (bias is not None and bias.shape != (linear.outputs,)):
        return None
    return Writer(weight.parameter, weight.out[0], None if bias is None else bias.parameter)
