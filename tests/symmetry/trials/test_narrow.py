"""Narrow twins: the same answers as from whole ones, at a cost that hardly grows with the width of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import canonical_names
from hf_geosharp.symmetry.tracing.trace import trace
from hf_geosharp.symmetry.trials import narrow, probe
from hf_geosharp.symmetry.trials.narrow import Cuts
from hf_geosharp.symmetry.trials.probe import LocalTwin
from hf_geosharp.symmetry.views import View
from tests.symmetry.handmade import HEAD, WIDTH, Fused, Mlp, Normed, Projected, Residual, half, inputs

CUT = 12
"""Rows that the streams of the tests' small models are cut to: more than a head has coordinates."""


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[LocalTwin]:
    """All twins that are made, as they are made."""
    made: list[LocalTwin] = []
    before = LocalTwin.__init__

    def init(self: LocalTwin, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(LocalTwin, "__init__", init)
    return made


def found(model: nn.Module, batch: Mapping[str, Any], width: int, monkeypatch: pytest.MonkeyPatch) -> SymmetryMap:
    with monkeypatch.context() as patch:
        patch.setattr(narrow, "WIDTH", width)
        return find_symmetries(model, batch)


MLP_WIDTH = 96
"""Hidden units of the tiny models."""

TYPES = [
    "bert", "gpt2", "t5", "llama", "qwen3", "phi", "mixtral", "minicpm3", "opt", "vit", "bitnet", "whisper",
    "deberta-v2", "olmo2", "afmoe", "wav2vec2", "esm", "sam_vision_model", "blip_vision_model", "canine",
    "deepseek_v32",
]  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_a_narrow_twin_says_what_a_whole_one_says(
    name: str, monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    model = tiny.build(name)
    batch = synthetic(model, tokens=19)
    whole = found(model, batch, 1 << 30, monkeypatch)
    assert not any(t.cuts for t in twins)
    twins.clear()
    assert found(model, batch, CUT, monkeypatch) == whole
    # Norms by themselves are no more than a vector; the other twins are all cut.
    assert any(t.cuts for t in twins)
    assert all(t.cuts or sum(w.numel() for w in t.weights.values()) <= 2 * MLP_WIDTH for t in twins)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "separate": Projected,
    "grouped queries": lambda: Projected(key_heads=2),
    "fused": lambda: Fused("n s h"),
    "fused and transposed": lambda: Fused("s n h", transposed=True),
    "normed": lambda: Normed("head", half, centred=True, bias=True),
    "an MLP": lambda: Mlp(torch.relu),
    "a gated MLP": lambda: Mlp(nn.functional.silu, gated=True),
    "two halves of one map": lambda: Mlp(nn.functional.silu, gated=True, fused="gate first"),
}


PROJECTED = {"q.weight": {1}, "k.weight": {1}, "v.weight": {1}, "o.weight": {0}, "o.bias": {0}}
PERCEPTRON = {"up.weight": {1}, "down.weight": {0}, "down.bias": {0}}
EXPECTED: dict[str, dict[str, set[int]]] = {
    "separate": PROJECTED,
    "grouped queries": PROJECTED,
    "fused": {"weight": {1}, "out.weight": {0}, "out.bias": {0}},
    "fused and transposed": {"weight": {0}, "out.weight": {0}, "out.bias": {0}},
    "normed": PROJECTED,
    "an MLP": PERCEPTRON,
    "a gated MLP": {**PERCEPTRON, "gate.weight": {1}},
    "two halves of one map": PERCEPTRON,
}


@pytest.mark.parametrize("width", [CUT, HEAD // 2])
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_cut_along_what_they_read_and_write_alone(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    """Heads are as wide together as the stream, and are not cut; also where a head is wider than what is left."""
    model = Residual(MODULES[name]())
    whole = found(model, inputs(), 1 << 30, monkeypatch)
    twins.clear()
    assert found(model, inputs(), width, monkeypatch) == whole
    (twin,) = {id(t): t for t in twins if t.cuts}.values()
    cut = twin.cuts.dimensions
    assert {n.removeprefix("parts.0."): set(dimensions) for n, dimensions in cut.items()} == EXPECTED[name]
    assert all(twin.weights[n].shape[d] == width for n, dimensions in cut.items() for d in dimensions)


def test_the_model_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("gpt2")
    before = [dict(vars(m)) for m in model.modules()]
    found(model, synthetic(model, tokens=19), CUT, monkeypatch)
    after = [dict(vars(m)) for m in model.modules()]
    for old, new in zip(before, after, strict=True):
        assert {k: v for k, v in old.items() if isinstance(v, (int, tuple))} == {
            k: v for k, v in new.items() if isinstance(v, (int, tuple))
        }


class Insisting(Projected):
    """Wants the width that it was made for."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != WIDTH:
            raise KeyError("another width")
        return super().forward(x)


def test_code_that_wants_its_own_width_is_tried_whole(monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]) -> None:
    model, plain = Residual(Insisting()), Residual(Projected())
    assert found(model, inputs(), CUT, monkeypatch) == found(plain, inputs(), 1 << 30, monkeypatch)
    # Told of the width and not, with fewer heads, and whole.
    assert [bool(t.cuts) for t in twins[:4]] == [True, True, True, False]
    assert all(not t.cuts for t in twins[4:])


class Counting(nn.Module):
    """Owns its matrices, and a number that is the width of the stream and of all heads together."""

    def __init__(self, splits: bool) -> None:
        super().__init__()
        self.width, self.splits = WIDTH, splits
        for name in "qkvo":
            setattr(self, name, nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5))

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.width if self.splits else WIDTH) // HEAD
        x = x if self.splits else x.view(*x.shape[:2], self.width)
        q, k, v = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = torch.softmax(q @ k.mT, dim=-1) @ v
        return y.transpose(1, 2).flatten(2) @ self.o.T


@pytest.mark.parametrize("splits", [False, True])
def test_a_number_may_be_the_width_of_the_stream_or_of_the_heads(
    splits: bool, monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    model = Residual(Counting(splits))
    whole = found(model, inputs(), 1 << 30, monkeypatch)
    assert {p.kind for p in whole.pairs} == {"qk", "vo"}
    twins.clear()
    # Fewer than a head has coordinates: no head is left of so wide a stream.
    assert found(model, inputs(), HEAD // 2, monkeypatch) == whole
    assert twins[-1].cuts.told != splits
    # Matrices that a module owns itself are tried by themselves, without what is around it.
    assert all(t.cuts and set(t.weights) == {f"parts.0.{n}" for n in "qkvo"} for t in twins)


def test_a_number_may_be_that_of_experts(monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]) -> None:
    """As many as the stream is wide: were they fewer on the twin, nothing would show of the others."""
    model = tiny.build("qwen3_moe", num_experts=tiny.WIDTH)
    assert model.config.hidden_size == tiny.WIDTH
    batch = synthetic(model, tokens=60)
    units = [p for p in found(model, batch, CUT, monkeypatch).pairs if p.kind == "mlp"]
    assert len(units) == tiny.LAYERS * tiny.WIDTH
    assert any(t.cuts and any(".experts." in name for name in t.weights) for t in twins)


def test_what_a_false_claim_does_shows_on_a_narrow_twin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that are bent have no symmetry, however long the rows are."""

    class Bent(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, HEAD)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
            y = torch.softmax(torch.tanh(q) @ k.mT, dim=-1) @ v
            return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    maps = [found(Residual(Bent()), inputs(), width, monkeypatch) for width in (CUT, 1 << 30)]
    assert maps[0] == maps[1]
    assert not any(p.kind == "qk" for p in maps[0].pairs)


class Picking(Projected):
    """Looks at the keys that a second product of heads, as wide together as the stream, has picked for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, q, k, v = (
            p(x).unflatten(-1, (4, HEAD)).transpose(1, 2) for p in (self.a, self.b, self.q, self.k, self.v)
        )
        picked = torch.relu(a @ b.mT).sum(1, keepdim=True).topk(4, dim=-1).indices
        mask = torch.full((len(x), 1, *(2 * x.shape[1:2])), -torch.inf, dtype=x.dtype).scatter(-1, picked, 0.0)
        y = torch.softmax(q @ k.mT + mask, dim=-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_what_only_picks_is_no_stream(monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]) -> None:
    model = Residual(Picking().double())
    whole = found(model, inputs(), 1 << 30, monkeypatch)
    assert {p.kind for p in whole.pairs} == {"qk", "vo"}
    twins.clear()
    assert found(model, inputs(), CUT, monkeypatch) == whole
    (twin,) = {id(t): t for t in twins if t._bases}.values()
    assert {twin.weights[f"parts.0.{n}.weight"].shape for n in "abqkv"} == {(WIDTH, CUT)}


class Grouped(Projected):
    """Normalises what it reads in groups of four."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.layer_norm(x.unflatten(-1, (-1, 4)), (4,)).flatten(-2))


def test_code_that_does_not_run_on_so_little_is_tried_on_more(
    monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    model = Residual(Grouped())
    whole = found(model, inputs(), 1 << 30, monkeypatch)
    monkeypatch.setattr(narrow, "BUDGET", 1)
    monkeypatch.setattr(narrow, "FLOOR", 3)
    twins.clear()
    assert found(model, inputs(), CUT, monkeypatch) == whole
    assert [t.cuts.width for t in twins[:2]] == [CUT // 4, CUT]
    assert all(t.cuts.width == CUT for t in twins[1:])


def test_a_symmetry_along_what_is_cut_is_not_narrowed() -> None:
    model = Residual(Projected())
    pair = next(p for p in find_symmetries(model, inputs()).pairs if p.kind == "qk")
    assert narrow.narrowed(pair, Cuts(CUT, {"parts.0.q.weight": frozenset({0})})) is None
    short = narrow.narrowed(pair, Cuts(CUT, {"parts.0.q.weight": frozenset({1})}))
    assert short is not None
    views = [v for v in short.g if isinstance(v, View)]  # type: ignore[attr-defined]
    assert [v.sizes["i"] for v in views if "i" in v.sizes] == [CUT]


def llama(width: int, heads: int, units: int, **settings: Any) -> LlamaForCausalLM:
    """One layer."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=units, num_hidden_layers=1, num_attention_heads=heads,
        **{"num_key_value_heads": heads, **settings},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_what_a_trial_holds_does_not_grow_with_the_width(
    monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    """One layer of Llama, heads of 64: the more coordinates of heads and units there are, the shorter are their rows.

    What is found is what rows of 256 show, whatever the width, and what the formulas of the groups say.
    """
    largest = {}
    for width in (512, 1024, 2048):
        heads, units = width // 128, 2 * width
        model = llama(width, width // 64, units, num_key_value_heads=heads)
        batch = synthetic(model, tokens=9)
        twins.clear()
        symmetries = find_symmetries(model, batch, prove=False)
        largest[width] = max(sum(w.numel() for w in t.weights.values()) for t in twins)
        assert {p.kind: p.dimension for p in symmetries.pairs} == {
            "qk": heads * 32 * 2, "vo": heads * 64**2, "mlp": units
        }  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(narrow, "BUDGET", 1 << 30)
            twins.clear()
            assert find_symmetries(model, batch, prove=False) == symmetries
        assert max(sum(w.numel() for w in t.weights.values()) for t in twins) == narrow.WIDTH * 3 * units
    assert set(largest.values()) == {3 * narrow.BUDGET // 4}


def test_rows_are_cut_to_no_less_than_claims_need() -> None:
    model = llama(512, 4, 1 << 14)
    traced = trace(model, synthetic(model, tokens=9))
    own = {n: tuple(p.shape) for n, p in model.named_parameters() if ".mlp." in n}
    plans = narrow.cuts(traced, "model.layers.0.mlp", own)
    assert [c.width for c in plans] == [narrow.FLOOR, narrow.WIDTH]
    assert sum(plans[0].left(n, shape) for n, shape in own.items()) == narrow.FLOOR * 3 << 14


def test_cuts_are_those_of_the_stream() -> None:
    model = llama(512, 8, 512)
    traced = trace(model, synthetic(model, tokens=9))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    own = {n: s for n, s in shapes.items() if ".self_attn." in n}
    place = "model.layers.0.self_attn"
    expected: dict[str, frozenset[int]] = {
        **{f"{place}.{n}_proj.weight": frozenset({1}) for n in "qkv"}, f"{place}.o_proj.weight": frozenset({0})
    }  # fmt: skip
    assert narrow.cuts(traced, place, own) == (Cuts(128, expected), Cuts(256, expected))
    own = {n: s for n, s in shapes.items() if ".mlp." in n}
    place = "model.layers.0.mlp"
    expected = {
        **{f"{place}.{n}_proj.weight": frozenset({1}) for n in ("gate", "up")},
        f"{place}.down_proj.weight": frozenset({0}),
    }
    assert narrow.cuts(traced, place, own) == (Cuts(128, expected), Cuts(256, expected))


def test_a_stream_that_is_no_wider_is_cut_only_where_it_has_to_be() -> None:
    """256 wide: nothing is cut of few units, and of many there is nothing to fall back on but the whole."""
    for units, widths in ((256, []), (1024, [64])):
        model = llama(256, 2, units)
        traced = trace(model, synthetic(model, tokens=9))
        own = {n: tuple(p.shape) for n, p in model.named_parameters() if ".mlp." in n}
        assert [c.width for c in narrow.cuts(traced, "model.layers.0.mlp", own)] == widths


FALSE = {
    "llama": (Group(128), Group(128, isometric=True)),
    "qwen3": (Group(128), Group(128, isometric=True)),
    "olmo2": (Group(128), Group(128, isometric=True)),
    "cohere": (Group(128),),
}
"""Groups that rotary embeddings and norms of queries and keys do not allow, by family, for heads of 128."""


@pytest.mark.parametrize("name", FALSE)
def test_heads_that_are_wider_than_their_rows_are_told_apart_as_on_whole_twins(
    name: str, monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    """What does not hold is far from it: the outputs move as they do when the claim is broken on purpose."""
    model = tiny.build(name, head_dim=128, hidden_size=512, num_attention_heads=4, num_key_value_heads=4)
    batch = synthetic(model, tokens=19)
    monkeypatch.setattr(narrow, "BUDGET", 1 << 30)
    whole = found(model, batch, 1 << 30, monkeypatch)
    assert not any(t.cuts for t in twins)
    monkeypatch.setattr(narrow, "BUDGET", 1)
    assert find_symmetries(model, batch, prove=False) == whole
    twins.clear()
    traced = trace(model, batch)
    trials = probe.Trials(
        model, traced.calls, canonical_names(model), plan=lambda scope, own: narrow.cuts(traced, scope, own)
    )
    place = next(p.module for p in whole.pairs if p.kind == "vo")
    q, k = (
        View.pattern(f"{place}.{n}_proj.weight", "(n h) i", {"n": 4, "h": 128, "i": 512}, ("n",), ("h",), ("i",))
        for n in "qk"
    )
    for group in FALSE[name]:
        measured = trials.measure(Pair("", "qk", place, group, (q,), (k,)), place)
        assert measured is not None
        assert measured[0] > 0.1 * measured[1] > 0
    (twin,) = twins
    assert twin.cuts.width == narrow.FLOOR < 128


def test_a_module_is_too_large_by_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Residual(Projected())
    monkeypatch.setattr(narrow, "WIDTH", CUT)
    monkeypatch.setattr(probe, "LARGEST", 4 * CUT * 4 * HEAD + 4 * 4 * HEAD)
    assert {p.kind for p in find_symmetries(model, inputs()).pairs} == {"qk", "vo"}
    # Two heads of four: half of the rows and half of the columns.
    monkeypatch.setattr(probe, "LARGEST", WIDTH * 4 * HEAD + 2 * (WIDTH + HEAD))
    assert {p.kind for p in find_symmetries(model, inputs()).pairs} == {"qk", "vo"}
    monkeypatch.setattr(probe, "LARGEST", WIDTH * 4 * HEAD - 1)
    assert not find_symmetries(model, inputs()).pairs
