"""Folds on real modules: every move leaves the outputs alone in float64, and the control does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import Fold, Gain, KeyBias, Reader, ValueBias
from hf_geosharp.symmetry.parameters import put, wide_copy
from hf_geosharp.symmetry.views import View, parse
from tests.symmetry.handmade import HEAD, WIDTH, Joint, Model, Norm, Residual, change, inputs, outputs

EXACT = 1e-12
"""Relative change of the outputs of a true symmetry in float64: some hundred roundings of 1e-16, times the move."""

FELT = 1e-3
"""Relative change that the negative control has to exceed."""


def _view(parameter: str, pattern: str, rows: tuple[str, ...], group: int) -> View:
    sizes = {"n": 4 // group, "g": group, "h": HEAD, "i": WIDTH, "o": WIDTH}
    return View.pattern(f"attention.{parameter}", parse(pattern), sizes, ("n",), ("h",), rows)


def key_bias(group: int) -> Fold:
    return KeyBias(
        "k", "attention", _view("k_proj.bias", "(n h)", (), group), _view("k_proj.weight", "(n h) i", ("i",), group)
    )


def value_bias(group: int) -> Fold:
    return ValueBias(
        "v",
        "attention",
        _view("v_proj.bias", "(n h)", (), group),
        _view("o_proj.weight", "o (n g h)", ("g", "o"), group),
        View.pattern("attention.o_proj.bias", "o", {"o": WIDTH}, (), (), ("o",)),
    )


def gain(*, bias: bool = False, reader_bias: bool = True, offset: float = 0.0) -> Fold:
    readers = tuple(
        Reader(f"attention.{p}.weight", 1, f"attention.{p}.bias" if reader_bias else None)
        for p in ("q_proj", "k_proj", "v_proj")
    )
    return Gain("n", "norm", "norm.weight", "norm.bias" if bias else None, readers, WIDTH, offset)


def _of_stream(parameter: str, pattern: str, rows: tuple[str, ...]) -> View:
    sizes = {"n": 4, "h": HEAD, "i": WIDTH, "o": WIDTH}
    return View.pattern(f"parts.0.{parameter}", parse(pattern), sizes, ("n",), ("h",), rows)


def key_biases() -> Fold:
    first, second = (_of_stream(f"{stream}.1.bias", "(n h)", ()) for stream in ("first", "second"))
    return KeyBias("k", "parts.0", first, _of_stream("first.1.weight", "(n h) i", ("i",)), others=(second,))


def value_biases() -> Fold:
    first, second = (_of_stream(f"{stream}.2.bias", "(n h)", ()) for stream in ("first", "second"))
    weights = tuple(_of_stream(f"outs.{k}.weight", "o (n h)", ("o",)) for k in range(2))
    outs = tuple(View.pattern(f"parts.0.outs.{k}.bias", "o", {"o": WIDTH}, (), (), ("o",)) for k in range(2))
    return ValueBias("v", "parts.0", first, weights[0], outs[0], others=(second,), weights=weights[1:], outs=outs[1:])


Case = tuple[Fold, Callable[[], nn.Module]]

CASES: dict[str, Case] = {
    "key bias": (key_bias(1), Model),
    "key bias, grouped queries": (key_bias(2), lambda: Model(key_heads=2)),
    "value bias": (value_bias(1), Model),
    "value bias, grouped queries": (value_bias(2), lambda: Model(key_heads=2)),
    "key biases of two streams": (key_biases(), lambda: Residual(Joint())),
    "value biases of two streams": (value_biases(), lambda: Residual(Joint())),
    "gain": (gain(), Model),
    "gain, no biases at all": (gain(reader_bias=False), lambda: Model(bias=False)),
    "one plus gain": (gain(offset=1.0), lambda: Model(norm=Norm(offset=1.0))),
    "gain and bias": (gain(bias=True), lambda: Model(norm=Norm(bias=True))),
    "one plus gain, and bias": (gain(bias=True, offset=1.0), lambda: Model(norm=Norm(offset=1.0, bias=True))),
    "gain and a bias that has nowhere to go": (
        gain(bias=True, reader_bias=False),
        lambda: Model(bias=False, norm=Norm(bias=True)),
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def moved(model: nn.Module, fold: Fold, act: Callable[[dict[str, Tensor]], None]) -> None:
    weights = wide_copy(model, fold.parameters)
    act(weights)
    put(model, weights)


def element(fold: Fold, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    return fold.random(dict(model.named_parameters()), torch.Generator().manual_seed(seed), 100.0)


@each_case
def test_a_random_move_leaves_the_outputs_and_changes_every_parameter_it_names(case: Case) -> None:
    fold, model = case[0], case[1]()
    base, before = outputs(model, inputs()), wide_copy(model, fold.parameters)
    move = element(fold, model)
    moved(model, fold, lambda w: fold.apply(w, move))
    assert change(model, inputs(), base) < EXACT
    named = dict(model.named_parameters())
    expected = {v.parameter for v in fold.fixed}
    assert all(not torch.equal(named[n].detach(), before[n]) for n in expected)


@each_case
def test_the_control_moves_one_side_only_and_is_felt(case: Case) -> None:
    fold, model = case[0], case[1]()
    base, move = outputs(model, inputs()), element(fold, model)
    moved(model, fold, lambda w: fold.break_(w, move))
    assert change(model, inputs(), base) > FELT


@each_case
def test_the_inverse_move_brings_the_weights_back_to_rounding(case: Case) -> None:
    fold, model = case[0], case[1]()
    before, move = wide_copy(model, fold.parameters), element(fold, model)
    weights = wide_copy(model, fold.parameters)
    fold.apply(weights, move)
    fold.apply(weights, fold.inverse(move))
    for name, original in before.items():
        assert torch.allclose(weights[name], original, rtol=0, atol=1e-12 * float(original.abs().max())), name


@each_case
def test_the_representative_is_the_same_function_with_its_own_parameters_constant(case: Case) -> None:
    fold, model = case[0], case[1]()
    base = outputs(model, inputs())
    moved(model, fold, fold.canonicalise)
    assert change(model, inputs(), base) < EXACT
    named = dict(model.named_parameters())
    for view in fold.fixed:
        window = view.of(named[view.parameter].detach())
        assert float(window.max() - window.min()) == 0.0, view.parameter


@each_case
def test_every_point_of_an_orbit_has_the_same_representative(case: Case) -> None:
    fold, model = case[0], case[1]()
    here = wide_copy(model, fold.parameters)
    there = {n: w.clone() for n, w in here.items()}
    fold.apply(there, element(fold, model))
    fold.canonicalise(here)
    fold.canonicalise(there)
    for name in here:
        assert torch.allclose(here[name], there[name], rtol=0, atol=1e-12 * max(1.0, float(here[name].abs().max())))


@each_case
def test_the_representative_of_the_representative_is_itself(case: Case) -> None:
    fold, model = case[0], case[1]()
    weights = wide_copy(model, fold.parameters)
    fold.canonicalise(weights)
    once = {n: w.clone() for n, w in weights.items()}
    fold.canonicalise(weights)
    assert all(torch.equal(weights[n], once[n]) for n in once)


def test_moves_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    for fold, make in CASES.values():
        model = make()
        first, again, other = element(fold, model), element(fold, model), element(fold, model, 1)
        assert all(torch.equal(first[k], again[k]) for k in first)
        assert any(not torch.equal(first[k], other[k]) for k in first)


def test_dimensions_count_what_is_folded_away() -> None:
    assert key_bias(1).dimension == 4 * HEAD
    assert key_bias(2).dimension == 2 * HEAD
    assert value_bias(2).dimension == 2 * HEAD
    assert gain().dimension == WIDTH
    assert gain(bias=True).dimension == 2 * WIDTH
    assert gain(bias=True, reader_bias=False).dimension == WIDTH


def test_a_value_bias_does_not_fold_where_attention_weights_do_not_sum_to_one() -> None:
    fold, model = value_bias(1), Model("leaky")
    base, move = outputs(model, inputs()), element(value_bias(1), model)
    moved(model, fold, lambda w: fold.apply(w, move))
    assert change(model, inputs(), base) > FELT


def test_a_key_bias_does_not_fold_under_rotary_embeddings() -> None:
    fold, model = key_bias(1), Model("half")
    base, move = outputs(model, inputs()), element(key_bias(1), model)
    moved(model, fold, lambda w: fold.apply(w, move))
    assert change(model, inputs(), base) > FELT
