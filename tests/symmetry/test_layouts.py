"""Layouts that a user describes: what a trace cannot see is found through them, and what does not hold is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import pytorch_utils

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.comparable import Named, check_comparable, notes_on
from hf_geosharp.errors import GeosharpWarning, UsageError
from hf_geosharp.sharpness.identity import layouts_recorded
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.symmetry import SymmetryMap, find_symmetries, layouts
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.layouts import Layout, read_layouts, register_layout, unregister_layout
from hf_geosharp.symmetry.parameters import canonical_names
from hf_geosharp.symmetry.verify import verify
from tests.families import identical, state
from tests.results import result_of
from tests.symmetry.handmade import (
    HEAD,
    WIDTH,
    Act,
    Handed,
    Projected,
    Residual,
    Whole,
    half,
    inputs,
    interleaved,
    joined,
    repeated,
    split,
)

ENTRY: dict[str, Any] = {"name": "mine", "q": "q", "k": "k", "v": "v", "o": "o", "heads": {"query": 4, "key": 4}}


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_registered", [])


class Closed(torch.autograd.Function):
    """Attention whose workings do not show, for it runs without a graph alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("this has no graph")
        return Whole.forward(ctx, q, k, v)

    backward = Whole.backward


def hidden(rotary: Act | None = None, key_heads: int = 4) -> nn.Module:
    """Attention in a function of its own, into which a trace does not see."""

    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (q, k) if rotary is None else (rotary(q), rotary(k))
        return joined(Closed.apply(q / HEAD**0.5, repeated(m, k), repeated(m, v)))

    return Residual(Projected(core, key_heads=key_heads))


