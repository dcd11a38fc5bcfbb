"""The autograd graph of a trace: what a tensor is made by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


class NoDerivativeError(RuntimeError):
    """Something on the way has no derivative, or none of that."""


def gradients(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[Tensor] | None = None,
    *,
    graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """The derivatives of a weighted sum of tensors in others, of their shapes; None in what it does not depend on.

    Args:
        outputs: of any shape; numbers need no weights.
        inputs: leaves, or what was made on the way.
        weights: of the shapes of the outputs.
        graph: whether derivatives of these will be taken. The graph of the outputs is kept anyway.

    Raises:
        NoDerivativeError: the backward pass failed. Code of the model's own may run in it and raise anything.
    """
    try:
        return torch.autograd.grad(outputs, inputs, weights, retain_graph=True, create_graph=graph, allow_unused=True)
    except Exception as error:
        raise NoDerivativeError(f"{type(error).__name__}: {error}") from error


def nodes_behind(*tensors: Tensor, beyond: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """The nodes that make tensors, each once, before those that make what it reads.

    Args:
        tensors: of any shape; leaves are made by no node.
        beyond: whether to look at what a node reads; asked once for each node, when it has been used.
    """
    return nodes_from((x.grad_fn for x in tensors), beyond)


def nodes_from(roots: Iterable[Any], beyond: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """The same for nodes, these among them; None is none."""
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if beyond(node):
            stack.extend(n for n, _ in node.next_functions)


def leaf_at(node: Any) -> Tensor | None:
    """The leaf whose derivative a node takes."""
    return getattr(node, "variable", None)


def leaves_behind(tensor: Tensor) -> list[Tensor]:
    """The leaves (cuts and parameters) on which a tensor depends, in the order of the graph."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    leaves = map(leaf_at, nodes_behind(tensor))
    return list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())


class Behind(Generic[T]):
    """What stands behind each node of a graph, worked out once, however often and from wherever one asks.

    Of a stream that many layers write to each of them asks for nearly the same. It keeps all nodes that it was asked
    about. Sets are numbers, with a bit for each thing.
    """

    def __init__(self, at: Callable[[Any], T | None]) -> None:
        """``at`` says what stands at a node: a leaf, say; None if nothing."""
        self._at = at
        self._things: list[T] = []
        self._numbers: dict[int, int] = {}
        self._behind: dict[Any, int] = {}

    def of(self, tensor: Tensor) -> int:
        """What a tensor depends on, as bits; nothing for a leaf."""
        return 0 if tensor.grad_fn is None else self.of_node(tensor.grad_fn)

    def of_node(self, top: Any) -> int:
        """The same for what a node makes."""
        stack = [top]
        while stack:
            node = stack[-1]
            below = () if node in self._behind else [child for child, _ in node.next_functions if child is not None]
            unknown = [child for child in below if child not in self._behind]
            stack += unknown
            if not unknown:
                stack.pop()
                if node not in self._behind:
                    self._behind[node] = self._joined(node, below)
        return self._behind[top]

    def _joined(self, node: Any, below: Iterable[Any]) -> int:
        thing = self._at(node)
        bits = 0 if thing is None else self.bits([thing])
        for child in below:
            # A node that adds nothing to a single other one shares its bits.
            bits = bits | self._behind[child] if bits else self._behind[child]
        return bits

    def bits(self, things: Iterable[T]) -> int:
        """These, as bits."""
        bits = 0
        for thing in things:
            number = self._numbers.setdefault(id(thing), len(self._things))
            if number == len(self._things):
                self._things.append(thing)
            bits |= 1 << number
        return bits

    def listed(self, bits: int) -> list[T]:
        """What these bits stand for, in the order in which it was met."""
        return [self._things[n] for n in np.flatnonzero(self._unpacked(bits))]

    def of_many(self, tensors: Iterable[Tensor], most: int) -> int:
        """What more than so many of these tensors depend on, as bits."""
        each = [self.of(tensor) for tensor in tensors]
        counts = np.zeros(len(self._things), dtype=np.int64)
        for bits in each:
            counts += self._unpacked(bits)
        return int.from_bytes(np.packbits(counts > most, bitorder="little").tobytes(), "little")

    def _unpacked(self, bits: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        packed = np.frombuffer(bits.to_bytes(len(self._things) // 8 + 1, "little"), dtype=np.uint8)
        return np.unpackbits(packed, count=len(self._things), bitorder="little")
