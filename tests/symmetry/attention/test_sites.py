"""Sites of attention in every layout: what is found on hand-made modules, against groups worked out by hand.

Each claim is also moved far along its orbit: outputs must stay to rounding, and must not when it is broken on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from hf_geosharp.symmetry import SymmetryMap, View, find_symmetries
from hf_geosharp.symmetry.attention.feature_views import _nested, _regular
from hf_geosharp.symmetry.overlooked import HIDDEN
from hf_geosharp.symmetry.verify import verify
from tests.families import randomise
from tests.symmetry.handmade import (
    HEAD,
    TOKENS,
    WIDTH,
    Applied,
    Assembled,
    Chain,
    Chunked,
    Copied,
    Core,
    Differential,
    Fused,
    Grouped,
    Handed,
    Joint,
    Latent,
    Mlp,
    Pointwise,
    Prepared,
    Projected,
    Residual,
    Separate,
    SubNormed,
    Torch,
    Unequal,
    Whole,
    Written,
    attend,
    change,
    finder,
    half,
    inputs,
    interleaved,
    joined,
    outputs,
    plain,
    relative,
    repeated,
    split,
)
from tests.versions import TORCH, needs_sampling

EXACT = 1e-11
"""Relative change of the outputs of a true symmetry in float64, moved by elements of condition 100."""

BIASES = {"key_bias": 4 * HEAD, "value_bias": 4 * HEAD}


@dataclass(frozen=True)
class Site:
    """A module with attention in it and what it allows.

    Attributes:
        module: makes it.
        qk, vo: names of groups -> copies.
        folds: kinds -> dimension.
        named: sides of attention that are not understood and have to be named ("qk", "vo").
    """

    module: Callable[[], nn.Module]
    qk: Mapping[str, int] = field(default_factory=lambda: {f"GL({HEAD})": 4})
    vo: Mapping[str, int] = field(default_factory=lambda: {f"GL({HEAD})": 4})
    folds: Mapping[str, int] = field(default_factory=lambda: BIASES)
    named: tuple[str, ...] = ()


def of(core: Core = plain, **options: object) -> Callable[[], nn.Module]:
    return lambda: Projected(core, **options)  # type: ignore[arg-type]


NONE: dict[str, int] = {}
ONE = {f"GL({HEAD})": 1}
TWO = {f"GL({HEAD})": 2}
VALUE_BIAS = {"value_bias": 4 * HEAD}
KEY_BIAS = {"key_bias": 4 * HEAD}
WITH_TABLES = {**BIASES, "written_mean": 4 * HEAD}
"""Where queries meet a table of each head: what all of its rows have in common is added to all logits of a row."""
TURNED = {"GL(1,C)": 4 * HEAD // 2}
ROTATED = {f"O({HEAD})": 4}
CENTRED = {f"O({HEAD}) fixing 1": 4}
SUB_NORMED = {**KEY_BIAS, "norm_gain": 4 * HEAD}


# ------------------------------------------------------------------------------------------------------------ layouts


class Twice(Projected):
    """What attention mixes is read by one more map, which is bent."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = attend(*(split(p(x), 4) for p in (self.q, self.k, self.v)))
        return self.o(mixed) + torch.tanh(self.second(mixed))  # type: ignore[no-any-return]


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)


LAYOUTS = {
    "weights handed on with their biases copied into one": Site(Handed),
    "fused, the bias put together of two and zeros": Site(Assembled, folds=VALUE_BIAS),
    "separate": Site(of()),
    "separate, no biases": Site(of(bias=False, out_bias=False), folds=NONE),
    "separate, no output bias": Site(of(out_bias=False), folds=KEY_BIAS),
    "fused, parts outermost": Site(lambda: Fused("s n h")),
    "fused, parts outermost, values before keys": Site(lambda: Fused("s n h", parts="qvk")),
    "fused per head": Site(lambda: Fused("n s h")),
    "fused per coordinate": Site(lambda: Fused("n h s")),
    "fused, heads innermost": Site(lambda: Fused("s h n")),
    "fused, coordinates outermost": Site(lambda: Fused("h s n")),
    "fused in shards": Site(lambda: Fused("p s w h")),
    "fused in shards, values before keys": Site(lambda: Fused("p s w h", parts="qvk")),
    "fused, bias added afterwards": Site(lambda: Fused("s n h", bias="after")),
    "fused, no bias": Site(lambda: Fused("s n h", bias=""), folds=NONE),
    "transposed, parts outermost": Site(lambda: Fused("s n h", transposed=True)),
    "transposed per head": Site(lambda: Fused("n s h", transposed=True)),
    "transposed in shards": Site(lambda: Fused("p s w h", transposed=True)),
    "fused per group of queries": Site(Grouped, TWO, TWO, {"key_bias": 2 * HEAD, "value_bias": 2 * HEAD}),
    "fused, one key head": Site(lambda: Grouped(1, 4), ONE, ONE, {"key_bias": HEAD, "value_bias": HEAD}),
    "grouped queries": Site(of(key_heads=2), TWO, TWO, {"key_bias": 2 * HEAD, "value_bias": 2 * HEAD}),
    "one key head": Site(of(key_heads=1), ONE, ONE, {"key_bias": HEAD, "value_bias": HEAD}),
    "one head": Site(of(heads=1), ONE, ONE, {"key_bias": HEAD, "value_bias": HEAD}),
    "heads of one coordinate": Site(
        of(heads=5, head=1), {"GL(1)": 5}, {"GL(1)": 5}, {"key_bias": 5, "value_bias": 5}
    ),
    "queries wider than the hidden size": Site(
        of(heads=2, head=40), {"GL(40)": 2}, {"GL(40)": 2}, {"key_bias": 80, "value_bias": 80}
    ),
    "values wider than keys": Site(of(value=9), vo={"GL(9)": 4}, folds={"key_bias": 4 * HEAD, "value_bias": 36}),
    "a module for each head": Site(lambda: Separate([HEAD] * 4)),
    "heads that differ, a module for each": Site(
        lambda: Separate([3, 5, 2]), {"GL(3)": 1, "GL(5)": 1, "GL(2)": 1}, {"GL(3)": 1, "GL(5)": 1, "GL(2)": 1},
        {"key_bias": 10, "value_bias": 10},
    ),
    "heads that differ in one projection": Site(
        lambda: Unequal([3, 5, 5, 2]), {"GL(3)": 1, "GL(5)": 2, "GL(2)": 1}, {"GL(3)": 1, "GL(5)": 2, "GL(2)": 1},
        {"key_bias": 15, "value_bias": 15},
    ),
    "einsum, heads outermost": Site(lambda: Written("nih", "nhi"), folds=NONE),
    "einsum, inputs outermost": Site(lambda: Written("inh", "inh"), folds=NONE),
    "einsum, coordinates outermost": Site(lambda: Written("hin", "ihn"), folds=NONE),
    "einsum with an ellipsis": Site(
        lambda: Applied(lambda x, w: torch.einsum("...i,nhi->...nh", x, w).transpose(1, 2)), folds=NONE
    ),
    "einsum with an ellipsis on both sides": Site(
        lambda: Applied(lambda x, w: torch.einsum("...i,...nhi->...nh", x, w).transpose(1, 2)), folds=NONE
    ),
    "einsum without a result": Site(
        lambda: Applied(lambda x, w: torch.einsum("bti,yzi", x, w).permute(0, 2, 1, 3)), folds=NONE
    ),
    "a matrix of each head": Site(lambda: Applied(lambda x, w: x[:, None] @ w.mT), folds=NONE),
    "a matrix of each head, added to zeros": Site(
        lambda: Applied(
            lambda x, w: torch.stack(
                [torch.baddbmm(x.new_zeros(1, 1, HEAD), x, own.T.expand(len(x), -1, -1)) for own in w], 1
            )
        ),
        folds=NONE,
    ),
    "matrices on the left": Site(lambda: Applied(lambda x, w: (w @ x.mT[:, None]).mT), folds=NONE),
    "one matrix on the left": Site(
        lambda: Applied(lambda x, w: (w.flatten(0, 1) @ x.mT).unflatten(1, (4, HEAD)).mT), folds=NONE
    ),
    "tensordot": Site(
        lambda: Applied(lambda x, w: torch.tensordot(x, w, ([2], [2])).transpose(1, 2)), folds=NONE
    ),
    "inner products": Site(lambda: Applied(lambda x, w: torch.inner(x, w).transpose(1, 2)), folds=NONE),
    "pointwise convolutions": Site(Pointwise),
    "pointwise convolutions of images": Site(lambda: Pointwise(2)),
    "grouped convolutions, a group for two heads": Site(lambda: Pointwise(groups=2)),
    "grouped convolutions, a group for each head": Site(lambda: Pointwise(groups=4)),
    "nn.MultiheadAttention": Site(Torch),
    "nn.MultiheadAttention, weights asked for": Site(lambda: Torch(weights=True)),
    "nn.MultiheadAttention, crossed": Site(lambda: Torch(cross=True)),
    "nn.MultiheadAttention, narrower keys and values": Site(lambda: Torch(cross=True, kdim=10, vdim=12)),
    "nn.MultiheadAttention, no bias": Site(lambda: Torch(bias=False), folds=NONE),
    # The one more is a parameter, which can be shifted along with the bias.
    "nn.MultiheadAttention, one more key": Site(lambda: Torch(add_bias_kv=True)),
    "nn.MultiheadAttention, one more zero": Site(lambda: Torch(add_zero_attn=True), folds=NONE),
    "one parameter in chunks": Site(Chunked),
    # All keys of a query may be shifted at once, and all values: of the biases of the streams one is nothing.
    "two streams that attend to each other": Site(Joint),
    "two streams that attend to each other, one of them read": Site(lambda: Joint(both=False)),
    "two streams that attend to each other, without biases": Site(lambda: Joint(bias=False), folds=NONE),
    "two streams that attend to each other, one of them read, without biases": Site(
        lambda: Joint(bias=False, both=False), folds=NONE
    ),
    "values that two maps read": Site(Twice),
    "two streams that attend to each other, queries and keys of length one": Site(
        lambda: Joint(_unit, bias=False), ROTATED, folds=NONE
    ),
    "two streams that attend to each other, rotary": Site(lambda: Joint(half, bias=False), TURNED, folds=NONE),
    "two streams that attend to each other, of length one, then rotary": Site(
        lambda: Joint(lambda x: half(_unit(x)), bias=False), {"U(1)": 12}, folds=NONE
    ),
    "keys and values of a latent": Site(Latent, folds=NONE),
    # Neither keys nor values have biases, which only values would need.
    "keys and values of a latent with a norm": Site(
        lambda: Latent(norm=True), folds={"norm_gain": 8, "read_mean": 4 * HEAD, "written_mean": WIDTH + 1}
    ),
}  # fmt: skip