class Fused(nn.Module):
    """The same with one projection: for each head its value, its key and its query."""

    def __init__(self) -> None:
        super().__init__()
        self.vkq, self.out = nn.Linear(WIDTH, 3 * 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, k, q = split(self.vkq(x), 4).chunk(3, dim=-1)
        return self.out(joined(Closed.apply(q, k, v)))  # type: ignore[no-any-return]


def made(**changes: Any) -> Layout:
    register_layout({**ENTRY, **changes})
    return layouts.registered()[-1]


def groups(found: SymmetryMap) -> dict[str, tuple[str, int]]:
    return {p.kind: (p.group.name, p.copies) for p in found.pairs if p.kind in ("qk", "vo")}


FULL = (f"GL({HEAD})", 4)


def test_without_a_layout_a_hidden_softmax_claims_nothing() -> None:
    assert groups(find_symmetries(hidden(), inputs())) == {}


def test_a_layout_that_is_given_finds_what_a_trace_cannot_see() -> None:
    model = hidden()
    layout = Layout(
        "mine", {r: r for r in "qkvo"}, {"q": "(n h)", "k": "(n h)", "v": "(n h)", "o": "(n h)"}, heads=(4, 4)
    )
    found = find_symmetries(model, inputs(), layouts=[layout])
    assert groups(found) == {"qk": FULL, "vo": FULL}
    assert verify(model, found, [inputs(1)], each=True).map == found


class Own(nn.Linear):
    """A class of one's own with the code of another."""


class Conv1D(nn.Linear):
    """Called as one of transformers is whose weight is stored the other way round, and something else."""

    nf = 4 * HEAD

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


@pytest.mark.parametrize("kind", [Own, lambda width, out: pytorch_utils.Conv1D(out, width), Conv1D])
def test_linear_maps_are_told_by_the_code_that_they_run(kind: Callable[[int, int], nn.Module]) -> None:
    layout = made()
    layouts._registered.clear()
    part = hidden().parts[0]  # type: ignore[index]
    for role in "qkv":
        setattr(part, role, kind(WIDTH, 4 * HEAD))
    model = Residual(part)
    if kind is Conv1D:
        with pytest.raises(UsageError, match="fits no module"):
            find_symmetries(model, inputs(), layouts=[layout])
    else:
        assert groups(find_symmetries(model, inputs(), layouts=[layout])) == {"qk": FULL, "vo": FULL}


def states(outputs: Any, batch: Any) -> Tensor:
    return (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean((1, 2))


def test_a_score_takes_layouts(tmp_path: Path) -> None:
    """From Python they were only for finding and inspecting; the result and the journal know them."""
    layout, register = made(), layouts._registered
    register.clear()
    model, batches = hidden(), [inputs(0), inputs(1)]
    how: dict[str, Any] = {"loss": states, "steps": 2, "reproducibility": False}
    with pytest.warns(GeosharpWarning, match="no attention symmetry was found"):
        without = score(model, batches, **how, output=tmp_path / "without")
    result = score(model, batches, **how, layouts=[layout], output=tmp_path / "with")
    assert "layouts" not in without.model
    assert (result.model["layouts"], result.metric, result.pairs.count) == (["mine"], "inv", 8)
    with pytest.raises(UsageError, match=r'without: layouts missing here, \["mine"\] in with'):
        check_comparable([Named("with", result), Named("without", without)])
    found = find_symmetries(model, inputs(), layouts=[layout])
    twin = copy.deepcopy(model)
    found.apply(twin, found.random_element(twin, 1, 10.0))
    moved = score(twin, batches, **how, layouts=layout)
    assert moved.geodesic_sharpness == pytest.approx(result.geodesic_sharpness, rel=1e-3)
    # A journal goes on with the same ones alone, however they were given.
    for other, there in (("without", "missing there"), ("with", r".*there, missing here")):
        with pytest.raises(UsageError, match=f"belongs to another run: layouts {there}"):
            score(model, batches, **how, layouts=[layout] * (other == "without"), output=tmp_path / other)
    register.append(layout)
    assert score(model, batches, **how, output=tmp_path / "with").per_batch == result.per_batch
    for wrong in ("mine.json", [{"name": "mine"}], 3):
        with pytest.raises(UsageError, match="it holds what read_layouts makes"):
            score(model, batches, **how, layouts=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="fits no module"):
        score(model, batches, **how, layouts=[replace(layout, name="other", paths={r: f"x_{r}" for r in "qkvo"})])


def test_a_comparison_tells_of_layouts_that_only_some_were_scored_with() -> None:
    items = [
        Named(name, result_of(name, [1.0, 2.0], model={"task": None, **own}))
        for name, own in (("a", {}), ("b", {"layouts": ["mine"]}))
    ]
    assert any("layouts (--layout) in some of the models alone: b by mine" in note for note in notes_on(items))
    assert not any("layouts" in note for note in notes_on([items[1], items[1]]))


def test_scores_of_one_class_with_other_layouts_are_not_comparable() -> None:
    """They divide out other symmetries; another class may need a layout where this one is traced."""

    def item(name: str, cls: str = "Mine", **own: Any) -> Named:
        return Named(name, result_of(name, [1.0, 2.0], model={"task": None, "class": cls, **own}))

    plain, laid = item("a"), item("b", layouts=["mine"], layouts_digest="0" * 12)
    with pytest.raises(UsageError, match=r'b: layouts \["mine"\] here, missing in a'):
        check_comparable([plain, laid])
    edited = item("c", layouts=["mine"], layouts_digest="1" * 12)
    with pytest.raises(UsageError, match="c: layouts_digest 111111111111 here, 000000000000 in b"):
        check_comparable([laid, edited])
    assert check_comparable([item("d", "Other"), laid, replace(laid, name="e")]) == []
    assert len(check_comparable([plain, laid, edited], force=True)) == 2


def test_what_a_result_records_of_layouts_depends_on_what_they_describe() -> None:
    one, other = (
        Layout("mine", {r: r for r in "qkvo"}, dict.fromkeys("qkvo", "(n h)"), heads=heads)
        for heads in ((4, 4), (4, 2))
    )
    assert layouts_recorded(Settings()) == {}
    first, second = (layouts_recorded(Settings(layouts=(layout,))) for layout in (one, other))
    assert first["layouts"] == second["layouts"] == ["mine"]
    assert first["layouts_digest"] != second["layouts_digest"]


def test_what_a_layout_claims_is_not_claimed_again_as_units_that_scale() -> None:
    """Without the layout the values' coordinates are seen to scale; with it that is a part of the larger group."""
    register_layout(ENTRY)
    found = find_symmetries(hidden(), inputs())
    assert sorted(p.kind for p in found.pairs) == ["qk", "vo"]


def test_a_layout_that_is_registered_serves_all_models() -> None:
    register_layout(ENTRY)
    for _ in range(2):
        assert groups(find_symmetries(hidden(), inputs())) == {"qk": FULL, "vo": FULL}


@pytest.mark.parametrize("rotary", [half, interleaved])
def test_rotary_embeddings_are_told_on_a_twin_not_by_the_layout(rotary: Act) -> None:
    register_layout(ENTRY)
    found = find_symmetries(hidden(rotary), inputs())
    assert groups(found) == {"qk": ("GL(1,C)", 4 * HEAD // 2), "vo": FULL}
    assert verify(hidden(rotary), found, [inputs(1)], each=True).map == found


def test_grouped_queries_are_one_copy_for_each_key_head() -> None:
    register_layout({**ENTRY, "heads": {"query": 4, "key": 2}})
    assert groups(find_symmetries(hidden(key_heads=2), inputs())) == {"qk": (FULL[0], 2), "vo": (FULL[0], 2)}


def test_parts_of_a_fused_projection_are_selected() -> None:
    register_layout(
        {
            **dict.fromkeys("qkv", "vkq"), "name": "vkq", "o": "out", "parts": 3, "heads": {"query": 4, "key": 4},
            "patterns": dict.fromkeys("qkv", "(n s h)"), "select": {"v": {"s": 0}, "k": {"s": 1}, "q": {"s": 2}},
        }
    )  # fmt: skip
    model = Residual(Fused())
    found = find_symmetries(model, inputs())
    assert groups(found) == {"qk": FULL, "vo": FULL}
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_weights_handed_on_with_their_biases_copied_are_described() -> None:
    register_layout(ENTRY)
    model = Residual(Handed())
    found = find_symmetries(model, inputs())
    assert groups(found) == {"qk": FULL, "vo": FULL}
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_a_layout_of_what_a_trace_sees_anyway_changes_nothing() -> None:
    model = Residual(Projected())
    alone = find_symmetries(model, inputs())
    register_layout(ENTRY)
    assert find_symmetries(model, inputs()) == alone


def test_a_model_that_a_registered_layout_does_not_fit_is_searched_without_it() -> None:
    model = Residual(Projected())
    alone = find_symmetries(model, inputs())
    register_layout({**ENTRY, "q": "query"})
    with pytest.warns(GeosharpWarning, match="'mine' fits no module of this Residual"):
        assert find_symmetries(model, inputs()) == alone


def test_a_layout_is_taken_back_by_its_name() -> None:
    register_layout(ENTRY)
    register_layout({**ENTRY, "name": "other"})
    unregister_layout("mine")
    assert [layout.name for layout in layouts.registered()] == ["other"]
    with pytest.raises(UsageError, match="No layout 'mine' is registered"):
        unregister_layout("mine")


# ------------------------------------------------------------------------------------------------------------ refused

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another number of heads": ({"heads": {"query": 3, "key": 3}}, "does not hold.*moves by"),
    "coordinates outermost": ({"patterns": dict.fromkeys("qkvo", "(h n)")}, "does not hold.*moves by"),
    "values for keys": ({"k": "v", "v": "k"}, "does not hold.*moves by"),
    "a submodule that is not there": ({"q": "query"}, "fits no module"),
    "heads that do not divide": ({"heads": {"query": 5, "key": 5}}, "fits no module"),
    "more key heads than query heads": ({"heads": {"query": 4, "key": 8}}, "fits no module"),
    "no heads at all": ({"heads": {"query": 0, "key": 0}}, "fits no module"),
    "a submodule that is no linear map": ({"q": ""}, "fits no module"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layout_that_does_not_hold_is_refused_with_what_was_measured(name: str) -> None:
    changes, message = WRONG[name]
    model = hidden()
    before = state(model)
    with pytest.raises(UsageError, match=message):
        find_symmetries(model, inputs(), layouts=[made(**changes)])
    assert identical(model, before)


SEEN = {
    "another number of heads": "what are several heads is described as one, and the output moves by",
    "coordinates outermost": r"what is one head is described as 4, and the output moves by",
    "values for keys": r"parts\.0\.v\.weight is seen in the vo of attention instead, and the output moves by",
}


@pytest.mark.parametrize("name", SEEN)
def test_a_layout_that_a_trace_has_seen_otherwise_is_refused_with_both(name: str) -> None:
    changes = {**WRONG[name][0], **({"heads": {"query": 2, "key": 2}} if "heads" in WRONG[name][0] else {})}
    with pytest.raises(UsageError, match=SEEN[name]):
        find_symmetries(Residual(Projected()), inputs(), layouts=[made(**changes)])


DESCRIBED = ("bert", "gpt2", "gptj", "llama", "qwen3", "olmo2", "longformer", "gemma3n_text")
"""Plain, fused, rotary in part or whole, grouped, with norms on heads or over all of them, two projections each."""


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_right_layout_is_not_refused_whatever_group_is_left(name: str) -> None:
    model = tiny.build(name)
    given, batch = described(model), synthetic(model, tokens=19)
    found = find_symmetries(model, batch, cached=False)
    assert find_symmetries(model, batch, layouts=given) == found


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_layout_with_values_for_keys_is_refused_on_models_of_transformers(name: str) -> None:
    model = tiny.build(name)
    wrong = [
        replace(x, select={**x.select, "k": x.select["v"], "v": x.select["k"]})
        if x.select
        else replace(x, paths={**x.paths, "k": x.paths["v"], "v": x.paths["k"]})
        for x in described(model)
    ]
    with pytest.raises(UsageError, match=r"does not hold for the .*moves by"):
        find_symmetries(model, synthetic(model, tokens=19), layouts=wrong)


def described(model: nn.Module) -> list[Layout]:
    """The layouts that ship and fit, as if a user had given them."""
    shipped = [replace(x, name=f"my {x.name}") for x in layouts._shipped()[0]]
    used = {site.layout for site in layouts.declared(model, canonical_names(model), shipped)}
    assert used
    return [x for x in shipped if x.name in used]


def test_an_axis_that_nothing_gives_a_size_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"unknown axes \['y'\]"):
        register_layout({**ENTRY, "patterns": dict.fromkeys("qkv", "(n y h)")})


def test_a_layout_of_a_module_that_is_not_called_is_named() -> None:
    model = hidden()
    model.idle = Projected().double()
    model.parts = nn.ModuleList()
    register_layout(ENTRY)
    found = find_symmetries(model, inputs())
    assert found.pairs == ()
    assert [u for u in found.unrecognised if "idle" in u and "not called" in u]


# -------------------------------------------------------------------------------------------------------------- files


def written(folder: Path, text: str) -> Path:
    path = folder / "layouts.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_layouts_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"schema": 1, "layouts": [ENTRY, {**ENTRY, "name": "other", "parts": 3}]}))
    one, two = read_layouts(path)
    assert (one.name, one.paths["q"], one.heads, one.parts) == ("mine", "q", (4, 4), 1)
    assert (two.name, two.parts) == ("other", 3)
    assert groups(find_symmetries(hidden(), inputs(), layouts=[one])) == {"qk": FULL, "vo": FULL}


BAD_FILES = {
    "not JSON": "layouts: mine",
    "empty": "",
    "a list": "[]",
    "a number": "3",
    "no schema": json.dumps({"layouts": [ENTRY]}),
    "another schema": json.dumps({"schema": 2, "layouts": [ENTRY]}),
    "no layouts": json.dumps({"schema": 1}),
    "layouts that are none": json.dumps({"schema": 1, "layouts": "mine"}),
    "a layout that is a name": json.dumps({"schema": 1, "layouts": ["mine"]}),
    "a role missing": json.dumps({"schema": 1, "layouts": [{k: v for k, v in ENTRY.items() if k != "o"}]}),
    "no name": json.dumps({"schema": 1, "layouts": [{k: v for k, v in ENTRY.items() if k != "name"}]}),
    "heads without keys": json.dumps({"schema": 1, "layouts": [{**ENTRY, "heads": {"query": 4}}]}),
    "heads that are no numbers": json.dumps({"schema": 1, "layouts": [{**ENTRY, "heads": {"query": "x", "key": 1}}]}),
    "patterns that are none": json.dumps({"schema": 1, "layouts": [{**ENTRY, "patterns": "(n h)"}]}),
    "a path that is a number": json.dumps({"schema": 1, "layouts": [{**ENTRY, "q": 3}]}),
    "a misspelt key": json.dumps({"schema": 1, "layouts": [{**ENTRY, "pattern": {"q": "(n h)"}}]}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_describes_no_layouts_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, BAD_FILES[name])
    with pytest.raises(UsageError, match=r"layouts\.json"):
        read_layouts(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.json"):
        read_layouts(tmp_path / "gone.json")


def test_the_layouts_that_ship_have_names_and_all_roles() -> None:
    shipped, _ = layouts._shipped()
    assert len({x.name for x in shipped}) == len(shipped) > 0
    assert all(set(x.paths) == set("qkvo") for x in shipped)


def test_one_token_is_not_enough_to_claim_anything_through_a_layout() -> None:
    register_layout(ENTRY)
    model = hidden()
    try:
        found = find_symmetries(model, {"x": inputs()["x"][:, :1]})
    except UsageError:
        return
    assert verify(model, found, [inputs(1)], each=True).map.pairs == found.pairs


def test_a_layout_leaves_the_model_as_it_was() -> None:
    register_layout(ENTRY)
    model = hidden().train()
    before = state(model)
    find_symmetries(model, inputs())
    assert identical(model, before)
    assert all(m.training for m in model.modules())
    assert not any(torch.is_tensor(p.grad) for p in model.parameters())
