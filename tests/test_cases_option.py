"""``pytest --cases N``: no test is left out, only cases beyond the first ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems

ITEMS = ["a.py::one", "a.py::two[x]", "a.py::two[y]", "a.py::two[z]", "b.py::two[x-1]", "b.py::two[x-2]"]


@pytest.mark.parametrize(
    ("most", "kept"),
    [(0, ITEMS), (1, [ITEMS[0], ITEMS[1], ITEMS[4]]), (2, [*ITEMS[:3], *ITEMS[4:]]), (3, ITEMS)],
)
def test_so_many_cases_of_each_test_are_kept(most: int, kept: list[str]) -> None:
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: most, hook=hook)
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in ITEMS]
    pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == kept
    assert [item.nodeid for item in left_out] == [name for name in ITEMS if name not in kept]