# ----------------------------------------------------------------------------------- weights that are made beforehand


def _through(change: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """The weights of queries, keys and values are changed one by one."""
    return lambda: Prepared(lambda m, x: [functional.linear(x, change(p.weight), p.bias) for p in (m.q, m.k, m.v)])


def _together(m: Prepared, x: Tensor) -> Sequence[Tensor]:
    """One product for all three, in another order."""
    maps = (m.k, m.q, m.v)
    k, q, v = functional.linear(x, torch.cat([p.weight for p in maps]), torch.cat([p.bias for p in maps])).chunk(3, -1)
    return q, k, v


def _shards(m: Prepared, x: Tensor) -> Sequence[Tensor]:
    """A part of each, and then the rest of each."""
    maps = (m.q, m.k, m.v)
    cut = [torch.cat([w[: 2 * HEAD] for w in own] + [w[2 * HEAD :] for w in own]) for own in _own(maps)]
    first = functional.linear(x, *cut).unflatten(-1, (2, 3, -1))
    return first.transpose(-2, -3).flatten(-2).unbind(-2)


def _own(maps: Sequence[nn.Linear]) -> list[list[Tensor]]:
    return [[p.weight for p in maps], [p.bias for p in maps]]


def _updated(change: Callable[[Tensor, Tensor], Tensor], transposed: bool = False) -> Callable[[], nn.Module]:
    """An update of low rank of the queries' matrix; ``change`` puts it together with the matrix."""

    def project(m: Prepared, x: Tensor) -> Sequence[Tensor]:
        if transposed:
            weight = change(m.q.weight.T, m.a.T @ m.b.T)
            return x @ weight + m.q.bias, m.k(x), m.v(x)
        return functional.linear(x, change(m.q.weight, m.b @ m.a), m.q.bias), m.k(x), m.v(x)

    return lambda: Prepared(project, a=(3, WIDTH), b=(4 * HEAD, 3))


def _pruned() -> nn.Module:
    """A third of the entries of queries, keys and values are masked."""
    module = Projected().double()
    for seed, part in enumerate((module.q, module.k, module.v)):
        scores = torch.rand(part.weight.shape, generator=torch.Generator().manual_seed(seed))
        prune.l1_unstructured(part, "weight", 0.3, importance_scores=scores)
    return module


APART = {"GL(1)": 4 * HEAD}

MADE = {
    "weights copied": Site(_through(torch.clone)),
    "weights in single precision": Site(_through(lambda w: w.float().to(w.dtype))),
    "weights times a number": Site(_through(lambda w: 0.3 * w)),
    "weights over a number": Site(_through(lambda w: w / torch.tensor(5.0))),
    "weights copied time and again": Site(_through(lambda w: (-w.clone()).contiguous() * 2)),
    "weights turned in memory": Site(_through(lambda w: w.T.clone().T)),
    "weights and biases put together": Site(lambda: Prepared(_together)),
    "weights put together in shards": Site(lambda: Prepared(_shards)),
    "weights put side by side": Site(
        lambda: Prepared(
            lambda m, x: (x @ torch.cat([p.weight.T for p in (m.q, m.k, m.v)], 1)).chunk(3, -1), bias=False
        ),
        folds=NONE,
    ),
    "weights stacked": Site(
        lambda: Prepared(
            lambda m, x: torch.einsum("bti,soi->sbto", x, torch.stack([p.weight for p in (m.q, m.k, m.v)])).unbind(),
            bias=False,
        ),
        folds=NONE,
    ),
    "weights once for each sample": Site(
        lambda: Prepared(
            lambda m, x: [torch.bmm(x, p.weight.T.repeat(len(x), 1, 1)) for p in (m.q, m.k, m.v)], bias=False
        ),
        folds=NONE,
    ),
    "weights once for each query of a key": Site(
        lambda: Prepared(
            lambda m, x: [
                m.q(x),
                *(
                    functional.linear(x, p.weight.unflatten(0, (2, HEAD)).repeat_interleave(2, 0).flatten(0, 1))
                    for p in (m.k, m.v)
                ),
            ],
            key_heads=2,
            bias=False,
        ),
        TWO, TWO, NONE,
    ),
    "weights rearranged in memory": Site(Copied, folds=NONE),
    "weights rearranged in another way": Site(
        lambda: Prepared(
            lambda m, x: [
                functional.linear(x, p.weight.unflatten(0, (HEAD, 4)).transpose(0, 1).reshape(-1, WIDTH), p.bias)
                for p in (m.q, m.k, m.v)
            ]
        ),
    ),
    "weights with a mask": Site(_pruned, APART, APART),
    "weights with an update of low rank": Site(_updated(torch.add)),
    "weights with an update of low rank, times a number": Site(_updated(lambda w, u: w + 0.5 * u)),
    "weights less an update of low rank, in another precision": Site(
        _updated(lambda w, u: (w - u / 2).float().to(w.dtype))
    ),
    "weights with an update of low rank, transposed": Site(_updated(torch.add, True)),
    "matrices that are copied": Site(
        lambda: Applied(lambda x, w: torch.einsum("bti,nhi->bnth", x, w.clone())), folds=NONE
    ),
    "matrices times a number": Site(
        lambda: Applied(lambda x, w: torch.einsum("bti,nhi->bnth", x, 0.7 * w)), folds=NONE
    ),
}  # fmt: skip
"""What is made of parameters entry by entry, or as a sum or a product of them, is one of them as far as heads go."""

# -------------------------------------------------------------------------------------- what happens to q, k and v


def _sdpa(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options: dict[str, Any] = {"enable_gqa": True} if TORCH >= (2, 5) else {}
    if not options:
        k, v = repeated(m, k), repeated(m, v)
    return joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, **options))


def _sdpa_masked(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]).abs() < 4
    return joined(functional.scaled_dot_product_attention(q, k, v, attn_mask=near))


