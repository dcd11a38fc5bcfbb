"""Claims against the model itself: false ones go and are named, true ones stay with their evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_geosharp.symmetry import Pair, SymmetryMap, View, find_symmetries
from hf_geosharp.symmetry.fold import Gain, KeyBias, Reader
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.probe import OF_CONTROL
from hf_geosharp.symmetry.verify import TOLERANCE, verify
from hf_geosharp.symmetry.views import parse
from tests.families import WIDTH, Family, batch_of, build, each_family, identical, state
from tests.symmetry.handmade import HEAD, Model, inputs

FALSE = "false claim"


def view(name: str, pattern: str, sizes: dict[str, int], rows: tuple[str, ...] = ("i",), **select: int) -> View:
    return View.pattern(name, parse(pattern), sizes, ("n",), ("h",), rows, select=select)


def turned(base: View, axes: tuple[str, str]) -> View:
    split = base.split("h", axes, {"c": 2, "f": base.sizes["h"] // 2})
    return replace(split, copies=(*base.copies, "f"), dim=(), field="c")


LLAMA = {"n": 2, "g": 2, "h": 8, "i": WIDTH}
QUERY = view("model.layers.0.self_attn.q_proj.weight", "(n g h) i", LLAMA, ("g", "i"))
KEY = view("model.layers.0.self_attn.k_proj.weight", "(n h) i", LLAMA)
VALUE = view("model.layers.0.self_attn.v_proj.weight", "(n h) i", LLAMA)


def llama_claim(group: Group, g: View, h: View) -> Pair:
    return Pair(FALSE, "qk", "model.layers.0.self_attn", group, (g,), (h,))


FALSE_ON_LLAMA = {
    "the full group on a rotary head": llama_claim(Group(8), QUERY, KEY),
    "neighbours paired where halves are": llama_claim(
        Group(1, complex=True), turned(QUERY, ("f", "c")), turned(KEY, ("f", "c"))
    ),
    "one query head of a group without the other": llama_claim(
        Group(1, complex=True),
        turned(QUERY.pick("g", 0), ("c", "f")),
        turned(KEY, ("c", "f")),
    ),
    "queries with values": llama_claim(Group(8), QUERY, VALUE),
}


def test_the_true_claim_built_by_the_same_hand_is_kept() -> None:
    """So that the false ones below fail for what is false about them."""
    claim = llama_claim(Group(1, complex=True), turned(QUERY, ("c", "f")), turned(KEY, ("c", "f")))
    proof = verify(build("llama"), SymmetryMap(pairs=(claim,)), [batch_of("llama")])
    assert proof.map.pairs == (claim,)
    assert not proof.map.dropped


@pytest.mark.parametrize("claim", FALSE_ON_LLAMA.values(), ids=FALSE_ON_LLAMA.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_false_claim_is_dropped_and_named_and_the_true_ones_stay(claim: Pair, dtype: torch.dtype) -> None:
    model, batch = build("llama", dtype), batch_of("llama", dtype)
    true = find_symmetries(model, batch)
    before = state(model)
    proof = verify(model, replace(true, pairs=(*true.pairs, claim)), [batch])
    assert proof.map.symmetries == true.symmetries
    assert [d.split(":")[0] for d in proof.map.dropped] == [FALSE]
    assert identical(model, before)


def test_a_false_claim_alone_leaves_an_empty_map_without_evidence() -> None:
    claim = next(iter(FALSE_ON_LLAMA.values()))
    proof = verify(build("llama"), SymmetryMap(pairs=(claim,)), [batch_of("llama")])
    assert not proof.map.symmetries
    assert (proof.deviation, proof.control) == (None, None)


def test_several_false_claims_among_true_ones_are_all_found() -> None:
    true = find_symmetries(build("llama"), batch_of("llama"))
    false = tuple(replace(c, name=f"{FALSE} {i}") for i, c in enumerate(FALSE_ON_LLAMA.values()))
    mixed = (false[0], *true.pairs[:2], false[1], *true.pairs[2:], *false[2:])
    proof = verify(build("llama"), replace(true, pairs=mixed), [batch_of("llama")])
    assert proof.map.symmetries == true.symmetries
    assert sorted(d.split(":")[0] for d in proof.map.dropped) == sorted(c.name for c in false)


def test_false_folds_are_dropped() -> None:
    model = Model("half")
    sizes = {"n": 4, "h": HEAD, "i": 24}
    key_bias = KeyBias(
        "rotary key bias",
        "attention",
        view("attention.k_proj.bias", "(n h)", sizes, ()),
        view("attention.k_proj.weight", "(n h) i", sizes),
    )
    forgotten = Gain("gain", "norm", "norm.weight", None, (Reader("attention.q_proj.weight", 1, None),), 24)
    proof = verify(model, SymmetryMap(folds=(key_bias, forgotten)), [inputs()])
    assert not proof.map.folds
    assert [d.split(":")[0] for d in proof.map.dropped] == ["rotary key bias", "gain"]


def test_a_claim_that_nothing_feels_is_dropped_because_its_control_is_silent_too() -> None:
    model = Model()
    with torch.no_grad():
        model.attention.o_proj.weight.zero_()
    sizes = {"n": 4, "h": HEAD, "i": 24}
    claim = Pair(
        "unfelt",
        "qk",
        "attention",
        Group(HEAD),
        (view("attention.q_proj.weight", "(n h) i", sizes),),
        (view("attention.v_proj.weight", "(n h) i", sizes),),
    )
    assert not verify(model, SymmetryMap(pairs=(claim,)), [inputs()]).map.pairs


@each_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_claim_is_proved_below_the_tolerance_and_below_a_thousandth_of_the_control(
    family: Family, dtype: torch.dtype
) -> None:
    model = build(family.name, dtype)
    batches = [batch_of(family.name, dtype, seed) for seed in (0, 1)]
    found = find_symmetries(model, batches[0])
    before = state(model)
    proof = verify(model, found, batches)
    assert proof.map == found
    assert proof.deviation is not None
    assert proof.control is not None
    assert proof.deviation < TOLERANCE[dtype]
    assert proof.deviation < 1e-3 * proof.control == OF_CONTROL * proof.control
    assert identical(model, before)


@pytest.mark.parametrize("at", range(6))
def test_an_exception_in_any_forward_pass_leaves_weights_and_modes_as_they_were(at: int) -> None:
    model = Model()
    found = find_symmetries(model, inputs())
    model.train()
    model.head.eval()
    modes, before = [m.training for m in model.modules()], state(model)
    calls = []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(None)
        if len(calls) > at:
            raise KeyboardInterrupt

    model.head.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        verify(model, found, [inputs(), inputs(1)])
    assert identical(model, before)
    assert [m.training for m in model.modules()] == modes


def test_an_empty_map_is_proved_without_running_the_model() -> None:
    model = Model()
    model.head.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    proof = verify(model, SymmetryMap(), [inputs()])
    assert (proof.map, proof.deviation, proof.control) == (SymmetryMap(), None, None)


# ----------------------------------------------------------------------------------------------- moving whole models


@each_family
def test_moving_a_model_there_and_back_returns_its_weights_to_rounding(family: Family) -> None:
    model, batch = build(family.name), batch_of(family.name)
    found = find_symmetries(model, batch)
    before = state(model)
    element = found.random_element(model, 3, 100.0)
    found.apply(model, element)
    assert not identical(model, before)
    found.apply(model, found.inverse(element), back=True)
    for name, p in model.named_parameters():
        # Roundings of 1e-16 times the condition of the move, 1e2 on the way there and 1e2 on the way back.
        assert torch.allclose(p, before[name], rtol=0, atol=1e-11 * float(before[name].abs().max())), name


@each_family
def test_moving_a_model_changes_weights_by_much_and_outputs_by_rounding(family: Family) -> None:
    model, moved, batch = build(family.name), build(family.name), batch_of(family.name)
    found = find_symmetries(model, batch)
    found.apply(moved, found.random_element(moved, 3, 1e3))
    with torch.no_grad():
        base, after = model(**batch).logits, moved(**batch).logits
    # Norms and rotary tables that run in float32 round at 6e-8 what arrives there moved by float64's rounding.
    assert float((after - base).norm() / base.norm()) < (5e-7 if family.casts else 1e-11)
    named, other = state(model), state(moved)
    for name in found.parameters:
        assert float((named[name] - other[name]).norm() / named[name].norm()) > 0.1, name


@each_family
def test_a_random_element_is_the_same_for_the_same_seed_and_another_for_another(family: Family) -> None:
    model = build(family.name)
    found = find_symmetries(model, batch_of(family.name))
    first, again, other = (found.random_element(model, seed).moves for seed in (1, 1, 2))
    assert list(first) == [s.name for s in found.symmetries]
    assert all(torch.equal(first[n][k], again[n][k]) for n in first for k in first[n])
    assert all(any(not torch.equal(first[n][k], other[n][k]) for k in first[n]) for n in first)


def test_a_moved_model_keeps_its_dtype_and_its_storage() -> None:
    model, batch = build("llama", torch.float32), batch_of("llama", torch.float32)
    found = find_symmetries(model, batch)
    places = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    found.apply(model, found.random_element(model, 0))
    assert {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()} == places


def test_only_the_symmetries_chosen_are_moved() -> None:
    model = Model()
    found = find_symmetries(model, inputs())
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    before = {n: w.clone() for n, w in weights.items()}
    found.move(weights, found.random_element(weights), only=["attention.vo"])
    changed = {n for n in weights if not torch.equal(weights[n], before[n])}
    assert changed == {"attention.v_proj.weight", "attention.v_proj.bias", "attention.o_proj.weight"}


def test_what_is_left_out_of_a_map_is_recorded_with_its_reason() -> None:
    found = find_symmetries(Model(), inputs())
    less = found.without({"attention.qk": "because"})
    assert [p.name for p in less.pairs] == ["attention.vo"]
    assert less.dropped == ("attention.qk: because",)
