"""Code that runs without a graph: in functions that have a backward pass of their own, and under torch.no_grad.

What it computes is the same with a graph. So where attention is hidden in it, a model is traced once more, its
functions run like any other code, and nothing switches the graph off.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function


class _Context:
    """What a function keeps for its backward pass, which nobody runs."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """No derivative is taken forward."""

    def mark_dirty(self, *tensors: Any) -> None:
        """The graph knows what is overwritten."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """The graph knows what has no derivative."""

    def set_materialize_grads(self, value: bool) -> None:
        """No gradient arrives."""


@contextmanager
def functions(running: list[type[Function]], opened: Container[type[Function]] = ()) -> Iterator[None]:
    """Meanwhile ``running`` holds the functions that run, the innermost last; what is ``opened`` runs with a graph."""
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        running.append(cls)
        try:
            if cls in opened:
                return _forward(cls, args, kwargs)
            return original.__func__(cls, *args, **kwargs)
        finally:
            running.pop()

    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


def _forward(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function computes, in either of the two ways in which one can be written."""
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*args, **kwargs)
    return cls.forward(_Context(args), *args, **kwargs)


def switches_off(func: object, args: tuple[Any, ...]) -> bool:
    """Whether a call is that by which torch.no_grad and its like switch the graph off."""
    return func is torch._C._set_grad_enabled and args == (False,)
