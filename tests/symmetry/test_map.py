"""What has no parameter in common can be done one after the other."""

from __future__ import annotations

import pytest
import torch

from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.map import connected, parameters_of
from hf_geosharp.symmetry.parameters import put, wide_copy
from tests.families import batch_of, build


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5"])
def test_connected_groups_share_nothing_and_keep_their_order(family: str) -> None:
    found = find_symmetries(build(family), batch_of(family))
    groups = connected(found.symmetries)
    assert len(groups) > 1
    place = {s.name: i for i, s in enumerate(found.symmetries)}
    names = [[s.name for s in members] for members in groups]
    assert sorted(place[n] for members in names for n in members) == list(range(len(place)))
    assert all([place[n] for n in members] == sorted(place[n] for n in members) for members in names)
    owners: dict[str, int] = {}
    for i, members in enumerate(groups):
        for parameter in parameters_of(members):
            assert owners.setdefault(parameter, i) == i


def test_one_link_joins_two_groups() -> None:
    found = find_symmetries(build("bert"), batch_of("bert"))
    first, second = (next(p for p in found.pairs if p.kind == kind) for kind in ("qk", "vo"))
    assert [[s.name for s in g] for g in connected([second, first])] == [[second.name], [first.name]]
    assert [[s.name for s in g] for g in connected([first, second, first])] == [[first.name, first.name], [second.name]]


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_apply_is_the_move_of_all_weights_at_once(family: str) -> None:
    model = build(family).float()
    found = find_symmetries(model, batch_of(family))
    element = found.random_element(model, 2)
    weights = wide_copy(model, found.parameters)
    found.move(weights, element)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found.apply(model, element)
    applied = {n: p.detach().clone() for n, p in model.named_parameters()}
    put(model, before)
    put(model, weights)
    assert all(torch.equal(applied[n], p) for n, p in model.named_parameters())
