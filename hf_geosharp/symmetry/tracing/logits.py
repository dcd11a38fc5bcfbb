"""From products of queries and keys to weights: which logits weights are made of, whatever is done on the way.

They may be bent entry by entry, added to, and mixed between heads, before a softmax or in place of one. What a tensor
is made of is read off its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_geosharp.symmetry.tracing.events import Softmax, Trace
from hf_geosharp.symmetry.tracing.graph import nodes_behind

_PLUS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}

_BENDS = {
    "exp", "exp2", "sigmoid", "relu", "relu6", "leaky_relu", "tanh", "square", "pow", "__pow__", "softplus", "elu",
    "selu", "celu", "silu", "gelu", "hardtanh", "hardsigmoid", "hardswish", "abs", "sqrt", "log1p", "threshold",
}  # fmt: skip
"""Names of functions that may make weights of logits, entry by entry."""


class Logits:
    """The products in a graph of what linear maps wrote with what linear maps wrote, and what became of them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._products: dict[Any, Tensor] = {}
        """Nodes of the graph that multiply what linear maps wrote with what linear maps wrote, and their results."""
        self._apart: set[Any] = set()
        """Nodes that are made of none of these."""
        self._added: dict[Any, Tensor] = {}
        """Nodes that add something to that, and their results."""
        self._bent: dict[Any, Tensor] = {}
        """Nodes that bend something made of that, entry by entry, and what they bend."""
        self._mixed: dict[Any, Tensor] = {}
        """Nodes of linear maps that mix several heads, and the logits or weights that they read."""

    def multiplied(self, result: Tensor) -> None:
        """Notes a product of two things that linear maps wrote."""
        self._products[result.grad_fn] = result

    def mixed(self, result: Tensor, source: Tensor) -> None:
        """Notes what a linear map made that mixes the heads of ``source``."""
        self._mixed[result.grad_fn] = source

    def changed(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Notes a call that bends something made of logits, or adds to it."""
        if not isinstance(result, Tensor) or not args:
            return
        if getattr(func, "__name__", "") in _BENDS and self.compares(args[0]):
            self._bent[result.grad_fn] = args[0]
        elif func in _PLUS and any(self.compares(x) for x in args):
            self._added[result.grad_fn] = result

    def behind(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """The logits that each of two factors is made of, if of nothing else that is computed.

        Where nothing bends them, a decay multiplies them say, weights are the first factor.
        """
        if not self._products:
            return [None] * len(operands)
        found = [self._made_of(x, self._bent) for x in operands]
        if found == [None, None] and operands[0].grad_fn not in self._products:
            found[0] = self._made_of(operands[0], {**self._products, **self._added})
        return found

    def compares(self, tensor: Any) -> bool:
        """Whether a tensor is made of a product of what linear maps wrote."""
        if not self._products or not isinstance(tensor, Tensor) or tensor.ndim < 3:
            return False
        # Along the residual stream each would be asked of all that is before it; what is not, no part of it is.
        seen = set()
        for node in nodes_behind(tensor, beyond=lambda node: node not in self._apart):
            if node in self._products:
                return True
            seen.add(node)
        self._apart |= seen
        return False

    def softmax_behind(self, weights: Tensor) -> tuple[Softmax | None, bool]:
        """The softmax that weights are made of, if of nothing else but parameters, and whether there are such.

        Heads may be mixed, normalised, or weighed by a decay.
        """
        leaves = self._trace.sources(weights) if weights.ndim > 3 and self._trace.softmaxes else []
        made = [x for x in leaves if id(x) not in self._trace.parameters]
        softmax = next((s for s in self._trace.softmaxes if s.leaf is made[0]), None) if len(made) == 1 else None
        return softmax, len(leaves) > 1

    def mixes_heads(self, source: Tensor, axis: int) -> bool:
        """Whether a linear map along an axis mixes heads: their logits, before a softmax, or their weights, after it.

        It reads one number of each head for each query and key. So one index of what it reads is one head, all queries
        and keys.
        """
        if source.ndim < 4:
            return False
        ends = {node: x for node, x in self._products.items() if x.ndim > 3}
        nodes, more = self._up_to(source, ends) if ends else (set(), False)
        if len(nodes) == 1 and not more:
            whole = ends[nodes.pop()]
        else:
            softmax, _ = self.softmax_behind(source)
            if softmax is None:
                return False
            whole = softmax.leaf
        at = _single(source, axis, whole)
        return at is not None and at < whole.ndim - 2

    def before_mixing(self, input: Tensor, axis: int) -> Tensor | None:
        """Logits with the axis of the keys last, as they were before heads were mixed; None if none are."""
        if self._mixed:
            nodes, _ = self._up_to(input, self._mixed)
            logits = self._mixed[nodes.pop()] if len(nodes) == 1 else None
            keys = None if logits is None else _single(input, axis, logits)
            if logits is not None and keys is not None:
                return logits.movedim(keys, -1)
        return None

    def _made_of(self, weights: Tensor, made: Mapping[Any, Tensor]) -> Tensor | None:
        """The one tensor among these that weights are made of, if they are made of nothing else that is computed."""
        if weights.ndim < 3 or not made:
            return None
        nodes, leaves = self._up_to(weights, made)
        logits = {id(x): x for x in (made[node] for node in nodes)}
        return next(iter(logits.values())) if len(logits) == 1 and not leaves else None

    def _up_to(self, tensor: Tensor, ends: Container[Any]) -> tuple[set[Any], bool]:
        """Nodes among ``ends`` that a tensor is made of, and whether it is made of what is computed by other ways, too.

        Parameters, of a decay or a bias, are not computed.
        """
        found, leaves = set(), False
        for node in nodes_behind(tensor, beyond=lambda node: node not in ends):
            if node in ends:
                found.add(node)
            else:
                leaves |= hasattr(node, "variable") and id(node.variable) not in self._trace.parameters
        return found, leaves


def _single(tensor: Tensor, axis: int, source: Tensor) -> int | None:
    """The one axis along which the first index of a tensor's axis is made of one index of ``source`` alone, if any."""
    (gradient,) = torch.autograd.grad(tensor.select(axis, 0).sum(), source, retain_graph=True, allow_unused=True)
    if gradient is None:
        return None
    axes = range(source.ndim)
    used = [int((gradient != 0).movedim(a, 0).flatten(1).any(1).sum()) for a in axes]
    single = [a for a in axes if used[a] == 1 and source.shape[a] > 1]
    return single[0] if len(single) == 1 else None
