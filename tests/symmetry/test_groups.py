"""Group elements: sizes, spectra, seeds."""

from __future__ import annotations

import pytest
import torch

from hf_geosharp.symmetry.groups import Group

GROUPS = [Group(1), Group(5), Group(1, complex=True), Group(3, complex=True)]
ROTATIONS = [Group(2, isometric=True), Group(5, isometric=True), Group(1, complex=True, isometric=True)]
each_group = pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)


def draw(group: Group, *, copies: int = 40, seed: int = 0, condition: float = 1e3) -> torch.Tensor:
    return group.random(copies, torch.Generator().manual_seed(seed), condition)


def test_the_real_dimension_counts_a_complex_entry_twice() -> None:
    assert [g.dimension for g in GROUPS] == [1, 25, 2, 18]
    assert [g.name for g in GROUPS] == ["GL(1)", "GL(5)", "GL(1,C)", "GL(3,C)"]


@each_group
def test_the_same_seed_gives_the_same_element_and_another_seed_another(group: Group) -> None:
    assert torch.equal(draw(group), draw(group))
    assert not torch.equal(draw(group), draw(group, seed=1))


@each_group
def test_every_copy_gets_an_element_of_its_own(group: Group) -> None:
    a = draw(group)
    assert len({complex(x) for x in a[:, 0, 0]}) == len(a)


@each_group
def test_singular_values_lie_between_the_inverse_root_and_the_root_of_the_condition(group: Group) -> None:
    s = torch.linalg.svdvals(draw(group))
    slack = 1 + 1e-9
    assert float(s.max()) <= 1e3**0.5 * slack
    assert float(s.min()) >= 1e3**-0.5 / slack


def test_beyond_one_dimension_the_condition_is_exactly_the_one_asked_for() -> None:
    s = torch.linalg.svdvals(draw(Group(5)))
    assert torch.allclose(s[:, 0] / s[:, -1], torch.full((40,), 1e3, dtype=torch.float64), rtol=1e-9)


def test_real_numbers_take_both_signs_and_complex_ones_all_quadrants() -> None:
    assert {float(x.sign()) for x in draw(Group(1)).flatten()} == {-1.0, 1.0}
    z = draw(Group(1, complex=True)).flatten()
    assert {(bool(x.real > 0), bool(x.imag > 0)) for x in z} == {(a, b) for a in (False, True) for b in (False, True)}


@each_group
def test_elements_are_in_double_precision_far_from_the_identity(group: Group) -> None:
    a = draw(group)
    assert a.dtype == (torch.complex128 if group.complex else torch.float64)
    assert float((a - torch.eye(group.dim)).abs().flatten(1).amax(1).median()) > 0.5


def test_rotations_and_phases_have_the_dimension_of_skew_matrices() -> None:
    assert [g.dimension for g in ROTATIONS] == [1, 10, 1]
    assert [g.name for g in ROTATIONS] == ["O(2)", "O(5)", "U(1)"]


@pytest.mark.parametrize("group", ROTATIONS, ids=lambda g: g.name)
@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_rotations_and_phases_keep_lengths_whatever_the_condition(group: Group, condition: float) -> None:
    a = draw(group, condition=condition)
    eye = torch.eye(group.dim, dtype=a.dtype)
    assert torch.allclose(a.mH @ a, eye.expand_as(a), rtol=0, atol=1e-13)
    assert torch.equal(a, draw(group, condition=condition))


def test_rotations_turn_both_ways() -> None:
    """Determinants of both signs: reflections are symmetries too."""
    assert {round(float(d)) for d in torch.linalg.det(draw(ROTATIONS[1]))} == {-1, 1}


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 40])
def test_positive_numbers_are_positive_and_others_are_not_all(copies: int) -> None:
    """However few there are: or else what only positive numbers leave alone would pass for what all do."""
    for seed in range(8):
        assert bool((draw(Group(1, positive=True), copies=copies, seed=seed) > 0).all())
        assert bool((draw(Group(1), copies=copies, seed=seed) < 0).any())


def test_the_names_of_positive_numbers_say_so() -> None:
    assert (Group(1, positive=True).name, Group(1, positive=True).dimension) == ("GL(1)+", 1)


@pytest.mark.parametrize("dim", [3, 6])
def test_rotations_that_keep_the_mean_are_all_rotations_of_what_is_beside_it(dim: int) -> None:
    group = Group(dim, isometric=True, centred=True)
    a = draw(group)
    ones, identity = torch.ones(dim, dtype=torch.float64), torch.eye(dim, dtype=torch.float64)
    assert torch.allclose(a @ ones, ones.expand(len(a), dim), rtol=0, atol=1e-12)
    assert torch.allclose(a @ a.mT, identity.expand_as(a), rtol=0, atol=1e-12)
    assert group.dimension == Group(dim - 1, isometric=True).dimension
    assert group.name == f"O({dim}) fixing 1"
    # Of both kinds, and none that is close to the identity.
    assert {round(float(x)) for x in torch.linalg.det(a)} == {-1, 1}
    assert float((a - identity).abs().flatten(1).amax(1).median()) > 0.5
