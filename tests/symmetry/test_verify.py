"""Claims against the model itself: false ones go and are named, true ones stay with their evidence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.symmetry import Pair, SymmetryMap, View, find_symmetries
from hf_geosharp.symmetry.fold import Gain, KeyBias, Mean, Reader, ReadMean
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.trials.probe import OF_CONTROL
from hf_geosharp.symmetry.verify import TOLERANCE, Claim, example_batches, verify
from hf_geosharp.symmetry.views import parse
from tests.families import BY_NAME, WIDTH, Family, batch_of, build, each_family, identical, state
from tests.symmetry.handmade import HEAD, Model, Projected, Residual, attend, change, inputs, outputs
from tests.symmetry.handmade import WIDTH as WIDTH_HAND

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


@cache
def true_map(name: str, dtype: torch.dtype = torch.float64) -> SymmetryMap:
    """What is found on a family."""
    return find_symmetries(build(name, dtype), batch_of(name, dtype))


def test_the_true_claim_built_by_the_same_hand_is_kept() -> None:
    """So that the false ones below fail for what is false about them."""
    claim = llama_claim(Group(1, complex=True), turned(QUERY, ("c", "f")), turned(KEY, ("c", "f")))
    proof = verify(build("llama"), SymmetryMap(pairs=(claim,)), [batch_of("llama")])
    assert proof.map.pairs == (claim,)
    assert not proof.map.dropped


@pytest.mark.parametrize("claim", FALSE_ON_LLAMA.values(), ids=FALSE_ON_LLAMA.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_false_claim_is_dropped_and_named_and_the_true_ones_stay(claim: Pair, dtype: torch.dtype) -> None:
    model, batch, true = build("llama", dtype), batch_of("llama", dtype), true_map("llama", dtype)
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
    true = true_map("llama")
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
    found = true_map(family.name, dtype)
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


# --------------------------------------------------------------------------------------------- claims one by one


def claims_of(model: nn.Module, found: SymmetryMap, **options: Any) -> dict[str, Claim]:
    return {c.name: c for c in verify(model, found, [inputs(), inputs(1)], each=True, **options).claims}


def test_each_claim_comes_with_its_deviation_its_control_and_its_status() -> None:
    model = Model(key_heads=2)
    found = find_symmetries(model, inputs())
    claims = claims_of(model, found)
    assert list(claims) == [s.name for s in found.symmetries]
    for c in claims.values():
        assert c.status == "holds"
        assert c.deviation is not None
        assert c.control is not None
        assert c.deviation < 1e-12 < 1e-3 < c.control


def test_kinds_are_measured_by_themselves() -> None:
    """What one kind does to the outputs when it is broken is its own, not that of all together."""
    model = Model()
    found = find_symmetries(model, inputs())
    assert len({c.control for c in claims_of(model, found).values()}) == len(found.symmetries)
    together = verify(model, found, [inputs(), inputs(1)]).claims
    assert len({c.control for c in together}) == 1


@pytest.mark.parametrize("twist", ["half", "interleaved"])
def test_frequencies_that_are_paired_wrongly_are_a_control_of_rotary_claims(twist: str) -> None:
    model = Model(twist)
    found = find_symmetries(model, inputs())
    qk = next(p for p in found.pairs if p.kind == "qk")
    assert qk.has_wrong_pairing
    assert moved(model, qk, "apply") < 1e-12
    assert moved(model, qk, "wrong_pairing") > 1e-3
    control = claims_of(model, found)[qk.name].control
    assert control is not None
    # The least of the controls counts.
    assert control <= 1.5 * min(moved(model, qk, "wrong_pairing"), moved(model, qk, "break_"))


def test_groups_that_are_not_tied_are_a_control_of_grouped_queries() -> None:
    model = Model(key_heads=2)
    found = find_symmetries(model, inputs())
    qk = next(p for p in found.pairs if p.kind == "qk")
    assert qk.has_untied
    assert moved(model, qk, "apply") < 1e-12
    assert moved(model, qk, "untied") > 1e-3


def test_claims_without_frequencies_or_groups_have_no_such_controls() -> None:
    qk = next(p for p in find_symmetries(Model(), inputs()).pairs if p.kind == "qk")
    assert not qk.has_wrong_pairing
    assert not qk.has_untied


def moved(model: nn.Module, pair: Pair, how: str) -> float:
    """Relative change of the outputs when a pair is moved in one of its ways."""
    base, weights = outputs(model, inputs()), {n: p.detach().clone() for n, p in model.named_parameters()}
    move = pair.random(weights, torch.Generator().manual_seed(0), 10.0)
    getattr(pair, how)(weights, move)
    stored = state(model)
    model.load_state_dict({**model.state_dict(), **weights})
    try:
        return change(model, inputs(), base)
    finally:
        model.load_state_dict({n: stored[n] for n in model.state_dict()})


@pytest.mark.parametrize("claim", FALSE_ON_LLAMA.values(), ids=FALSE_ON_LLAMA.keys())
def test_a_false_claim_fails_and_is_named_among_claims_too(claim: Pair) -> None:
    model, batch, true = build("llama"), batch_of("llama"), true_map("llama")
    for apart in (True, False):
        shared = verify(model, replace(true, pairs=(*true.pairs, claim)), [batch], each=True, apart=apart)
        assert [c.status for c in shared.claims if c.name == FALSE] == ["failed"]
    proof = verify(model, replace(true, pairs=(*true.pairs, claim)), [batch], each=True)
    statuses = {c.name: c.status for c in proof.claims}
    assert statuses.pop(FALSE) == "failed"
    assert set(statuses.values()) == {"holds"}
    assert proof.map.symmetries == true.symmetries


@pytest.mark.parametrize("each", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_false_claim_whose_effect_is_small_does_not_hide_behind_the_controls_of_others(
    dtype: torch.dtype, each: bool
) -> None:
    """Fresh weights: attention is nearly flat, so that queries and keys hardly matter next to values and MLPs."""
    torch.manual_seed(0)
    model = BY_NAME["llama"].make().to(dtype)
    batch = batch_of("llama", dtype)
    true = find_symmetries(model, batch)
    claim = FALSE_ON_LLAMA["the full group on a rotary head"]
    false = replace(true, pairs=tuple(claim if p.name == "model.layers.0.self_attn.qk" else p for p in true.pairs))
    proof = verify(model, false, [batch], each=each)
    assert FALSE not in {p.name for p in proof.map.pairs}


def test_a_false_claim_on_queries_that_hardly_matter_does_not_hide_behind_the_controls_of_others() -> None:
    """Logits of 1e-4: what is false about queries moves the outputs by less than single precision's tolerance."""
    model = Model("half").float()
    with torch.no_grad():
        model.attention.q_proj.weight.mul_(1e-4)
        model.attention.q_proj.bias.mul_(1e-4)
    batch = {"x": inputs()["x"].float()}
    true = find_symmetries(model, batch)
    sizes = {"n": 4, "h": HEAD, "i": WIDTH_HAND}
    g, h = (
        (view(f"attention.{p}.weight", "(n h) i", sizes), view(f"attention.{p}.bias", "(n h)", sizes, ()))
        for p in ("q_proj", "k_proj")
    )
    claim = Pair(FALSE, "qk", "attention", Group(HEAD), g, h)
    false = replace(true, pairs=tuple(claim if p.kind == "qk" else p for p in true.pairs))
    for apart in (True, False):
        proof = verify(model, false, [batch], each=True, apart=apart)
        assert FALSE not in {p.name for p in proof.map.pairs}


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("projection", "names"), [("k_proj", {"attention.qk"}), ("v_proj", {"attention.qk", "attention.vo"})]
)
def test_a_pair_that_reaches_no_output_is_dead_not_verified(projection: str, names: set[str], apart: bool) -> None:
    """With keys of zero all attention is even; with values of zero nothing is attended to."""
    model = Model(bias=False)
    found = find_symmetries(model, inputs(), preset="paper")
    with torch.no_grad():
        getattr(model.attention, projection).weight.zero_()
    proof = verify(model, found, [inputs(), inputs(1)], each=True, apart=apart)
    assert {c.name for c in proof.claims if c.status == "dead"} == names
    assert {d.split(":")[0] for d in proof.map.dropped if ": dead" in d} == names
    assert names.isdisjoint(p.name for p in proof.map.pairs)


