"""Parameters as pieces of storage: what is tied, aliased or overlapping is perturbed once and counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.errors import UnsupportedModelError
from hf_geosharp.symmetry.parameters import Saved, canonical_names, leaves, put, wide_copy, widened


def model_of(**tensors: Tensor) -> nn.Module:
    """A module whose parameters are these tensors, storage and all."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def test_a_tied_parameter_is_one_leaf_under_its_first_name() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(3, 4), nn.Linear(3, 4)
    model.second.weight = model.first.weight
    assert list(leaves(model)) == ["first.weight", "first.bias", "second.bias"]
    assert canonical_names(model)[id(model.second.weight)] == "first.weight"


def test_two_parameters_on_the_same_memory_are_one_leaf_and_their_gradients_add() -> None:
    storage = torch.randn(3, 4)
    model = model_of(a=storage, b=storage)
    assert model.a is not model.b
    (leaf,) = leaves(model).values()
    assert (leaf.name, leaf.alike, len(leaf.members)) == ("a", True, 2)
    ((2 * model.a).sum() + (3 * model.b).sum()).backward()
    assert torch.equal(leaf.gradient(), torch.full((3, 4), 5.0))
    leaf.tensor.fill_(7.0)
    assert float(model.b.detach()[2, 3]) == 7.0
    assert set(canonical_names(model).values()) == {"a"}


def test_overlapping_parameters_are_one_flat_leaf_and_gradients_add_where_they_overlap() -> None:
    storage = torch.arange(10.0)
    model = model_of(a=storage[2:8].view(2, 3), b=storage[5:10])
    (leaf,) = leaves(model).values()
    assert not leaf.alike
    assert torch.equal(leaf.tensor, storage[2:10])
    (model.a.sum() + 10 * model.b.sum()).backward()
    assert leaf.gradient().tolist() == [1, 1, 1, 11, 11, 11, 10, 10]
    leaf.tensor.zero_()
    assert float(storage[2:].abs().sum()) == 0
    assert storage[:2].tolist() == [0, 1]
    assert not canonical_names(model)


def test_a_transposed_alias_is_one_leaf_with_gradients_in_place() -> None:
    storage = torch.randn(3, 4)
    model = model_of(a=storage, b=storage.T)
    (leaf,) = leaves(model).values()
    weight = torch.randn(4, 3)
    (model.b * weight).sum().backward()
    assert torch.equal(leaf.gradient().view(3, 4), weight.T)


def test_parameters_side_by_side_on_one_storage_are_leaves_of_their_own() -> None:
    storage = torch.randn(12)
    model = model_of(a=storage[:6].view(2, 3), b=storage[6:])
    found = leaves(model)
    assert {n: tuple(leaf.tensor.shape) for n, leaf in found.items()} == {"a": (2, 3), "b": (6,)}
    assert all(leaf.alike for leaf in found.values())


def test_a_chain_of_overlaps_is_one_leaf() -> None:
    storage = torch.randn(12)
    model = model_of(a=storage[0:5], b=storage[8:12], c=storage[4:9])
    (leaf,) = leaves(model).values()
    assert leaf.name == "a"
    assert leaf.tensor.shape == (12,)


def test_a_leaf_keeps_the_strides_of_a_parameter_that_is_not_contiguous() -> None:
    model = model_of(a=torch.randn(4, 3).T)
    (leaf,) = leaves(model).values()
    assert leaf.tensor.stride() == model.a.stride()
    leaf.tensor[1, 2] = 9.0
    assert float(model.a.detach()[1, 2]) == 9.0


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    (leaf,) = leaves(model_of(a=torch.randn(3))).values()
    assert torch.equal(leaf.gradient(), torch.zeros(3))


def test_frozen_parameters_are_leaves_too() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert list(leaves(model)) == ["weight", "bias"]


def test_an_expanded_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="a is an expanded tensor"):
        leaves(model_of(a=torch.randn(3, 1).expand(3, 4)))


def test_a_parameter_on_the_meta_device_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"1\.weight is on the meta device"):
        leaves(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_overlap_in_different_dtypes_is_refused_by_name() -> None:
    storage = torch.randn(4)
    with pytest.raises(UnsupportedModelError, match="'a', 'b'"):
        leaves(model_of(a=storage, b=storage.view(torch.bfloat16)))


def test_a_wide_copy_leaves_the_model_alone_and_putting_it_back_rounds_once() -> None:
    model = nn.Linear(3, 2)
    before, pointer = model.weight.detach().clone(), model.weight.data_ptr()
    weights = wide_copy(model, ["weight"])
    weights["weight"] /= 3
    assert torch.equal(model.weight, before)
    put(model, weights)
    assert torch.equal(model.weight, (before.double() / 3).float())
    assert model.weight.data_ptr() == pointer


@pytest.mark.parametrize("held", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("values", [[[0.1, -0.0], [3e-39, float("nan")]], [[0.1, -0.0], [3e-39, float("inf")]]])
def test_what_is_opened_comes_back_bit_for_bit_each_time(
    stored: torch.dtype, held: torch.dtype, values: list[list[float]]
) -> None:
    """Also where what was widened is saved in the dtype that it came from."""
    weight = torch.tensor(values, dtype=torch.float64).to(stored).to(held)
    before = weight.clone()
    saved = Saved({"weight": weight, "same": weight.view(-1), "scalar": torch.tensor(1.0)})
    for order in (["weight", "same"], ["same", "weight"], ["scalar"]):
        for name in order:
            saved.open(name).add_(1)
        saved.put_back()
        assert torch.equal(weight.view(torch.int16), before.view(torch.int16))


def test_what_shares_memory_shares_it_while_it_is_wide() -> None:
    model = nn.Linear(3, 3, bias=False).half()
    model.part = nn.Parameter(model.weight.data[1])
    model.same = nn.Parameter(model.weight.data.view(-1))
    before = model.weight.detach().clone()
    with widened(model, torch.float64):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert torch.equal(model.weight, before.double())
        model.part.data.fill_(7)
        assert model.weight[1].tolist() == model.same[3:6].tolist() == [7, 7, 7]
    assert torch.equal(model.weight, before)


def test_tensors_of_several_dtypes_on_one_memory_are_widened_each_as_what_it_is() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    model = nn.Module()
    model.a = nn.Parameter(memory[:8].view(torch.float16))
    model.b = nn.Parameter(memory[8:].view(torch.bfloat16))
    with torch.no_grad():
        model.a.copy_(torch.arange(4.0))
        model.b.copy_(torch.arange(4.0, 8.0))
    with widened(model):
        assert model.a.tolist() == [0, 1, 2, 3]
        assert model.b.tolist() == [4, 5, 6, 7]
