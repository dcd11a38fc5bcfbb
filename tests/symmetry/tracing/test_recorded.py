"""What modules were called with: containers of the same kinds, as far as these can be made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_geosharp.symmetry.tracing.recorded import detached, mapped


class Pair(NamedTuple):
    first: Any
    second: Any


class Frozen(dict):  # type: ignore[type-arg]
    """A dict that cannot be written to."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")


class Span(tuple):  # type: ignore[type-arg]
    """A tuple whose constructor takes something else."""

    def __new__(cls, start: int, end: int) -> Span:
        return super().__new__(cls, (start, end))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([1, (2, 3)], [2, (3, 4)]),
        (Pair(1, [2]), Pair(2, [3])),
        ({"a": 1, "b": {"c": 2}}, {"a": 2, "b": {"c": 3}}),
        (Frozen(a=1), {"a": 2}),
        (Span(1, 2), (2, 3)),
    ],
)
def test_containers_are_of_the_same_kind_or_plain_ones(given: Any, wanted: Any) -> None:
    found = mapped(given, lambda x: x + 1)
    assert found == wanted
    assert type(found) is type(wanted)


def test_outputs_of_transformers_keep_their_kind_and_the_given_one_its_values() -> None:
    given = BaseModelOutput(last_hidden_state=torch.zeros(2))
    found = mapped(given, lambda x: x + 1)
    assert type(found) is BaseModelOutput
    assert torch.equal(found.last_hidden_state, torch.ones(2))
    assert torch.equal(given.last_hidden_state, torch.zeros(2))


def test_a_recorded_call_shares_no_memory_and_keeps_no_cache() -> None:
    x = torch.ones(2, requires_grad=True)
    cache = SimpleNamespace(get_seq_length=lambda: 3)
    tensor, nothing, text = detached((2 * x, cache, "text"))
    assert not tensor.requires_grad
    assert torch.equal(tensor, torch.full((2,), 2.0))
    assert (nothing, text) == (None, "text")