def test_a_module_whose_values_are_zero_claims_no_queries_and_keys() -> None:
    """As the first decoder layer of detection models does, which starts from zeros."""

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Linear(WIDTH_HAND, WIDTH_HAND)
            self.attention = Projected(lambda m, x, q, k, v: attend(q, k, 0 * v))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.place(x))  # type: ignore[no-any-return]

    model = Residual(Zero())
    found = find_symmetries(model, inputs())
    assert not [p for p in found.pairs if p.kind in ("qk", "vo")]
    assert len(found.unrecognised) == 2


# ------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_half_precision_is_verified_in_single_and_comes_back_as_it_was(name: str, dtype: torch.dtype) -> None:
    model, batch, found = build(name, dtype), batch_of(name, dtype), true_map(name, dtype)
    before, seen = state(model), set()
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    model.register_forward_pre_hook(lambda m, args: seen.add(next(m.parameters()).dtype))
    proof = verify(model, found, [{k: v.float() if v.is_floating_point() else v for k, v in batch.items()}], each=True)
    assert seen == {torch.float32}
    assert proof.map == found
    assert proof.deviation is not None
    assert proof.deviation < 1e-4
    assert identical(model, before)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places


def test_half_precision_with_a_batch_in_half_precision_is_verified_too() -> None:
    model = Residual(Projected()).to(torch.bfloat16)
    batch = {"x": inputs()["x"].to(torch.bfloat16)}
    found = find_symmetries(model, batch)
    assert verify(model, found, [batch], each=True).map == found


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 3, 6, 9, 12])
def test_half_precision_comes_back_after_an_exception_in_any_pass(at: int, raised: type[BaseException]) -> None:
    model = Model(key_heads=2).to(torch.bfloat16)
    batch = {"x": inputs()["x"].float()}
    found = find_symmetries(model, {"x": inputs()["x"].to(torch.bfloat16)})
    model.train()
    before, calls = state(model), []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(None)
        if len(calls) > at:
            raise raised("on purpose")

    handle = model.head.register_forward_pre_hook(fail)
    with pytest.raises(raised, match="on purpose"):
        verify(model, found, [batch], each=True)
    handle.remove()
    assert identical(model, before)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(m.training for m in model.modules())


