"""Calls that keep features apart: what is said of them is what their derivatives say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_geosharp.symmetry.tracing.rows import features_of, keeps_apart

TOKENS, FEATURES = 3, 4
OTHER = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SQUARE = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WAYS = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

X = "x"
"""Stands for what is read."""

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int | None, bool]] = {
    "rows picked": (Tensor.__getitem__, (X, torch.tensor([2, 0, 0])), 1, True),
    "features picked": (Tensor.__getitem__, (X, (slice(None), torch.tensor([3, 2, 1, 0]))), None, False),
    "rows turned around": (torch.flip, (X, (0,)), 1, True),
    "features turned around": (torch.flip, (X, (1,)), None, False),
    "a mean of rows": (torch.mean, (X, 0), 0, True),
    "a sum of rows": (torch.sum, (X, 0), 0, False),
    "a mean of features": (torch.mean, (X, 1), None, False),
    "each number times one": (torch.mul, (X, OTHER), 1, False),
    "rows mixed": (torch.matmul, (SQUARE, X), 1, False),
    "features mixed": (torch.matmul, (X, WAYS), None, False),
    "divided": (torch.div, (X, OTHER), 1, False),
    "beside zeros": (torch.cat, ([X, torch.zeros_like(OTHER)],), 1, False),
    "beside itself": (torch.cat, ([X, X],), 1, True),
    "beside something else": (torch.cat, ([X, OTHER],), None, False),
    "padded rows": (functional.pad, (X, (0, 0, 1, 0)), 1, False),
}


def call(func: Callable[..., Any], args: tuple[Any, ...], x: Tensor) -> Any:
    return func(*[([x if b is X else b for b in a] if isinstance(a, list) else x if a is X else a) for a in args])


@pytest.mark.parametrize("name", CALLS)
def test_features_are_apart_where_derivatives_are_diagonal(name: str) -> None:
    func, args, axis, as_they_are = CALLS[name]
    x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    own = tuple([x if b is X else b for b in a] if isinstance(a, list) else x if a is X else a for a in args)
    assert keeps_apart(func, own, {}, x, 1) == (None if axis is None else (axis, as_they_are))
    if axis is None:
        return
    jacobian = torch.autograd.functional.jacobian(lambda v: call(func, args, v), x)
    by_feature = jacobian.movedim(axis, 0).reshape(FEATURES, -1, TOKENS, FEATURES).abs().sum((1, 2))
    assert torch.equal(by_feature, by_feature.diag().diag())
    # Rows as they are: what all share passes through them.
    assert bool((call(func, args, torch.ones_like(x)) == 1).all()) == as_they_are


ONES, NOWHERE = torch.ones(TOKENS, 1, dtype=torch.float64), torch.zeros(TOKENS, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (torch.mul, (X, ONES)),
        (Tensor.__mul__, (X, ONES.long())),
        (torch.div, (X, ONES)),
        (torch.sum, (X, 0, True)),
        (torch.masked_fill, (X, NOWHERE, 0.0)),
        (torch.where, (~NOWHERE, X, torch.zeros(()))),
        (torch.einsum, ("td,tk->td", X, ONES)),
    ],
)
def test_what_takes_rows_times_one_in_an_example_does_not_take_them_as_they_are(
    func: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The mask of an example that has no padding, say."""
    x = OTHER[:1] if func is torch.sum else OTHER
    found = keeps_apart(func, tuple(x if a is X else a for a in args), {}, x, 1)
    assert found == (1, False)
    assert torch.equal(func(*(x if a is X else a for a in args)), x)


@pytest.mark.parametrize(
    ("func", "args"), [(torch.masked_fill, (X, NOWHERE, 1.0)), (torch.where, (~NOWHERE, X, OTHER))]
)
def test_what_a_mask_may_put_in_the_place_of_rows_is_looked_at(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert keeps_apart(func, tuple(OTHER + 1 if a is X else a for a in args), {}, OTHER + 1, 1) is None


@pytest.mark.parametrize(
    ("func", "args"), [(torch.relu, (X,)), (torch.add, (X, OTHER)), (torch.div, (OTHER, X)), (torch.mul, (X, X))]
)
def test_what_is_not_linear_is_not_said_to_keep_them_apart(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    x = OTHER + 3
    assert keeps_apart(func, tuple(x if a is X else a for a in args), {}, x, 1) is None


def test_the_axis_of_features_is_known_by_how_they_lie() -> None:
    x = torch.zeros(2, TOKENS, FEATURES)
    assert features_of(x, FEATURES, 1) == 2
    assert features_of(x.mT, FEATURES, 1) == 1
    assert features_of(x.unflatten(-1, (2, 2)), FEATURES, 1) is None
    assert features_of(x, TOKENS, 1) is None