def _unrepeated(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bngtd,bnsd->bngts", q.unflatten(1, (m.key_heads, -1)), k).softmax(-1)
    return torch.einsum("bngts,bnsd->btngd", weights, v).flatten(2)


def _tiled(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def _turned(rotary: Callable[[Tensor], Tensor], share: int = HEAD) -> Core:
    def turn(x: Tensor) -> Tensor:
        return torch.cat([rotary(x[..., :share]), x[..., share:]], dim=-1)

    return lambda m, x, q, k, v: attend(turn(q), repeated(m, turn(k)), repeated(m, v))


def _across(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries' frequencies are halves, keys' are neighbours."""
    return attend(half(q), half(k.unflatten(-1, (-1, 2)).mT.flatten(-2)), v)


def _mirrored(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both imaginary parts come first."""
    return attend(half(q.flip(-1)), half(k.flip(-1)), v)


def _some_frequencies(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Halves are paired over the whole head of 8, but the last two frequencies are zero."""

    def turn(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (2, -1)).mT
        angles = torch.arange(TOKENS, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3, 0.0, 0.0], dtype=x.dtype)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).mT.flatten(-2)

    return attend(turn(q), turn(k), v)


def _decomposed(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q . R, the table shared by the heads."""
    return attend(q, k, v, torch.einsum("bntd,tsd->bnts", q, relative(m.table)))


def _tables_of_heads(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = relative(m.table).unflatten(-1, (4, HEAD))
    return attend(q, k, v, torch.einsum("bntd,tsnd->bnts", q, table))


def _both_tables(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    more = torch.einsum("bntd,tsd->bnts", q, relative(m.table)) + torch.einsum("bnsd,tsd->bnts", k, relative(m.other))
    return attend(q, k, v, more)


def _values_table(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, dim=-1)
    return joined(weights @ v + torch.einsum("bnts,tsd->bntd", weights, relative(m.table)))


def _positions_through_both(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Places go through the same projections as tokens; a key meets another place for each query."""
    place_q, place_k = split(m.q(m.positions)[None], 4), split(m.k(m.positions)[None], 4)
    at = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)) % TOKENS
    return attend(q, k, v, q @ place_k.mT + torch.einsum("bnsd,ntsd->bnts", k, place_q[0][:, at]))


def _positions_through_keys(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, q @ split(m.k(m.positions)[None], 4).mT)


def _two_queries(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query biases for content and place, and a projection of places of its own."""
    places = split(functional.linear(m.positions, m.places)[None], 4)
    logits = (q + m.content[:, None]) @ k.mT + (q + m.place[:, None]) @ places.mT
    return joined(torch.softmax(logits, dim=-1) @ v)


def _sinks(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One more logit for each head whose weight goes nowhere."""
    logits = torch.cat([q @ k.mT, m.sink.view(1, 4, 1, 1).expand(x.shape[0], 4, TOKENS, 1)], dim=-1)
    return joined(torch.softmax(logits, dim=-1)[..., :-1] @ v)


def _softcap(core: Callable[[Tensor], Tensor] = lambda x: x) -> Core:
    def capped(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joined(torch.softmax(3 * torch.tanh(core(q) @ core(k).mT / 3), dim=-1) @ v)

    return capped


def _stabilised(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Logits less the largest one of all heads, and then less that of each query: a softmax feels neither."""
    logits = q @ k.mT
    logits = (logits - logits.max()).clamp(min=-50000)
    return joined(torch.softmax(logits - torch.max(logits, dim=-1, keepdim=True)[0], dim=-1) @ v)


def _pooled(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query for all, which is a parameter."""
    return joined((torch.softmax(m.query @ k.mT, dim=-1) @ v).expand_as(v))


def _padded(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three keys of nothing come before those of tokens."""
    k, v = (functional.pad(t, (0, 0, 3, 0)) for t in (k, v))
    return attend(q, k, v)


def _blocks(size: int, *, causal: bool) -> Core:
    """Each token attends to those of its own block, of ``size`` tokens."""

    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        seen = at[:, None] // size == at // size
        seen = seen & (at <= at[:, None]) if causal else seen
        return joined((q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ v)

    return core


def _distances(table: Tensor) -> Tensor:
    """(queries, heads, keys) out of a row for each distance."""
    at = torch.arange(TOKENS)
    return table[at[:, None] - at + TOKENS - 1].transpose(1, 2)


CORES = {
    "a learned query": Site(of(_pooled, query=(4, 1, HEAD))),
    "keys before the first are padding": Site(of(_padded), folds=NONE),
    **{
        f"blocks of {size}{', causal' * causal}, the last of one token": Site(of(_blocks(size, causal=causal)))
        for size in (2, 3, 6) for causal in (False, True)
    },
    "scaled_dot_product_attention": Site(
        of(_sdpa, key_heads=2), TWO, TWO, {"key_bias": 2 * HEAD, "value_bias": 2 * HEAD}
    ),
    "scaled_dot_product_attention, masked": Site(of(_sdpa_masked)),
    "grouped queries, keys not repeated": Site(
        of(_unrepeated, key_heads=2), TWO, TWO, {"key_bias": 2 * HEAD, "value_bias": 2 * HEAD}
    ),
    "grouped queries, keys tiled": Site(
        of(_tiled, key_heads=2), TWO, TWO, {"key_bias": 2 * HEAD, "value_bias": 2 * HEAD}
    ),
    "rotary, halves": Site(of(_turned(half)), TURNED, folds=VALUE_BIAS),
    "rotary, neighbours": Site(of(_turned(interleaved)), TURNED, folds=VALUE_BIAS),
    "rotary, grouped queries": Site(
        of(_turned(half), key_heads=2), {"GL(1,C)": HEAD}, TWO, {"value_bias": 2 * HEAD}
    ),
    "rotary, one key head": Site(of(_turned(half), key_heads=1), {"GL(1,C)": 3}, ONE, {"value_bias": HEAD}),
    "rotary on a part, halves": Site(
        of(_turned(half, 4)), {"GL(1,C)": 8, "GL(2)": 4}, folds={"key_bias": 8, "value_bias": 4 * HEAD}
    ),
    "rotary on a part, neighbours": Site(
        of(_turned(interleaved, 2)), {"GL(1,C)": 4, "GL(4)": 4}, folds={"key_bias": 16, "value_bias": 4 * HEAD}
    ),
    "rotary, queries in halves and keys in neighbours": Site(of(_across), TURNED, folds=VALUE_BIAS),
    "rotary, imaginary parts first": Site(of(_mirrored), TURNED, folds=VALUE_BIAS),
    "rotary, some frequencies zero": Site(
        of(_some_frequencies, head=8), {"GL(1,C)": 8, "GL(4)": 4}, {"GL(8)": 4}, {"key_bias": 16, "value_bias": 32}
    ),
    "relative positions, one table for all heads": Site(
        of(_decomposed, table=(2 * TOKENS - 1, HEAD)), ONE,
        folds={"key_bias": HEAD, "value_bias": 4 * HEAD, "written_mean": HEAD},
    ),
    "relative positions, a table for each head": Site(
        of(_tables_of_heads, table=(2 * TOKENS - 1, 4 * HEAD)), folds=WITH_TABLES
    ),
    "relative positions of queries and keys": Site(
        of(_both_tables, table=(2 * TOKENS - 1, HEAD), other=(2 * TOKENS - 1, HEAD)), ONE,
        folds={**VALUE_BIAS, "written_mean": HEAD},
    ),
    "relative positions of values": Site(
        of(_values_table, table=(2 * TOKENS - 1, HEAD)), vo=ONE, folds={"key_bias": 4 * HEAD, "value_bias": HEAD}
    ),
    "positions through queries and keys": Site(of(_positions_through_both), folds=VALUE_BIAS),
    "positions through keys": Site(of(_positions_through_keys)),
    # Queries meet a table of each head, and weights one of values: no linear maps, though they are written like some.
    "tables of positions of each head": Site(
        of(lambda m, x, q, k, v: attend(q, k, v, torch.einsum("bntd,nsd->bnts", q, m.table)), table=(4, TOKENS, HEAD)),
        folds=WITH_TABLES,
    ),
    "tables of positions of each head, multiplied": Site(
        of(lambda m, x, q, k, v: attend(q, k, v, q @ m.table.mT), table=(4, TOKENS, HEAD)), folds=WITH_TABLES
    ),
    "tables of positions of each head, on the left": Site(
        of(lambda m, x, q, k, v: attend(q, k, v, (m.table @ q.mT).mT), table=(4, TOKENS, HEAD)), folds=WITH_TABLES
    ),
    "a learned query on the left of all keys": Site(
        of(lambda m, x, q, k, v: joined(torch.softmax(m.query @ k.mT, -1) @ v + 0 * q), query=(4, 1, HEAD)),
    ),
    # A few keys and values made of those of all tokens: their biases are not the same for all of them.
    "tokens mapped to a few": Site(
        of(lambda m, x, q, k, v: attend(q, m.first @ k, m.second @ v), first=(4, TOKENS), second=(4, TOKENS)),
        folds={"written_mean": TOKENS},
    ),
    "tokens of each head mapped to a few": Site(
        of(
            lambda m, x, q, k, v: attend(
                q, torch.einsum("nrs,bnsd->bnrd", m.first, k), torch.einsum("nrs,bnsd->bnrd", m.second, v)
            ),
            first=(4, 4, TOKENS), second=(4, 4, TOKENS),
        ),
        folds={"written_mean": 4 * TOKENS},
    ),
    "two biases of queries": Site(
        of(_two_queries, places=(4 * HEAD, WIDTH), content=(4, HEAD), place=(4, HEAD))
    ),
    "a sink in each head": Site(of(_sinks, sink=(4,)), folds=NONE),
    "logits less the largest": Site(of(_stabilised)),
    "capped logits": Site(of(_softcap()), folds=VALUE_BIAS),
    "capped logits, rotary": Site(of(_softcap(half)), TURNED, folds=VALUE_BIAS),
    "inactive clamps": Site(
        of(lambda m, x, q, k, v: attend(q.clamp(-99, 99), k.clamp(-99, 99), v.clamp(-99, 99)))
    ),
    "queries and keys of length one": Site(
        of(lambda m, x, q, k, v: attend(_unit(q), _unit(k), v)), {f"O({HEAD})": 4}, folds=VALUE_BIAS
    ),
    "queries of length one": Site(of(lambda m, x, q, k, v: attend(_unit(q), k, v)), {f"O({HEAD})": 4}),
    "values of length one": Site(
        of(lambda m, x, q, k, v: attend(q, k, _unit(v))), vo={f"O({HEAD})": 4}, folds=KEY_BIAS
    ),
    "rotary, then length one": Site(
        of(lambda m, x, q, k, v: attend(_unit(half(q)), _unit(half(k)), v)), {"U(1)": 12}, folds=VALUE_BIAS
    ),
    "length one, then rotary, neighbours": Site(
        of(lambda m, x, q, k, v: attend(interleaved(_unit(q)), interleaved(_unit(k)), v)), {"U(1)": 12},
        folds=VALUE_BIAS,
    ),
    "heads that lie between queries and keys": Site(
        of(
            lambda m, x, q, k, v: torch.einsum(
                "bqns,bnsh->bqnh", torch.einsum("bnqh,bnsh->bqns", q, k).softmax(-1), v
            ).flatten(2)
        )
    ),
    "one head that lies between queries and keys": Site(
        of(
            lambda m, x, q, k, v: torch.einsum(
                "bqns,bnsh->bqnh", torch.einsum("bnqh,bnsh->bqns", q, k).softmax(-1), v
            ).flatten(2),
            heads=1,
        ),
        ONE, ONE, {"key_bias": HEAD, "value_bias": HEAD},
    ),
    "heads that lie between queries and keys, tables of relative positions": Site(
        of(
            lambda m, x, q, k, v: torch.einsum(
                "bqns,bnsh->bqnh",
                (torch.einsum("bnqh,bnsh->bqns", q, k) + _distances(m.table)).softmax(-1),
                v,
            ).flatten(2),
            table=(2 * TOKENS - 1, 4),
        ),
        folds={**BIASES, "written_mean": 4},
    ),
    "a gate for each entry": Site(
        of(lambda m, x, q, k, v: attend(q, k, v) * torch.sigmoid(x @ m.gate), gate=(WIDTH, 4 * HEAD)),
        vo={"GL(1)": 24}, folds=KEY_BIAS,
    ),
    "a gate for each entry, with a number for each head": Site(
        of(
            lambda m, x, q, k, v: attend(q, k, v) * torch.sigmoid(x @ m.gate + m.shift.repeat_interleave(HEAD)),
            gate=(WIDTH, 4 * HEAD), shift=(4,),
        ),
        vo={"GL(1)": 24}, folds=KEY_BIAS,
    ),
    "a gate for each head": Site(
        of(
            lambda m, x, q, k, v: joined(
                torch.softmax(q @ k.mT, dim=-1) @ v * torch.sigmoid(x @ m.gate).mT.unsqueeze(-1)
            ),
            gate=(WIDTH, 4),
        ),
        folds=KEY_BIAS,
    ),
    "a number for each head's queries": Site(
        of(lambda m, x, q, k, v: attend(q * functional.softplus(m.factor).view(4, 1, 1), k, v), factor=(4,))
    ),
    # The larger one stays the larger one under positive numbers alone.
    "the larger of two queries": Site(
        of(lambda m, x, q, k, v: attend(torch.maximum(q, q.roll(1, 2)), k, v)), {"GL(1)+": 24}
    ),
    # What is normalised together is no pair; the coordinates beside it are.
    "heads normalised in part": Site(
        of(lambda m, x, q, k, v: attend(_normalised(q, 2), _normalised(k, 2), v)), {"GL(2)": 4},
        folds={"key_bias": 8, "value_bias": 4 * HEAD}, named=("qk",),
    ),
    "queries that go through a convolution": Site(
        of(
            lambda m, x, q, k, v: attend(
                split(functional.conv1d(joined(q).mT, m.kernel, padding=1, groups=24).mT, 4), k, v
            ),
            kernel=(24, 1, 3),
        ),
        {"GL(1)": 24},
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------- other weights than a softmax's


class Alone(torch.autograd.Function):
    """A softmax whose workings do not show."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        y = torch.softmax(logits, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


def _weights(make: Callable[[Tensor], Tensor], turn: Callable[[Tensor], Tensor] = lambda x: x) -> Core:
    """Weights made of the logits by other means; ``turn`` acts on queries and keys."""
    return lambda m, x, q, k, v: joined(make(turn(q) @ repeated(m, turn(k)).mT) @ repeated(m, v))


def _shares(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _masked(logits: Tensor) -> Tensor:
    return _shares(torch.exp(logits - logits.amax(-1, keepdim=True)) * torch.ones_like(logits).tril())


def _late(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values are mixed before anything is divided by the sum."""
    weights = (q @ k.mT).exp()
    return joined(torch.einsum("bnts,bnsh->bnth", weights, v) / weights.sum(-1, keepdim=True))


def _by_einsum(x: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bnts,nm->bmts", x, mix)


def _by_convolution(x: Tensor, mix: Tensor) -> Tensor:
    return functional.conv2d(x, mix)


def _by_linear(x: Tensor, mix: Tensor) -> Tensor:
    return functional.linear(x.permute(0, 2, 3, 1), mix).permute(0, 3, 1, 2)


def _mixed_heads(where: str, mix: Callable[[Tensor, Tensor], Tensor] = _by_einsum) -> Core:
    """Talking heads: logits of all heads mixed before the softmax, weights after it, and normalised."""

    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT / 2
        weights = torch.softmax(mix(logits, m.mix) if "before" in where else logits, dim=-1)
        weights = mix(weights, m.mix) if "after" in where else weights
        if "norm" in where:
            weights = functional.layer_norm(weights.movedim(1, -1), (4,), m.gain).movedim(-1, 1)
        return joined(weights @ v)

    return core


def _windows(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees the keys of its window and of the one before, up to three places back: few see the first."""
    size, rest = 3, x.shape[1] % 3
    q, k, v = (t[..., rest:, :].unflatten(-2, (-1, size)) for t in (q, k, v))
    k, v = (torch.cat([functional.pad(t, (0, 0, 0, 0, 1, -1)), t], -2) for t in (k, v))
    at = torch.arange(q.shape[2] * size).view(-1, size)
    key_at = torch.cat([functional.pad(at, (0, 0, 1, -1), value=-1), at], -1)[:, None]
    hidden = (key_at > at[..., None]) | (at[..., None] > key_at + size) | (key_at < 0)
    weights = torch.softmax((q @ k.mT).masked_fill(hidden, -1e30), -1)
    return functional.pad(joined((weights @ v).flatten(2, 3)), (0, 0, rest, 0))


def _learned_decay(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The older a key is the less it counts, in each head by a factor of its own."""
    at = torch.arange(TOKENS)
    age = (at[:, None] - at).clamp_min(0)
    return joined((q @ k.mT * (torch.sigmoid(m.decay) ** age).tril()) @ v)


def _decaying(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The older a key is the less it counts; no function of the logits is taken."""
    at = torch.arange(TOKENS)
    return joined((half(q) @ half(k).mT * (0.9 ** (at[:, None] - at)).tril().to(x.dtype)) @ v)


def _linear(bend: Callable[[Tensor], Tensor], *, shares: bool = False) -> Core:
    """Queries and keys are bent each by itself, so that keys can meet values first."""

    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = bend(q), bend(repeated(m, k)), repeated(m, v)
        y = q @ (k.mT @ v)
        return joined(y / (q @ k.sum(-2, keepdim=True).mT) if shares else y)

    return core


def _linear_of_shares(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the sum is divided by, which heads cannot be told apart in, is computed before anything meets values."""
    q, k = _elu(q), _elu(k)
    shares = 1 / torch.einsum("bnth,bnh->bnt", q, k.sum(-2))
    context = torch.einsum("bnsh,bnse->bnhe", k, v)
    return torch.einsum("bnhe,bnth,bnt->btne", context, q, shares).flatten(2)


def _linear_in_letters(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.relu(), k.relu()
    return torch.einsum("bnth,bnhe->btne", q, torch.einsum("bnsh,bnse->bnhe", k, v)).flatten(2)


def _elu(x: Tensor) -> Tensor:
    return functional.elu(x) + 1


POSITIVE = {"GL(1)+": 4 * HEAD}

OTHERS = {
    "a softmax written out": Site(of(_weights(lambda x: _shares(x.exp())))),
    "a softmax written out, less the largest": Site(
        of(_weights(lambda x: _shares(torch.exp(x - x.max(-1, keepdim=True).values))))
    ),
    "heads mixed before the softmax": Site(of(_mixed_heads("before"), mix=(4, 4))),
    "heads mixed after the softmax": Site(of(_mixed_heads("after"), mix=(4, 4)), folds=KEY_BIAS),
    "heads mixed on both sides of it, by a convolution": Site(
        of(_mixed_heads("before after", _by_convolution), mix=(4, 4, 1, 1)), folds=KEY_BIAS
    ),
    "heads mixed on both sides of it, by a linear map of what is turned": Site(
        of(_mixed_heads("before after", _by_linear), mix=(4, 4)), folds=KEY_BIAS
    ),
    "weights of all heads mixed and normalised": Site(
        of(_mixed_heads("after norm"), mix=(4, 4), gain=(4,)), folds=KEY_BIAS
    ),
    "a window before each window": Site(of(_windows), folds=KEY_BIAS),
    "a decay that is learned": Site(of(_learned_decay, decay=(4, 1, 1)), folds=NONE),
    "a softmax written out, masked": Site(of(_weights(_masked))),
    "a softmax written out, divided afterwards": Site(of(_late)),
    "a softmax by the logarithm of the sum": Site(
        of(_weights(lambda x: torch.exp(x - torch.logsumexp(x, -1, keepdim=True))))
    ),
    "a softmax by its logarithm": Site(of(_weights(lambda x: functional.log_softmax(x, dim=-1).exp()))),
    "a softmax that does not show": Site(of(_weights(Alone.apply))),
    "a softmax that does not show, relative positions": Site(
        of(
            lambda m, x, q, k, v: joined(
                Alone.apply(torch.einsum("bntd,tsd->bnts", q, relative(m.table)) + q @ k.mT) @ v
            ),
            table=(2 * TOKENS - 1, HEAD),
        ),
        ONE, folds={"key_bias": HEAD, "value_bias": 4 * HEAD, "written_mean": HEAD},
    ),
    "a softmax written out, rotary": Site(of(_weights(lambda x: _shares(x.exp()), half)), TURNED, folds=VALUE_BIAS),
    "sigmoids": Site(of(_weights(torch.sigmoid)), folds=NONE),
    "sigmoids, less a number": Site(of(_weights(lambda x: (x / 2 - 2).sigmoid())), folds=NONE),
    "sigmoids, rotary": Site(of(_weights(torch.sigmoid, half)), TURNED, folds=NONE),
    "sigmoids, grouped queries": Site(of(_weights(torch.sigmoid), key_heads=2), TWO, TWO, NONE),
    "sigmoids of queries and keys of length one": Site(of(_weights(torch.sigmoid, _unit)), ROTATED, folds=NONE),
    "shares of sigmoids": Site(of(_weights(lambda x: _shares(torch.sigmoid(x)))), folds=VALUE_BIAS),
    "squares": Site(of(_weights(lambda x: functional.relu(x).square() / TOKENS)), folds=NONE),
    "decay": Site(of(_decaying), TURNED, folds=NONE),
    "no function": Site(of(_linear(lambda x: x)), folds=NONE),
    "linear attention": Site(of(_linear(_elu)), NONE, folds=NONE, named=("qk",)),
    "linear attention, shares of three factors": Site(
        of(_linear_of_shares), NONE, folds=VALUE_BIAS, named=("qk",)
    ),
    "linear attention, shares": Site(of(_linear(_elu, shares=True)), NONE, folds=VALUE_BIAS, named=("qk",)),
    "linear attention, grouped queries": Site(
        of(_linear(functional.silu), key_heads=2), NONE, TWO, NONE, named=("qk",)
    ),
    "linear attention by a softmax": Site(
        of(lambda m, x, q, k, v: joined(q.softmax(-1) @ (k.softmax(-2).mT @ v))), NONE, folds=VALUE_BIAS, named=("qk",)
    ),
    "linear attention, cut off at zero": Site(of(_linear(functional.relu)), POSITIVE, folds=NONE),
    "linear attention, cut off at zero, in letters": Site(of(_linear_in_letters), POSITIVE, folds=NONE),
    "linear attention, rotary behind": Site(of(_linear(lambda x: half(_elu(x)))), NONE, folds=NONE, named=("qk",)),
}  # fmt: skip
"""Of queries and keys that are bent each by itself nothing is left, or their size where it passes through."""

# ----------------------------------------------------------------------- what has none, or none of those looked for


def _normalised(x: Tensor, start: int) -> Tensor:
    """Heads of which the coordinates from ``start`` on are normalised together."""
    rest = x[..., start:]
    return torch.cat([x[..., :start], rest / rest.norm(dim=-1, keepdim=True)], dim=-1)


def _order(side: str, index: list[int], axis: int) -> Core:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.tensor(index)
        q, k, v = (t.index_select(axis, at) if n == side else t for n, t in (("q", q), ("k", k), ("v", v)))
        return attend(q, k, v)

    return core


def _again(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output projection reads queries too."""
    return attend(q, k, v) + 0.1 * joined(q)


def _parametrised(parametrise: Callable[..., object], parts: str) -> Callable[[], nn.Module]:
    """Projections whose weights are computed of parameters by torch's own parametrisations."""

    def make() -> nn.Module:
        module = Projected()
        for part in parts:
            parametrise(getattr(module, part))
        return module

    return make


SUB_NORMS = {
    "a norm of all heads": Site(SubNormed, vo=ROTATED, folds=SUB_NORMED),
    "a norm of all heads, one plus weight": Site(lambda: SubNormed(offset=1.0), vo=ROTATED, folds=SUB_NORMED),
    "a norm of all heads, grouped queries": Site(
        lambda: SubNormed(key_heads=2), TWO, {f"O({HEAD})": 2}, {"key_bias": 2 * HEAD, "norm_gain": 4 * HEAD}
    ),
    "a layer norm of all heads": Site(
        lambda: SubNormed(centred=True), vo=CENTRED, folds={**SUB_NORMED, "read_mean": WIDTH}
    ),
    "a layer norm of all heads, with a bias": Site(
        lambda: SubNormed(centred=True, bias=True), vo=CENTRED,
        folds={**KEY_BIAS, "norm_gain": 8 * HEAD, "read_mean": WIDTH},
    ),
    "a norm of all heads, with a bias": Site(
        lambda: SubNormed(bias=True), vo=ROTATED, folds={**KEY_BIAS, "norm_gain": 8 * HEAD}
    ),
    "a norm of all heads, with a bias that nothing takes up": Site(
        lambda: SubNormed(bias=True, out_bias=False), vo=NONE, folds=SUB_NORMED, named=("vo",)
    ),
    "a norm of all heads that is read twice": Site(
        lambda: SubNormed(twice=True), vo=NONE, folds=KEY_BIAS, named=("vo",)
    ),
}  # fmt: skip
"""A norm leaves rotations of each head, in units of its gain, if nothing but the output projection reads it.

One that takes out the mean leaves those that keep it; what it adds has to go to the output's bias meanwhile.
"""

UNCLAIMED = {
    "bent queries": Site(of(lambda m, x, q, k, v: attend(torch.tanh(q), k, v)), NONE, folds=BIASES, named=("qk",)),
    "bent values": Site(of(lambda m, x, q, k, v: attend(q, k, torch.tanh(v))), vo=NONE, folds=KEY_BIAS, named=("vo",)),
    "queries read twice": Site(of(_again), NONE, NONE, NONE, named=("qk", "vo")),
    "keys that are also values": Site(
        of(lambda m, x, q, k, v: attend(q, k, k)), NONE, NONE, NONE, named=("qk", "vo")
    ),
    "active clamps": Site(
        of(lambda m, x, q, k, v: attend(q.clamp(-0.3, 0.3), k.clamp(-0.3, 0.3), v.clamp(-0.3, 0.3))),
        NONE, NONE, NONE, named=("qk", "vo"),
    ),
    "a module for queries and keys": Site(
        of(lambda m, x, q, k, v: attend(q, split(m.q(x.roll(1, -1)), 4), v)), NONE, folds=VALUE_BIAS, named=("qk",)
    ),
    "key heads in another order": Site(of(_order("k", [0, 2, 3, 1], 1)), NONE, folds=VALUE_BIAS, named=("qk",)),
    "value heads in another order": Site(of(_order("v", [3, 2, 1, 0], 1)), vo=NONE, folds=KEY_BIAS, named=("vo",)),
    "coordinates in another order": Site(
        of(_order("q", [3, 0, 5, 1, 4, 2], 3)), NONE, folds=VALUE_BIAS, named=("qk",)
    ),
    "matrices that are bent": Site(
        lambda: Applied(lambda x, w: torch.einsum("bti,nhi->bnth", x, torch.tanh(w))), NONE, folds=NONE, named=("qk",)
    ),
    "weights turned around": Site(
        lambda: Prepared(lambda m, x: [x @ p.weight.flip(0).T for p in (m.q, m.k, m.v)], bias=False),
        NONE, NONE, NONE, named=("qk", "vo"),
    ),
    "weights times weights": Site(_through(lambda w: w * w), NONE, NONE, NONE, named=("qk", "vo")),
    "normalised weights": Site(_through(functional.normalize), NONE, NONE, NONE, named=("qk", "vo")),
    "weights of a given length": Site(
        _parametrised(parametrizations.weight_norm, "qkvo"), NONE, NONE, NONE, named=("qk", "vo")
    ),
    "queries and keys of a given length": Site(
        _parametrised(parametrizations.weight_norm, "qk"), NONE, folds=VALUE_BIAS, named=("qk",)
    ),
    "orthogonal queries and keys": Site(
        _parametrised(parametrizations.orthogonal, "qk"), NONE, folds=VALUE_BIAS, named=("qk",)
    ),
    "orthogonal outputs": Site(_parametrised(parametrizations.orthogonal, "o"), vo=NONE, folds=KEY_BIAS, named=("vo",)),
    "weights of spectral norm one": Site(
        _parametrised(parametrizations.spectral_norm, "qkvo"), NONE, NONE, NONE, named=("qk", "vo")
    ),
    "products that are summed": Site(
        lambda: Applied(lambda x, w: (x[:, None, :, None] * w[:, None]).sum(-1)), NONE, folds=NONE, named=("qk",)
    ),
}  # fmt: skip

SITES = {**LAYOUTS, **MADE, **CORES, **OTHERS, **SUB_NORMS, **UNCLAIMED}
each_site = pytest.mark.parametrize("name", SITES)
find = finder(SITES)


def groups(found: SymmetryMap, kind: str) -> dict[str, int]:
    """Names of groups -> copies."""
    out: Counter[str] = Counter()
    for p in found.pairs:
        if p.kind == kind:
            out[p.group.name] += p.copies
    return dict(out)


@each_site
def test_groups_and_copies_are_those_worked_out_by_hand(name: str) -> None:
    site, (_, found) = SITES[name], find(name)
    assert groups(found, "qk") == site.qk
    assert groups(found, "vo") == site.vo


@each_site
def test_folds_are_those_worked_out_by_hand(name: str) -> None:
    out: Counter[str] = Counter()
    for f in find(name)[1].folds:
        out[f.kind] += f.dimension
    if name not in FOLDS_MAY_BE_MISSING:
        assert out == SITES[name].folds
    assert all(n <= SITES[name].folds.get(kind, 0) for kind, n in out.items())


FOLDS_MAY_BE_MISSING = {*UNCLAIMED}
"""A bias is looked for only in the pairs that were found."""


@each_site
def test_sides_that_are_not_understood_are_named_with_a_reason(name: str) -> None:
    found = find(name)[1]
    assert tuple(u.split(":")[0].rsplit(".", 1)[-1] for u in found.unrecognised) == SITES[name].named
    assert all(u.split(": ", 1)[1] for u in found.unrecognised)


@each_site
def test_claims_that_end_on_larger_inputs_are_told_and_no_others(name: str) -> None:
    limited = tuple(text.split(": ")[0] for text in find(name)[1].limited)
    ends = ("parts.0.value_bias", "parts.0.qk", "parts.0.vo") if name == "inactive clamps" else ()
    assert limited == ends


@each_site
def test_every_claim_holds_far_from_the_identity_and_breaks_when_broken(name: str) -> None:
    model, found = find(name)
    proof = verify(model, found, [inputs(1), inputs(2)], condition=100.0, each=True)
    assert proof.map == found
    assert all(c.status == "holds" for c in proof.claims)
    assert all((c.deviation or 0.0) < EXACT for c in proof.claims)
    assert all((c.control or 0.0) > 1e-4 for c in proof.claims)


@each_site
def test_finding_leaves_the_model_as_it_was(name: str) -> None:
    model, again = find(name)[0], Residual(SITES[name].module())
    for (n, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), n


FROZEN = [n for n in CORES if "relative" in n or "biases" in n or "sink" in n or "gate" in n]


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_model_has_the_same_sites(name: str) -> None:
    """Parameters that enter by themselves are differentiated too, though nobody trains them."""
    model = Residual(SITES[name].module()).requires_grad_(False)
    assert find_symmetries(model, inputs()) == find(name)[1]
    assert not any(p.requires_grad for p in model.parameters())


# Rows of each part, head and coordinate in a projection, written with plain indexing: an oracle that knows no views.


def _rows_of_fused(pattern: str, parts: str) -> list[Tensor]:
    axes = pattern.split()
    sizes = {"s": 3, "n": 4, "h": HEAD, "p": 2, "w": 2}
    at = torch.arange(3 * 4 * HEAD).view([sizes[a] for a in axes])
    at = at.permute([axes.index(a) for a in ("s", *(("p", "w") if "p" in axes else "n"), "h")]).reshape(3, 4, HEAD)
    return [at[parts.index(part)] for part in "qkv"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parts", ["qkv", "qvk"])
@pytest.mark.parametrize("pattern", ["s n h", "n s h", "n h s", "h n s", "s h n", "h s n", "p s w h", "p w s h"])
def test_the_factors_of_a_fused_projection_are_the_rows_of_the_heads(
    pattern: str, parts: str, transposed: bool
) -> None:
    model = Residual(Fused(pattern, parts=parts, transposed=transposed))
    weights = {n: p.detach() for n, p in model.named_parameters()}
    weight, bias = weights["parts.0.weight"], weights["parts.0.bias"]
    whole = torch.cat([weight.T if transposed else weight, bias[:, None]], dim=1)
    q, k, v = (whole[rows] for rows in _rows_of_fused(pattern, parts))
    out = weights["parts.0.out.weight"].T.unflatten(0, (4, HEAD))
    found = find_symmetries(model, inputs(), preset="paper")
    for pair, first, second in zip(found.pairs, (q, v), (k, out), strict=True):
        _same_products(pair.factors(weights), first, second)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_the_factors_of_grouped_queries_are_the_rows_of_the_heads(key_heads: int) -> None:
    model = Residual(Projected(key_heads=key_heads))
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def rows(name: str, heads: int) -> Tensor:
        whole = torch.cat([weights[f"parts.0.{name}.weight"], weights[f"parts.0.{name}.bias"][:, None]], dim=1)
        return whole.unflatten(0, (heads, HEAD))

    q = rows("q", 4).unflatten(0, (key_heads, -1))
    out = weights["parts.0.o.weight"].T.unflatten(0, (key_heads, -1, HEAD))
    found = find_symmetries(model, inputs(), preset="paper")
    for pair, first, second in zip(
        found.pairs, (_beside(q), rows("v", key_heads)), (rows("k", key_heads), _beside(out)), strict=True
    ):
        _same_products(pair.factors(weights), first, second)


def _beside(x: Tensor) -> Tensor:
    """(key heads, queries, head, n) -> (key heads, head, queries n)."""
    return x.transpose(1, 2).flatten(2)


def _same_products(factors: tuple[Tensor, Tensor], first: Tensor, second: Tensor) -> None:
    """Whether G H^T of every copy is that of the head: entries of a row may come in any order."""
    ours = (factors[0] @ factors[1].mT).flatten(1).sort(dim=1).values
    theirs = (first.mT @ second).flatten(1).sort(dim=1).values
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in CORES if "between queries and keys" in name])
@pytest.mark.parametrize("rows", [1, 40])
def test_samples_are_not_taken_for_queries(name: str, rows: int) -> None:
    """More samples than queries, or one: which axis counts queries does not depend on that."""
    batch = {"x": torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)}
    found = find_symmetries(Residual(SITES[name].module()), batch)
    assert (groups(found, "qk"), groups(found, "vo")) == (SITES[name].qk, SITES[name].vo)


def test_nothing_is_claimed_across_a_gain_of_zero_and_the_weights_stay() -> None:
    """What the output projection has there is nobody's: a rotation of the values would need it back."""
    model = Residual(SubNormed())
    with torch.no_grad():
        model.get_parameter("parts.0.norm.weight")[3] = 0
    before = {n: p.clone() for n, p in model.named_parameters()}
    found = find_symmetries(model, inputs(), prove=False)
    assert groups(found, "vo") == ROTATED
    proof = verify(model, found, [inputs(1)], each=True)
    assert groups(proof.map, "vo") == NONE
    assert any(text.startswith("parts.0.vo: ") for text in proof.map.dropped)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_rotations_in_units_of_a_gain_need_its_fold() -> None:
    """The geometry sees the output projection as it is stored, which is in those units once the gain is folded."""
    model = Residual(SubNormed(), Projected())
    attention = find_symmetries(model, inputs(), preset="attention")
    assert [f.kind for f in attention.folds if f.kind == "norm_gain"] == ["norm_gain"]
    pair = next(p for p in attention.pairs if p.between is not None)
    assert pair.between is not None
    assert pair.between.gain in pair.parameters
    less = attention.without({attention.folds[0].name: "asked for"})
    assert pair in attention.pairs
    assert pair not in less.pairs
    assert less.dropped[1] == f"{pair.name}: the gain of the norm between its factors is not folded"
    paper = find_symmetries(model, inputs(), preset="paper")
    assert not paper.folds
    assert all(p.between is None for p in paper.pairs)
    assert less.dropped[1] in paper.unrecognised


# ------------------------------------------------------------------------------------------------ sites that share


def test_one_module_called_twice_is_one_site() -> None:
    part = Projected()
    found = find_symmetries(Residual(part, part), inputs())
    assert groups(found, "qk") == groups(found, "vo") == {f"GL({HEAD})": 4}


@pytest.mark.parametrize(("key_heads", "copies"), [(4, 2), (2, 1)])
def test_what_two_softmaxes_mix_is_one_head_where_it_is_normalised_as_one(key_heads: int, copies: int) -> None:
    model = Residual(Differential(key_heads))
    found = find_symmetries(model, inputs())
    assert groups(found, "vo") == {f"O({2 * HEAD})": copies}
    assert groups(found, "qk") == {f"GL({HEAD})": key_heads}
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_matrices_that_pass_for_weights_of_norms_are_named_as_found_in_part() -> None:
    """Each coordinate of a head can be scaled, which is not all that there is; and so it is of every layer."""
    found = find_symmetries(Residual(*(SITES["products that are summed"].module() for _ in range(2))), inputs())
    assert groups(found, "qk_norm") == {"GL(1)": 2 * 4 * HEAD}
    assert [text.split(": ")[:2] for text in found.unrecognised] == [[f"parts.{i}.qk", "in part"] for i in range(2)]


def test_layers_alike_that_are_understood_in_part_are_all_named() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(_normalised(q, 2), _normalised(k, 2), v)

    found = find_symmetries(Residual(*(Projected(core) for _ in range(3))), inputs())
    assert [(p.module, p.group.name) for p in found.pairs if p.kind == "qk"] == [
        (f"parts.{i}", "GL(2)") for i in range(3)
    ]
    assert [text.split(": ")[:2] for text in found.unrecognised] == [[f"parts.{i}.qk", "in part"] for i in range(3)]


def test_lengths_of_layers_alike_are_those_of_each() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(_normalised(q, 0), _normalised(k, 0), v)

    found = find_symmetries(Residual(*(Projected(core) for _ in range(3))), inputs())
    assert [(s.module, s.copies) for s in found.scales] == [(f"parts.{i}", 4) for i in range(3) for _ in range(2)]


def test_rotations_of_a_module_that_is_called_twice_are_those_of_one() -> None:
    def core(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v / v.norm(dim=-1, keepdim=True)))
        return attend(q, k, v)

    part = Projected(core, key_heads=2)
    found = find_symmetries(Residual(part, part), inputs())
    assert groups(found, "vo") == {f"O({HEAD})": 2}


def test_layers_that_are_dead_say_nothing_of_the_others() -> None:
    """Attention to oneself alone, whatever queries and keys are: nothing shows there, of anything that is tried."""

    def alone(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joined(torch.softmax(q @ k.mT + 1e9 * torch.eye(TOKENS, dtype=q.dtype), dim=-1) @ v)

    found = find_symmetries(Residual(*(Projected(alone) for _ in range(4)), Projected()), inputs())
    assert [(p.module, p.group.name) for p in found.pairs if p.kind == "qk"] == [("parts.4", f"GL({HEAD})")]
    assert [text for text in found.unrecognised if "shows in" in text] == [
        f"parts.{i}.qk: nothing that it does shows in what the module returns on this example" for i in range(4)
    ]


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_mixes_zeros_has_what_a_layer_that_is_alike_has(first: bool) -> None:
    """As the first one of a decoder of object queries does: all its values are the same, whatever attends to what."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Projected() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            scales = (0, 1) if first else (1, 0)
            return sum(part(scale * x) for part, scale in zip(self.parts, scales, strict=True))  # type: ignore[return-value]

    found = find_symmetries(Residual(Decoder()), inputs())
    qk = {p.module: p.group.name for p in found.pairs if p.kind == "qk"}
    assert qk == {f"parts.0.parts.{i}": f"GL({HEAD})" for i in range(2)}
    assert sorted(f.module for f in found.folds if f.kind == "key_bias") == sorted(qk)
    assert not found.unrecognised


def test_what_reads_the_stream_elsewhere_is_no_output_of_attention() -> None:
    """Without output projections all that comes later reads what is mixed; where it is tried stays as small."""

    class Mixing(Projected):
        def forward(self, x: Tensor) -> Tensor:
            return attend(*(split(p(x), 4) for p in (self.q, self.k, self.v)))

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Residual(Mixing(), Mixing()), nn.Linear(WIDTH, 3)
            self.body.head = nn.Identity()
            self.double().eval()
            randomise(self, 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # type: ignore[no-any-return]

    found = find_symmetries(Headed(), inputs())
    # What the second one mixes the head alone reads.
    assert [(p.module, p.group.name, p.copies) for p in found.pairs if p.kind == "qk"] == [
        ("", f"GL({HEAD})", 4),
        ("body", f"GL({HEAD})", 4),
    ]


def test_keys_and_values_that_two_layers_read_move_for_both() -> None:
    first, second = Projected(), Projected()
    second.k, second.v = first.k, first.v
    model = Residual(first, second)
    found = find_symmetries(model, inputs())
    (qk,) = [p for p in found.pairs if p.kind == "qk"]
    assert {v.parameter for v in qk.g} == {
        "parts.0.q.weight", "parts.0.q.bias", "parts.1.q.weight", "parts.1.q.bias"
    }  # fmt: skip
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_a_table_of_positions_that_two_layers_share_ties_both() -> None:
    first, second = (Projected(_decomposed, table=(2 * TOKENS - 1, HEAD)) for _ in range(2))
    second.table = first.table
    model = Residual(first, second)
    found = find_symmetries(model, inputs())
    assert groups(found, "qk") in ({f"GL({HEAD})": 1}, {})
    assert groups(found, "vo") == {f"GL({HEAD})": 8}
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_query_and_key_weights_in_one_parameter_keep_rotations_but_are_no_pair_of_a_score() -> None:
    part = Projected()
    part.k.weight = part.q.weight
    model = Residual(part)
    found = find_symmetries(model, inputs())
    assert groups(found, "qk") in ({f"O({HEAD})": 4}, {})
    assert verify(model, found, [inputs(1)], each=True).map == found
    assert groups(found.separated()[0], "qk") == {}


def test_a_router_is_not_taken_for_attention() -> None:
    class Router(nn.Module):
        """Weights of tokens' own features, (rows, tokens, 3)."""

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            share = torch.softmax(self.router(x), dim=-1)
            return sum(share[..., i, None] * e(x) for i, e in enumerate(self.experts))  # type: ignore[return-value]

    found = find_symmetries(Residual(Router()), inputs())
    assert [(s.name, s.dimension) for s in found.symmetries] == [("parts.0.router.written_mean", WIDTH + 1)]
    assert found == SymmetryMap(folds=found.folds)


class Sampled(nn.Module):
    """Weights from one linear map, for four places around each token whose values are weighed and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.v, self.o = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.weights(x).unflatten(-1, (4, 4)).softmax(-1)
        around = torch.stack([split(self.v(x), 4).roll(shift, 2) for shift in range(4)], dim=-1).transpose(1, 2)
        return self.o((around * share[..., None, :]).sum(-1).flatten(2))  # type: ignore[no-any-return]


def test_values_that_are_weighed_without_a_comparison_are_found_and_the_rest_is_named() -> None:
    model = Residual(Sampled())
    found = find_symmetries(model, inputs())
    assert groups(found, "vo") == {f"GL({HEAD})": 4}
    assert groups(found, "qk") == {}
    assert [u.split(":")[0] for u in found.unrecognised] == ["parts.0.qk"]
    assert verify(model, found, [inputs(1)], each=True).map == found


class Deformed(nn.Module):
    """Four places for each token, each where a linear map says, whose values are interpolated, weighed and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.where = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 32)
        self.v, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = split(self.weights(x), 4).softmax(-1)
        line = split(self.v(x), 4).flatten(0, 1).mT.unsqueeze(-1).expand(-1, -1, -1, 3)
        where = split(self.where(x), 4).flatten(0, 1).unflatten(-1, (4, 2)).tanh()
        values = functional.grid_sample(line, where, align_corners=False).unflatten(0, share.shape[:2])
        return self.o(joined((values * share.unsqueeze(2)).sum(-1).mT))  # type: ignore[no-any-return]


@needs_sampling
def test_values_that_are_sampled_where_a_linear_map_says_are_a_head_all_the_same() -> None:
    model = Residual(Deformed())
    found = find_symmetries(model, inputs())
    assert groups(found, "vo") == {f"GL({HEAD})": 4}
    assert groups(found, "qk") == {}
    assert verify(model, found, [inputs(1)], each=True).map == found


class Mutual(nn.Module):
    """Two sequences that look at each other by the same logits: queries of the one softmax are keys of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.w = (nn.Linear(WIDTH, 4 * HEAD) for _ in range(4))
        self.o, self.p = (nn.Linear(4 * HEAD, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        other = x.roll(1, -1)
        logits = split(self.q(x), 4) @ split(self.k(other), 4).mT
        first = self.o(joined(torch.softmax(logits, -1) @ split(self.v(other), 4)))
        return first + self.p(joined(torch.softmax(logits.mT, -1) @ split(self.w(x), 4)))  # type: ignore[no-any-return]


def test_two_softmaxes_of_one_product_are_one_site_whichever_side_the_keys_are_on() -> None:
    model = Residual(Mutual())
    found = find_symmetries(model, inputs())
    assert groups(found, "qk") == {f"GL({HEAD})": 4}
    assert groups(found, "vo") == {f"GL({HEAD})": 8}
    assert not found.unrecognised
    assert verify(model, found, [inputs(1)], each=True).map == found


class Gate(nn.Module):
    """Shares of the units instead of a nonlinearity: nothing is mixed, but it looks like attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.softmax(self.gate(x)))  # type: ignore[no-any-return]


class Reversible(Projected):
    """Attention with its softmax written out, all of it without a graph, as blocks that are computed again have it."""

    def __init__(self) -> None:
        super().__init__(lambda m, x, q, k, v: joined(_shares((q @ k.mT).exp()) @ v))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _recurrent(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention written as a recurrence, in products entry by entry."""
    state, mixed = x.new_zeros(*k[:, :, 0].shape, v.shape[-1]), []
    for token in range(x.shape[1]):
        state = 0.9 * state + k[:, :, token, :, None] * v[:, :, token, None, :]
        mixed.append((q[:, :, token, :, None] * state).sum(-2))
    return joined(torch.stack(mixed, dim=2))


class Weighted(torch.autograd.Function):
    """Attention without a softmax, whose forward pass keeps nothing itself."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.mT) @ v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class Around(torch.autograd.Function):
    """A function that runs another one, and marks what it can."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable()
        assert len(ctx.needs_input_grad) == 3
        return Whole.apply(q, k, v)  # type: ignore[no-any-return]


class Counting(torch.autograd.Function):
    """Attention that counts its runs in a parameter."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return torch.softmax(q @ k.mT, -1) @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad, grad, None


def _counting(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not hasattr(m, "count"):
        m.count = nn.Parameter(torch.zeros(1, dtype=x.dtype))
    return joined(Counting.apply(q, k, v, m.count))


GRAPHLESS: dict[str, Callable[[], nn.Module]] = {
    "written out without gradients": Reversible,
    "without gradients": of(
        lambda m, x, q, k, v: joined(torch.no_grad()(nn.functional.scaled_dot_product_attention)(q, k, v))
    ),
    "a function of its own": of(lambda m, x, q, k, v: joined(Whole.apply(q, k, v))),
    "one that keeps nothing itself": of(lambda m, x, q, k, v: joined(Weighted.apply(q, k, v))),
    "one in another": of(lambda m, x, q, k, v: joined(Around.apply(q, k, v))),
}


@pytest.mark.parametrize("name", GRAPHLESS)
def test_what_runs_without_a_graph_is_run_with_one(name: str) -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    model = Residual(nn.Identity(), GRAPHLESS[name]())
    found = find_symmetries(model, inputs())
    assert groups(found, "qk") == groups(found, "vo") == {f"GL({HEAD})": 4}
    assert not found.unrecognised
    assert verify(model, found, [inputs(1)], each=True).map == found
    assert torch.autograd.Function.__dict__["apply"] is apply


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (of(_counting), HIDDEN),
        (
            of(lambda m, x, q, k, v: joined(torch.inference_mode()(torch.softmax)(q @ k.mT, -1).clone() @ v)),
            HIDDEN,
        ),
        (Gate, "its weights come from one side, no query meets a key"),
        (
            of(lambda m, x, q, k, v: joined(torch.tanh(q @ (k.mT @ v)))),
            "multiplies what its linear maps write without a softmax",
        ),
        (of(_recurrent), "multiplies what its linear maps write without a softmax"),
    ],
    ids=[
        "what cannot run with a graph", "in inference mode", "a gate", "without a softmax", "a state, token by token",
    ],
)  # fmt: skip
def test_what_looks_like_attention_and_is_not_understood_is_named(module: Callable[[], nn.Module], reason: str) -> None:
    found = find_symmetries(Residual(nn.Identity(), module()), inputs())
    assert not [p for p in found.pairs if p.kind in ("qk", "vo")]
    assert [u for u in found.unrecognised if u.startswith("parts.1") and u.endswith(reason)]


def _scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module.double())  # type: ignore[no-any-return]


class Compiled(Projected):
    """Queries, keys and values by modules that are compiled to TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (_scripted(p) for p in (self.q, self.k, self.v))


@pytest.mark.parametrize(
    ("module", "inside"),
    [
        (lambda: _scripted(Chain(functional.gelu, 20)), [""]),
        (lambda: torch.jit.trace(Fused("s n h").double(), inputs()["x"]), [""]),
        (Compiled, [".q", ".k", ".v"]),
    ],
    ids=["a script", "a recorded one", "projections"],
)
def test_what_is_compiled_to_torchscript_is_named(module: Callable[[], nn.Module], inside: list[str]) -> None:
    model = Residual(module(), Projected())
    found = find_symmetries(model, inputs())
    assert groups(found, "qk") == {f"GL({HEAD})": 4}
    assert [u.split(":")[0] for u in found.unrecognised if u.endswith("TorchScript, which cannot be looked into")] == [
        f"parts.0{name}" for name in inside
    ]
    assert set(found.unrecognised) <= set(found.missed)
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_shares_that_are_handed_out_and_not_read_mix_no_values() -> None:
    class Shown(Projected):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = split(self.q(x), 4) @ split(self.k(x), 4).mT
            return self.o(joined(logits.softmax(-1) @ split(self.v(x), 4))), logits.softmax(-1)

    class Both(Residual):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y, shares = self.parts[0](x)
            return self.head(x + y), shares

    found = find_symmetries(Both(Shown()), inputs())
    assert groups(found, "qk") == groups(found, "vo") == {f"GL({HEAD})": 4}
    assert found.unrecognised == ()


def test_the_entropy_of_some_shares_is_not_taken_for_attention() -> None:
    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.out = nn.Linear(WIDTH, 8), nn.Linear(1, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.head(x)
            return self.out((logits.softmax(-1) * logits.log_softmax(-1)).sum(-1, keepdim=True))  # type: ignore[no-any-return]

    found = find_symmetries(Residual(Sure()), inputs())
    # No more than the same number for all logits.
    assert [(s.name, s.dimension) for s in found.symmetries] == [("parts.0.head.written_mean", WIDTH + 1)]
    assert found == SymmetryMap(folds=found.folds)


@pytest.mark.parametrize("first", ["logits", "shares"])
def test_experts_that_are_picked_by_their_shares_are_not_taken_for_attention(first: str) -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.up = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.router(x)
            best = logits.topk(3).values.softmax(-1) if first == "logits" else logits.softmax(-1).topk(3).values
            return (torch.tanh(self.up(x)).unflatten(-1, (3, WIDTH)) * best[..., None]).sum(-2)

    assert find_symmetries(Residual(Picked()), inputs()).unrecognised == ()


def test_what_is_drawn_on_the_way_is_drawn_the_same_on_a_twin() -> None:
    def some(m: Projected, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT
        return joined((logits + torch.rand(logits.shape, dtype=logits.dtype)).softmax(-1) @ v)

    model = Residual(Projected(some))
    found = find_symmetries(model, inputs())
    assert groups(found, "qk") == groups(found, "vo") == {f"GL({HEAD})": 4}
    assert verify(model, found, [inputs(1)]).map == found


def test_a_model_without_attention_has_no_site() -> None:
    assert find_symmetries(Residual(Mlp(functional.gelu)), inputs()) == SymmetryMap()


# --------------------------------------------------------------------------------------------- any regular layout


@settings(max_examples=12, deadline=None)
@given(
    heads=st.integers(1, 4),
    head=st.integers(2, 5),
    order=st.permutations("snh"),
    parts=st.permutations("qkv"),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    transposed=st.booleans(),
)
def test_any_order_of_parts_heads_and_coordinates_is_read(
    heads: int, head: int, order: list[str], parts: list[str], padding: tuple[int, int], transposed: bool
) -> None:
    """Outputs before and after those of attention go elsewhere: views begin and end inside the parameter."""
    sizes = {"s": 3, "n": heads, "h": head}
    before, after = padding
    total = before + 3 * heads * head + after

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((WIDTH, total) if transposed else (total, WIDTH)))
            self.out, self.rest = nn.Linear(heads * head, WIDTH), nn.Linear(total, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = x @ (self.weight if transposed else self.weight.T)
            inside = y[..., before : total - after].unflatten(-1, [sizes[a] for a in order])
            found = inside.permute(*(2 + order.index(a) for a in "sn"), 0, 1, 2 + order.index("h"))
            q, k, v = (found[parts.index(p)].transpose(0, 1) for p in "qkv")
            outside = torch.tanh(y[..., [*range(before), *range(total - after, total)]]).sum(-1, keepdim=True)
            return self.out(attend(q, k, v)) + outside  # type: ignore[no-any-return]

    model = Residual(Ordered())
    found = find_symmetries(model, inputs(), preset="paper")
    assert groups(found, "qk") == groups(found, "vo") == {f"GL({head})": heads}
    assert verify(model, found, [inputs(1)]).map == found


# ------------------------------------------------------------------------------------------------------- tables

loops = st.lists(st.tuples(st.integers(2, 4), st.integers(1, 40)), min_size=1, max_size=3)


def _offsets(nest: list[tuple[int, int]]) -> list[int]:
    out = [0]
    for size, step in nest:
        out = [a + i * step for a in out for i in range(size)]
    return out


@given(loops)
def test_nested_loops_give_back_the_offsets_they_were_read_from(nest: list[tuple[int, int]]) -> None:
    line = _offsets(nest)
    found = _nested(line)
    assert found is not None
    assert _offsets(found) == line


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_any_list_is_nested_loops_that_give_it_or_none(rest: list[int]) -> None:
    line = [0, *rest]
    found = _nested(line)
    assert found is None or _offsets(found) == line


def test_offsets_without_a_rule_are_no_loops() -> None:
    assert _nested([0, 1, 3]) is None
    assert _nested([0, 1, 5, 7]) is None
    assert _nested([0, 1, 2, 10, 11, 13]) is None


@given(loops, loops, st.integers(0, 9))
def test_a_regular_table_is_read_as_axes_that_give_it_back(
    rows: list[tuple[int, int]], columns: list[tuple[int, int]], start: int
) -> None:
    table = start + torch.tensor(_offsets(rows))[:, None] + torch.tensor(_offsets(columns))[None]
    axes = _regular(table, ("n", "h"), 0)
    assert axes is not None
    again = [_offsets([(a.size, a.step) for a in axes if a.name[0] == name]) for name in "nh"]
    assert torch.equal(start + torch.tensor(again[0])[:, None] + torch.tensor(again[1])[None], table)


@given(loops, loops, st.data())
def test_a_table_with_one_entry_elsewhere_is_not_regular(
    rows: list[tuple[int, int]], columns: list[tuple[int, int]], data: st.DataObject
) -> None:
    table = torch.tensor(_offsets(rows))[:, None] + torch.tensor(_offsets(columns))[None]
    at = tuple(data.draw(st.integers(1, n - 1)) for n in table.shape)
    table[at] += 1
    assert _regular(table, ("n", "h"), 0) is None


def test_tables_that_run_backwards_are_not_regular() -> None:
    assert _regular(torch.tensor([[3, 2, 1, 0]]), ("n", "h"), 0) is None


@each_site
def test_views_stay_inside_their_parameters_and_meet_no_entry_twice(name: str) -> None:
    model, found = find(name)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    for p in found.pairs:
        for views in (p.g, p.h):
            for v in views:
                _inside(v, shapes[v.parameter])


def _inside(view: View, shape: torch.Size) -> None:
    seen = torch.zeros(shape)
    for axis in view.axes:
        last = view.start[axis.dimension] + sum(
            (a.size - 1) * a.step for a in view.axes if a.dimension == axis.dimension
        )
        assert last < shape[axis.dimension]
    flat = view.of(torch.arange(seen.numel()).view(shape)).flatten()
    assert len(flat.unique()) == len(flat)


def test_one_token_tells_nothing_and_claims_nothing_false() -> None:
    model = Residual(Projected())
    batch = {"x": inputs()["x"][:, :1]}
    found = find_symmetries(model, batch)
    assert verify(model, found, [inputs(1)], each=True).map.pairs == found.pairs


def test_products_stay_when_a_model_is_moved_and_outputs_with_them() -> None:
    model, found = find("rotary, grouped queries")
    base, moved = outputs(model, inputs()), Residual(SITES["rotary, grouped queries"].module())
    found.apply(moved, found.random_element(moved, 1, 100.0))
    assert change(moved, inputs(), base) < EXACT