def test_outputs_that_are_not_finite_fail_every_claim_they_are_not_taken_for_agreement() -> None:
    model = Model()
    found = find_symmetries(model, inputs())
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    proof = verify(model, found, [inputs()], each=True)
    assert proof.map == found  # one output of five is nowhere finite; the others agree
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    assert not verify(model, found, [inputs()], each=True).map.symmetries


def test_example_batches_are_made_up_in_two_lengths_long_enough_for_the_largest_group() -> None:
    model = build("bert")
    found = find_symmetries(model)
    one, two = example_batches(model, found)
    assert one["input_ids"].shape[1] > 2 * 8
    assert one["input_ids"].shape[1] != two["input_ids"].shape[1]
    assert verify(model, found, each=True).map == found


# ----------------------------------------------------------------------------------------------- moving whole models


@each_family
def test_moving_a_model_there_and_back_returns_its_weights_to_rounding(family: Family) -> None:
    model, found = build(family.name), true_map(family.name)
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
    found = true_map(family.name)
    found.apply(moved, found.random_element(moved, 3, 1e3))
    with torch.no_grad():
        base, after = model(**batch).logits, moved(**batch).logits
    # Norms and rotary tables that run in float32 round at 6e-8 what arrives there moved by float64's rounding.
    assert float((after - base).norm() / base.norm()) < (5e-7 if family.casts else 1e-11)
    named, other = state(model), state(moved)
    # Norms whose output is the residual are read only.
    still = {p for f in found.folds if isinstance(f, ReadMean) for p in (f.gain, f.bias)}
    still -= {p for s in found.symmetries if not isinstance(s, ReadMean) for p in s.parameters}
    # To biases means add one number, or what the others' sum to, which may be small by chance.
    means = {p for f in found.folds if isinstance(f, (Mean, ReadMean)) for p in f.parameters if p.endswith("bias")}
    means -= {p for s in found.symmetries if not isinstance(s, (Mean, ReadMean)) for p in s.parameters}
    for name in (name for name in found.parameters if name not in still):
        least = 1e-3 if name in means else 0.1
        assert float((named[name] - other[name]).norm() / named[name].norm()) > least, name


@each_family
def test_a_random_element_is_the_same_for_the_same_seed_and_another_for_another(family: Family) -> None:
    model = build(family.name)
    found = true_map(family.name)
    first, again, other = (found.random_element(model, seed).moves for seed in (1, 1, 2))
    assert list(first) == [s.name for s in found.symmetries]
    assert all(torch.equal(first[n][k], again[n][k]) for n in first for k in first[n])
    assert all(any(not torch.equal(first[n][k], other[n][k]) for k in first[n]) for n in first)


def test_a_moved_model_keeps_its_dtype_and_its_storage() -> None:
    model, found = build("llama", torch.float32), true_map("llama", torch.float32)
    places = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    found.apply(model, found.random_element(model, 0))
    assert {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()} == places


def test_what_is_left_out_of_a_map_is_recorded_with_its_reason() -> None:
    found = find_symmetries(Model(), inputs())
    less = found.without({"attention.qk": "because"})
    assert [p.name for p in less.pairs] == ["attention.vo"]
    assert less.dropped == ("attention.qk: because",)


@pytest.fixture
def every_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_geosharp.symmetry.verify.LARGE", 0)


@pytest.mark.usefixtures("every_model_is_large")
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_large_models_are_proved_with_fewer_passes_and_the_same_outcome(name: str) -> None:
    model = build(name)
    proof = verify(model, true_map(name), each=True)
    assert {c.status for c in proof.claims} == {"holds"}
    assert proof.deviation is not None
    assert proof.control is not None
    assert {c.deviation for c in proof.claims} == {proof.deviation}
    assert proof.control == min(c.control for c in proof.claims if c.control is not None) > 0.01
    assert not proof.map.dropped


