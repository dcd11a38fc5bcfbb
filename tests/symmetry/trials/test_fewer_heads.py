"""Twins with fewer heads: code that divides the width of what it reads by the number of heads, at the cost of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import KeyBias
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.pairs import Between, Pair
from hf_geosharp.symmetry.parameters import canonical_names
from hf_geosharp.symmetry.tracing.trace import trace
from hf_geosharp.symmetry.trials import narrow, probe
from hf_geosharp.symmetry.trials.fewer_heads import KEPT, FewerHeads, fewer_heads
from hf_geosharp.symmetry.trials.narrow import narrowed
from hf_geosharp.symmetry.trials.probe import LocalTwin
from hf_geosharp.symmetry.views import View
from tests.symmetry.handmade import half, interleaved
from tests.symmetry.trials.test_narrow import twins

__all__ = ["twins"]

HEADS, COORDINATES = 4, 6


class Divided(nn.Module):
    """Attention that keeps how many heads it has, and works out their size from the width of what it reads.

    ``layout`` gives the order of parts (s), heads of keys (n), and coordinates (h) among the features of one map;
    without one there are three maps. ``bend`` is done to queries, ``turn`` to queries and keys.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layout: str = "s n h",
        *,
        group: int = 1,
        turn: Callable[[Tensor], Tensor] = lambda x: x,
        bend: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        self.n_head, self.n_group, self.layout, self.turn, self.bend = heads, heads // group, layout, turn, bend
        self.sizes = (width, width // group, width // group)
        self.qkv = nn.ModuleList(nn.Linear(width, n) for n in ((sum(self.sizes),) if layout else self.sizes))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        size = width // self.n_head
        if len(self.layout.split()) == 3 and self.n_group == self.n_head:
            order = self.layout.split()
            sizes = {"s": 3, "n": self.n_head, "h": size}
            y = self.qkv[0](x).view(b, t, *(sizes[name] for name in order))
            q, k, v = y.permute(2 + order.index("s"), 0, 2 + order.index("n"), 1, 2 + order.index("h"))
        else:
            y = torch.cat([part(x) for part in self.qkv], dim=-1)
            q, k, v = (
                z.view(b, t, -1, size).transpose(1, 2)
                for z in y.split([n * width // self.sizes[0] for n in self.sizes], dim=-1)
            )
            k, v = (z.repeat_interleave(self.n_head // self.n_group, 1) for z in (k, v))
        q, k = self.turn(self.bend(q)), self.turn(k)
        y = torch.softmax(q @ k.mT / size**0.5, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, width))  # type: ignore[no-any-return]


class Torchs(nn.Module):
    """torch's own."""

    def __init__(self, width: int, heads: int, *, masked: bool = False) -> None:
        super().__init__()
        self.attention, self.masked = nn.MultiheadAttention(width, heads, batch_first=True), masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x) * self.attention.num_heads, *(2 * x.shape[1:2]), dtype=torch.bool).triu(1)
        return self.attention(x, x, x, need_weights=False, attn_mask=mask if self.masked else None)[0]  # type: ignore[no-any-return]


class Around(nn.Module):
    """A norm, attention, a residual and a head."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.head = nn.LayerNorm(width), attention, nn.Linear(width, 5)
        self.double()
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(self.norm(x)))  # type: ignore[no-any-return]


def batch(width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 9, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


CASES: dict[str, Callable[[int, int], nn.Module]] = {
    "sections": Divided,
    "head by head": lambda width, heads: Divided(width, heads, "n s h"),
    "coordinates first": lambda width, heads: Divided(width, heads, "s h n"),
    "heads first": lambda width, heads: Divided(width, heads, "n h s"),
    "three maps": lambda width, heads: Divided(width, heads, ""),
    "grouped, turned": lambda width, heads: Divided(width, heads, "s", group=2, turn=half),
    "turned": lambda width, heads: Divided(width, heads, turn=interleaved),
    "torch's": Torchs,
    "torch's, masked": lambda width, heads: Torchs(width, heads, masked=True),
}


def of_attention(twins: list[LocalTwin]) -> list[LocalTwin]:
    """Those that ran, of attention."""
    return [t for t in twins if any(".out" in n for n in t.weights) and t._bases]


def found(model: nn.Module, width: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> SymmetryMap:
    with monkeypatch.context() as patch:
        patch.setattr(narrow, "WIDTH", cut)
        return find_symmetries(model, batch(width), prove=False)


@pytest.mark.parametrize("name", CASES)
def test_two_heads_say_what_all_of_them_say(name: str, monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]) -> None:
    """The same symmetries, and twins that are as large whatever the number of heads."""
    largest = set()
    for heads in (2 * HEADS, 4 * HEADS):
        width = heads * COORDINATES
        model = Around(CASES[name](width, heads), width)
        whole = found(model, width, 1 << 30, monkeypatch)
        assert not any(t.cuts for t in twins)
        assert {p.kind for p in whole.pairs} == {"qk", "vo"}
        twins.clear()
        assert found(model, width, COORDINATES - 1, monkeypatch) == whole
        ran = of_attention(twins)
        assert {type(t.cuts) for t in ran} == {FewerHeads}
        largest |= {sum(w.numel() for w in t.weights.values()) for t in ran}
        twins.clear()
    assert len(largest) == 1


BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "bent": torch.tanh,
    "of length one": lambda q: nn.functional.normalize(q, dim=-1),
    "centred": lambda q: nn.functional.layer_norm(q, q.shape[-1:]),
}


@pytest.mark.parametrize("name", BENT)
def test_what_does_not_hold_is_decided_by_all_heads(
    name: str, monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    width = HEADS * COORDINATES
    model = Around(Divided(width, HEADS, bend=BENT[name]), width)
    whole = found(model, width, 1 << 30, monkeypatch)
    assert not any(p.kind == "qk" and not p.group.isometric for p in whole.pairs)
    twins.clear()
    assert found(model, width, COORDINATES - 1, monkeypatch) == whole
    assert {type(t.cuts) for t in of_attention(twins)} == {FewerHeads, narrow.Cuts}
    assert any(not t.cuts for t in of_attention(twins))


SIZES = {"s": 3, "n": 8, "g": 2, "h": 6, "i": 5 * 8}
FEWER = {**SIZES, "n": KEPT, "i": 5 * KEPT}


@pytest.mark.parametrize("pattern", ["(n h) i", "(h n) i", "(n g h) i", "(g n h) i", "(n h g) i", "i (n h)"])
@pytest.mark.parametrize("parts", ["", "(s {}", "({0} s", "in the middle"])
def test_the_view_is_that_of_the_pattern_with_fewer_heads(pattern: str, parts: str) -> None:
    """Whatever the order: the same pattern, with another number of heads."""
    inside = pattern[pattern.index("(") + 1 : pattern.index(")")]
    first, *rest = inside.split()
    written = {"": inside, "(s {}": f"s {inside}", "({0} s": f"{inside} s"}.get(parts, " ".join([first, "s", *rest]))
    groups = pattern.replace(inside, written)
    select = {"s": 1} if parts else {}
    rows = tuple(n for n in ("g", "i") if n in pattern)

    def view(sizes: Mapping[str, int]) -> View:
        return View.pattern("w", groups, sizes, ("n",), ("h",), rows, select=select)

    dimension = pattern.index("(") > 0
    shape = [SIZES["i"], math.prod(SIZES[n] for n in written.split())]
    own = {"w": tuple(shape if dimension else shape[::-1]), "other": (8, 3), "gain": (6,), "heads": (8,)}
    pair = Pair("", "qk", "", Group(6), (view(SIZES),), (view(SIZES),))
    cut = fewer_heads(pair, own)
    assert cut is not None
    assert cut.heads == 8
    assert cut.dimensions == {"w": frozenset({0, 1}), "other": frozenset({0}), "heads": frozenset({0})}
    assert [cut.left(n, s) for n, s in own.items()] == [math.prod(own["w"]) // 16, KEPT * 3, 6, KEPT]
    short = narrowed(pair, cut)
    assert isinstance(short, Pair)
    assert short.g == short.h == (view(FEWER),)


def pair(**sizes: int) -> Pair:
    views = (View.pattern("w", "(n h) i", {"n": 8, "h": 6, "i": 48, **sizes}, ("n",), ("h",), ("i",)),)
    return Pair("", "qk", "", Group(views[0].width), views, views)


def test_coordinates_are_no_heads() -> None:
    """Two of the coordinates of a norm are a sign, of which nothing can be told."""
    assert fewer_heads(pair(), {"w": (48, 48)}) is not None
    assert fewer_heads(pair(h=1), {"w": (8, 48)}) is None
    assert fewer_heads(pair(n=2), {"w": (12, 48)}) is None
    assert fewer_heads(pair(n=6), {"w": (36, 48)}) is None
    frequencies = View.pattern("w", "(f c) i", {"f": 8, "c": 2, "i": 48}, ("f",), (), ("i",))
    turned = Pair("", "qk", "", Group(1, complex=True), (frequencies,), (frequencies,))
    assert fewer_heads(turned, {"w": (16, 48)}) is None


def test_a_part_of_a_head_is_no_head() -> None:
    """Features that begin within a head, and rows that are not all of a dimension, are not followed."""
    own = {"w": (3 * 48, 48)}
    cut = fewer_heads(pair(), own)
    assert cut is not None
    (view,) = pair().g
    assert cut.view(view) is not None
    moved = View(view.parameter, view.axes, (48 + 6, 0), view.copies, view.dim, view.rows)
    assert cut.view(moved) is None
    moved = View(view.parameter, view.axes, (48 + 5, 0), view.copies, view.dim, view.rows)
    assert cut.view(moved) is not None
    moved = View(view.parameter, view.axes, (0, 8), view.copies, view.dim, view.rows)
    assert cut.view(moved) is None


def test_other_symmetries_are_followed_too() -> None:
    own = {"w": (48, 48), "b": (48,), "gain": (48,), "out": (48, 48)}
    (weight,) = pair().g
    bias = View.pattern("b", "(n h)", {"n": 8, "h": 6}, ("n",), ("h",), ())
    fold = KeyBias("", "", bias, weight)
    cut = fewer_heads(fold, own)
    assert cut is not None
    short = narrowed(fold, cut)
    assert isinstance(short, KeyBias)
    assert short.bias.shape() == [KEPT, 6]
    between = Between("gain", "out", 1)
    assert cut.between(between) is between
    assert cut.numbers == {8: KEPT, 48: KEPT * 6}


def test_arguments_with_heads_are_cut() -> None:
    cut = fewer_heads(pair(), {"w": (48, 48)})
    assert cut is not None
    flat = torch.arange(16.0).view(16, 1, 1).expand(16, 9, 9)
    given = (torch.zeros(2, 9, 48), torch.zeros(2, 8, 9, 9, dtype=torch.bool), flat, torch.zeros(8, 9, 48), 8)
    x, mask, both, samples, number = cut.shortened((*given[:3], {"x": given[3]}, given[4]), {})
    assert [t.shape for t in (x, mask, both)] == [(2, 9, 12), (2, KEPT, 9, 9), (2 * KEPT, 9, 9)]
    assert both[:, 0, 0].tolist() == [0, 1, 8, 9]
    assert samples["x"].shape == (8, 9, 12)
    assert number == 8


def test_statistics_of_features_are_cut() -> None:
    """Those of batch norms, which are no parameters."""
    cut = fewer_heads(pair(), {"w": (48, 48)})
    assert cut is not None
    module, twin = nn.BatchNorm1d(48), nn.BatchNorm1d(48)
    cut.tell(module, twin, {})
    assert twin.num_features == 12
    assert {n: tuple(b.shape) for n, b in twin.named_buffers()} == {
        "running_mean": (12,), "running_var": (12,), "num_batches_tracked": ()
    }  # fmt: skip
    assert len(module.running_mean) == 48


def test_a_claim_that_moves_more_than_a_module_is_tried_around_it_at_once(
    monkeypatch: pytest.MonkeyPatch, twins: list[LocalTwin]
) -> None:
    """No copy is made of a module that does not have all the parameters."""
    width = HEADS * COORDINATES
    model = Around(Divided(width, HEADS, ""), width)
    symmetries = found(model, width, 1 << 30, monkeypatch)
    twins.clear()
    (vo,) = (p for p in symmetries.pairs if p.kind == "vo")
    traced = trace(model, batch(width))
    trials = probe.Trials(model, {**traced.calls, "attention.out": traced.calls[""]}, canonical_names(model))
    assert trials.measure(vo, "attention.out") is not None
    assert [set(t.weights) for t in twins] == [{n for n, _ in model.named_parameters() if n.startswith("attention.")}]
