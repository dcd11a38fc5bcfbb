"""The partition agrees with the components that scipy finds, whatever the order of the joins."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from hf_geosharp.symmetry.partition import Partition


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_connected_components(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 60, (2, 45)).tolist()
    partition = Partition(range(60))
    joined = sum(partition.join(x, y) for x, y in zip(a, b, strict=True))
    count, label = connected_components(coo_matrix((np.ones(45), (a, b)), (60, 60)), directed=False)
    expected: dict[int, list[int]] = {}
    for x in range(60):
        expected.setdefault(label[x], []).append(x)
    assert list(partition.groups().values()) == list(expected.values())
    assert joined == 60 - count
    assert all(partition.group(x) == key for key, group in partition.groups().items() for x in group)


def test_elements_become_known_when_they_are_asked_for() -> None:
    partition: Partition[str] = Partition()
    assert "a" not in partition
    assert partition.group("a") == "a"
    assert not partition.join("a", "a")
    assert partition.join("b", "a")
    assert list(partition) == ["a", "b"]
    assert partition.groups() == {"a": ["a", "b"]}


def test_long_chains_are_walked_in_no_time() -> None:
    partition: Partition[int] = Partition()
    for i in range(200_000):
        partition.join(i, i + 1)
    assert len(partition.groups()) == 1