@each_family
def test_kinds_that_are_not_moved_apart_have_controls_of_their_own_in_fewer_passes(family: Family) -> None:
    model, found = build(family.name), true_map(family.name)
    passes = [0]
    model.register_forward_pre_hook(lambda *_: passes.__setitem__(-1, passes[-1] + 1))
    proofs = []
    for apart in (True, False):
        passes.append(0)
        proofs.append(verify(model, found, each=True, apart=apart))
    assert {c.status for proof in proofs for c in proof.claims} == {"holds"}
    assert proofs[0].map == proofs[1].map == found
    assert {c.deviation for c in proofs[1].claims} == {proofs[1].deviation}
    # On the shortest batch alone a control may move the outputs by less, not by nothing.
    assert all((c.control or 0.0) > 0.01 for c in proofs[1].claims)
    assert passes[2] < 0.6 * passes[1]


def test_a_control_that_the_shortest_batch_does_not_show_is_measured_on_the_others() -> None:
    """One token attends to itself, whatever queries and keys are."""
    model = Model("half")
    found = find_symmetries(model, inputs())
    short = {"x": inputs(1)["x"][:1, :1]}
    proof = verify(model, found, [inputs(), short], each=True, apart=False)
    assert {c.status for c in proof.claims} == {"holds"}
    assert proof.map == found


@pytest.mark.usefixtures("every_model_is_large")
@pytest.mark.parametrize("claim", FALSE_ON_LLAMA.values(), ids=FALSE_ON_LLAMA)
def test_large_models_too_lose_false_claims(claim: Pair) -> None:
    model = build("llama")
    true = true_map("llama")
    proof = verify(model, replace(true, pairs=(*true.pairs, claim)), each=True)
    assert {p.name for p in proof.map.pairs} == {p.name for p in true.pairs}
    assert [c.status for c in proof.claims if c.name == FALSE] == ["failed"]


@pytest.mark.usefixtures("every_model_is_large")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_large_models_are_moved_in_place_and_come_back_as_they_were(dtype: torch.dtype) -> None:
    model, found = build("llama", dtype), true_map("llama", dtype)
    before, weights = state(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt), stopped_after(model, 3):
        verify(model, found, each=True)
    assert identical(model, before)
    proof = verify(model, found, each=True)
    assert {c.status for c in proof.claims} == {"holds"}
    assert identical(model, before)
    assert [p.data_ptr() for p in model.parameters()] == weights


@contextmanager
def stopped_after(model: nn.Module, passes: int) -> Iterator[None]:
    """The model is interrupted in the pass after so many."""
    calls: list[None] = []

    def count(*_: object) -> None:
        calls.append(None)
        if len(calls) > passes:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("large", [False, True], ids=["copied", "in place"])
def test_parameters_of_two_names_come_back_too(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two symmetries that move the same memory under different names, as a map made by hand may."""
    monkeypatch.setattr("hf_geosharp.symmetry.verify.LARGE", 0 if large else 1 << 28)
    model = Model(bias=False)
    model.attention.register_parameter("alias", nn.Parameter(model.attention.q_proj.weight.data))
    sizes = {"n": 4, "h": HEAD, "i": WIDTH_HAND}
    key = view("attention.k_proj.weight", "(n h) i", sizes)
    claims = [
        Pair(name, "qk", "attention", Group(HEAD), (view(f"attention.{name}", "(n h) i", sizes),), (key,))
        for name in ("q_proj.weight", "alias")
    ]
    before = state(model)
    verify(model, SymmetryMap(pairs=tuple(claims)), [inputs(), inputs(1)], each=True)
    assert identical(model, before)


def test_what_moves_little_enough_needs_no_control() -> None:
    model = build("llama")
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    verify(model, true_map("llama"), [batch_of("llama")])
    both = len(passes)
    proof = verify(model, true_map("llama"), [batch_of("llama")], enough=1e-6)
    handle.remove()
    assert proof.deviation is not None
    assert proof.deviation < 1e-6
    # Some versions of the model leave caches behind, which takes passes of their own to see.
    assert (proof.control, proof.claims, 2 * both - len(passes)) == (None, (), 1)


def test_outputs_whose_length_depends_on_the_weights_are_compared_and_one_of_another_length_is_another() -> None:
    class Spoken(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y[:, :, None].expand(-1, -1, 1 + int(1e3 * y.abs().sum()) % 97, -1)

    model = Spoken()
    found = find_symmetries(model, inputs())
    assert found.pairs == find_symmetries(Model(), inputs()).pairs
    proof = verify(model, found, [inputs(1)], each=True)
    assert proof.map == found
    assert all(c.status == "holds" for c in proof.claims)
    assert any(c.control == float("inf") for c in proof.claims)
