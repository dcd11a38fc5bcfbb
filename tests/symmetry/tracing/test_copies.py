"""Entries of copies, by the functions themselves on tables of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_geosharp.symmetry.tracing.copies import SOURCES, Index, ravel, unravel, within
from hf_geosharp.symmetry.tracing.weights import Weights

A = torch.arange(24).view(4, 6)
B = torch.arange(100, 112).view(2, 6)
C = torch.arange(200, 208).view(4, 2)
V = torch.arange(300, 306)
T = torch.arange(400, 460).view(3, 4, 5)

CALLS: list[Callable[[], Tensor]] = [
    lambda: torch.cat([A, B, A]),
    lambda: torch.cat((A, C), 1),
    lambda: torch.concat(tensors=[A, C], dim=-1),
    lambda: torch.concatenate([A, B], axis=0),
    lambda: torch.cat([torch.empty(0, dtype=torch.long), V, V]),
    lambda: torch.stack([A, A.flip(1)]),
    lambda: torch.stack([A, A], dim=-1),
    lambda: torch.vstack([A, B]),
    lambda: torch.vstack([V, A]),
    lambda: torch.vstack([V, V]),
    lambda: torch.hstack([A, C]),
    lambda: torch.hstack([V, V]),
    lambda: torch.reshape(A, (2, 12)),
    lambda: A.reshape(2, 2, 6),
    lambda: A.T.reshape(8, 3),
    lambda: T.reshape(12, 5),
    lambda: T.transpose(0, 1).reshape(12, 5),
    lambda: T.reshape(3, 20),
    lambda: A.reshape(-1),
    lambda: torch.flatten(T, 1),
    lambda: T.flatten(0, 1),
    lambda: A.repeat(2, 1),
    lambda: A.repeat((3, 2, 2)),
    lambda: A.repeat(repeats=[2, 1]),
    lambda: torch.tile(A, (2,)),
    lambda: A.tile(2, 2),
    lambda: A.repeat_interleave(3, 0),
    lambda: A.repeat_interleave(2, dim=-1),
    lambda: torch.repeat_interleave(A, 2),
    lambda: torch.repeat_interleave(A, torch.tensor([1, 0, 3, 2]), 0),
    lambda: torch.repeat_interleave(A, torch.tensor([2]), 0),
    lambda: torch.flip(A, [0]),
    lambda: torch.flip(A, dims=(0, 1)),
    lambda: A.flip(0, -1),
    lambda: A.flip((1,)),
    lambda: T.flip(1),
    lambda: torch.roll(A, 2, 0),
    lambda: torch.roll(A, (1, -2), dims=(0, 1)),
    lambda: A.roll(5),
    lambda: A.roll(shifts=[5]),
    lambda: A.roll((3,), (-1,)),
]


class Calls(TorchFunctionMode):
    """Remembers the last call of a function that has a rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOURCES:
            self.last = func, args, kwargs or {}
        return result


def looked_up(func: Any, args: Any, kwargs: Any, shape: torch.Size, index: Index) -> Tensor:
    asked = torch.broadcast_shapes(*(i.shape for i in index))
    whole = torch.full(asked, -1)
    for operand, where, own in SOURCES[func](tuple(shape), index, *args, **kwargs):
        values = operand[own].expand(asked)
        whole = values if where is None else torch.where(where, values, whole)
    return whole


@pytest.mark.parametrize("call", CALLS)
def test_entries_are_those_that_the_function_puts_there(call: Callable[[], Tensor]) -> None:
    with Calls() as seen:
        result = call()
    func, args, kwargs = seen.last
    apart = tuple(torch.arange(n).view(-1, *[1] * (result.ndim - 1 - d)) for d, n in enumerate(result.shape))
    assert torch.equal(looked_up(func, args, kwargs, result.shape, apart), result)
    some = torch.randint(result.numel(), (7,), generator=torch.Generator().manual_seed(0))
    index = unravel(some, result.shape)
    assert torch.equal(looked_up(func, args, kwargs, result.shape, index), result[index])


def test_every_rule_is_tried() -> None:
    tried = set()
    for call in CALLS:
        with Calls() as seen:
            call()
        tried.add(seen.last[0])
    assert tried == set(SOURCES)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 1 << 20))
def test_positions_and_indices_are_those_of_torch(shape: list[int], seed: int) -> None:
    positions = torch.randint(math.prod(shape), (5,), generator=torch.Generator().manual_seed(seed))
    index = unravel(positions, shape)
    assert all(torch.equal(*both) for both in zip(index, torch.unravel_index(positions, tuple(shape)), strict=True))
    assert torch.equal(ravel(index, shape), positions)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t.T,
    lambda t: t[1:4],
    lambda t: t[1:, 2:5].T,
    lambda t: t[::2],
    lambda t: t[:, ::3],
    lambda t: t[2],
    lambda t: t[:, 3],
    lambda t: t[:, None, 1:],
    lambda t: t.view(3, 2, 8),
    lambda t: t.view(-1),
    lambda t: t.view(6, 2, 4)[:, 1],
    lambda t: t[3].unfold(0, 3, 1),
    lambda t: t.view(-1)[3:].as_strided((5, 3), (7, 2)),
    lambda t: t[:1].expand(4, 8),
    lambda t: t.diagonal(),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_entries_of_views_are_found_in_what_they_are_views_of(view: Callable[[Tensor], Tensor], turned: bool) -> None:
    memory = torch.arange(48)
    of = memory.view(6, 8)
    seen = view(of)
    if turned:
        of = memory.view(6, 8).T
    index = tuple(torch.arange(n).view(-1, *[1] * (seen.ndim - 1 - d)) for d, n in enumerate(seen.shape))
    layouts = [(tuple(t.shape), t.stride(), t.storage_offset()) for t in (seen, of)]
    assert torch.equal(of[within(index, *layouts)].expand(seen.shape), seen)


class Largest(TorchDispatchMode):
    """The most entries of what is computed."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and all(
            result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)
        ):
            self.size = max(self.size, result.numel())
        return result


def test_copies_are_looked_up_without_a_table_of_all_their_entries() -> None:
    """Three matrices put together: a block of rows at once, however many there are."""
    parameters = {name: torch.randn(1024, 1024, requires_grad=True) for name in "qkv"}
    weights = Weights({p.untyped_storage().data_ptr(): [(n, p)] for n, p in parameters.items()})
    tensors = list(parameters.values())
    copy = torch.cat(tensors)
    weights.note(torch.cat, (tensors,), {}, copy)
    with Largest() as largest:
        parts = weights.parts(copy, (0,), (1,))
    assert parts is not None
    assert [p.slab.parameter for p in parts] == ["q", "k", "v"]
    assert all(torch.equal(p.features, torch.arange(1024)) for p in parts)
    assert largest.size <= 1 << 18
