"""The autograd graph of a trace: what a tensor is made by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(*tensors: Tensor, beyond: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """The nodes that make tensors, each once, before those that make what it reads.

    Args:
        tensors: of any shape; leaves are made by no node.
        beyond: whether to look at what a node reads; asked once for each node, when it has been used.
    """
    seen: set[Any] = set()
    stack = [x.grad_fn for x in tensors]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if beyond(node):
            stack.extend(n for n, _ in node.next_functions)
