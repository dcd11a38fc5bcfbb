"""Functions with a backward pass of their own, run like other code; and what switches a graph off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hf_geosharp.symmetry.tracing.graphless import functions, switches_off

running: list[type[Function]] = []
seen: list[tuple[type[Function], ...]] = []


class Cube(Function):
    """Its backward pass is another function's, so that one sees whose derivative it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int = 3) -> Tensor:
        seen.append(tuple(running))
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(True)
        assert ctx.needs_input_grad[0] is x.requires_grad
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros_like(grad), None


class Apart(Function):
    """What it keeps is said apart from what it computes."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return Cube.apply(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


@pytest.fixture(autouse=True)
def _afresh() -> None:
    running.clear()
    seen.clear()


@pytest.mark.parametrize("function", [Cube, Apart])
@pytest.mark.parametrize("opened", [(), (Cube, Apart)])
def test_what_is_opened_has_the_derivative_of_what_it_computes(
    function: type[Function], opened: tuple[type[Function], ...]
) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with functions(running, opened):
        y = function.apply(x)
    y.backward()
    assert y.item() == 8.0
    assert x.grad is not None
    assert x.grad.item() == (12.0 if opened else 0.0)
    assert seen == [(Cube,) if function is Cube else (Apart, Cube)]
    assert running == []


def test_it_ends_with_an_exception_too() -> None:
    apply = Function.__dict__["apply"]
    with pytest.raises(TypeError), functions(running, (Cube,)):
        Cube.apply(torch.ones(1), "no power")
    assert Function.__dict__["apply"] is apply
    assert running == []


def test_it_is_seen_what_switches_a_graph_off() -> None:
    off: list[bool] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            off.append(switches_off(func, args))
            return func(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        torch.ones(1).exp()
    assert off[0]
    assert sum(off) == 1
