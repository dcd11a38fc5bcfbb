"""Small models written out in plain torch, in variants whose symmetries differ by one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_geosharp import score
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.verify import verify
from tests.families import randomise

WIDTH, HEAD, TOKENS = 24, 6, 7


def half(x: Tensor) -> Tensor:
    """Rotary embedding of (..., tokens, head) that pairs column j with column j + head / 2."""
    return _rotary(x, x.unflatten(-1, (2, -1)).transpose(-1, -2)).transpose(-1, -2).flatten(-2)


def interleaved(x: Tensor) -> Tensor:
    """Rotary embedding that pairs columns 2j and 2j + 1."""
    return _rotary(x, x.unflatten(-1, (-1, 2))).flatten(-2)


def _rotary(x: Tensor, pairs: Tensor) -> Tensor:
    frequencies = 3.0 ** -torch.arange(x.shape[-1] // 2, dtype=x.dtype)
    angles = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1) * frequencies
    return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles))


class Running(nn.Module):
    """What a function makes of the model, which has the parts given by name, and of its input, and a head behind it."""

    beside = True
    """Whether the head reads the input too."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)
        self.head = nn.Linear(WIDTH, 5)
        self.double().eval()
        randomise(self, 0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(self, x)
        return self.head(torch.tanh(x + y if self.beside else y))  # type: ignore[no-any-return]


def holding(model: nn.Module, found: SymmetryMap, folds: Sequence[Symmetry]) -> bool:
    """Whether some claims are proved, each by itself and nearly to rounding, on other inputs than found on."""
    names = {f.name for f in folds}
    proof = verify(model, found, [inputs(seed=5)], each=True)
    claims = [c for c in proof.claims if c.name in names]
    assert len(claims) == len(folds) > 0
    return all(c.status == "holds" and c.deviation is not None and c.deviation < 1e-12 for c in claims)


def folded(model: nn.Module, found: SymmetryMap) -> dict[str, Tensor]:
    """The weights of a model, moved to the representative of all folds, in place; its outputs stay."""
    before, weights = outputs(model, inputs()), {n: p.detach() for n, p in model.named_parameters()}
    for fold in found.folds:
        fold.canonicalise(weights)
    assert torch.allclose(outputs(model, inputs()), before, rtol=0, atol=1e-12)
    return weights


def there_and_back(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float]:
    """How far an element of all that is found moves the weights at most, and what its inverse leaves of that."""
    found = find_symmetries(model, batch)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def away() -> float:
        return max(float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters())

    element = found.random_element(model, seed=3)
    found.apply(model, element)
    moved = away()
    found.apply(model, found.inverse(element), back=True)
    return moved, away()


def scores_along(model: nn.Module, batch: dict[str, Tensor], kind: str) -> tuple[list[float], list[float]]:
    """Scores, geodesic and adaptive, before and after all symmetries of one kind have moved a model."""
    found = find_symmetries(model, batch)
    alone = found.without({s.name: "" for s in found.symmetries if s.kind != kind})

    def measured() -> list[float]:
        return [
            score(
                model, [batch], loss=lambda out, _: (out.last_hidden_state**2).flatten(1).mean(1), metric=metric,
                rho=0.3, dtype="float64", reproducibility=False,
            ).geodesic_sharpness
            for metric in ("inv", "adaptive")
        ]  # fmt: skip

    before = measured()
    alone.apply(model, alone.random_element(model, seed=1))
    return before, measured()


class Attention(nn.Module):
    """Multi-head attention; ``twist`` names what is unusual about it."""

    def __init__(self, twist: str, heads: int, key_heads: int, *, bias: bool, out_bias: bool) -> None:
        super().__init__()
        self.twist, self.group = twist, heads // key_heads
        self.q_proj = nn.Linear(WIDTH, heads * HEAD, bias=bias)
        self.k_proj = nn.Linear(WIDTH, key_heads * HEAD, bias=bias)
        self.v_proj = nn.Linear(WIDTH, key_heads * HEAD, bias=bias)
        self.o_proj = nn.Linear(heads * HEAD, WIDTH, bias=out_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.twist == "nonlinear q":
            q = torch.tanh(q)
        if self.twist == "normed q":
            q = nn.functional.normalize(q, dim=-1)
        if self.twist == "nonlinear v":
            v = torch.tanh(v)
        if self.twist in ("half", "interleaved"):
            q, k = (half(t) if self.twist == "half" else interleaved(t) for t in (q, k))
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        weights = torch.softmax(q @ k.mT / HEAD**0.5, dim=-1)
        if self.twist == "leaky":  # a part of the attention goes nowhere: the weights do not sum to one
            weights = weights * weights.amax(-1, keepdim=True)
        y = self.o_proj((weights @ v).transpose(1, 2).flatten(2))
        return y + 0.1 * q.transpose(1, 2).flatten(2) if self.twist == "second reader of q" else y  # type: ignore[no-any-return]


class Norm(nn.Module):
    """Root-mean-square norm that multiplies by offset + weight, with a bias or without."""

    def __init__(self, *, offset: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.full((WIDTH,), 1 - offset))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        y = y if self.weight is None else y * (self.offset + self.weight)
        return y if self.bias is None else y + self.bias


class Model(nn.Module):
    """Norm, attention, residual, head: ``forward(x)`` with x (batch, tokens, WIDTH)."""

    def __init__(
        self,
        twist: str = "",
        *,
        heads: int = 4,
        key_heads: int = 4,
        bias: bool = True,
        out_bias: bool = True,
        norm: Norm | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
        self.norm = Norm() if norm is None else norm
        self.attention = Attention(twist, heads, key_heads, bias=bias, out_bias=out_bias)
        self.head = nn.Linear(WIDTH, 5)
        self.double().eval()
        randomise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(self.norm(x)))  # type: ignore[no-any-return]


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(3, TOKENS, WIDTH, generator=generator, dtype=torch.float64)}


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        y = model(**{k: v for k, v in batch.items() if k != "labels"})
    return y if isinstance(y, Tensor) else y.logits


def change(model: nn.Module, batch: dict[str, Tensor], base: Tensor) -> float:
    """Relative change of the outputs."""
    return float((outputs(model, batch) - base).norm() / base.norm())


# --------------------------------------------------------------------------------------------- attention in every form

Core = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(module, x, q, k, v) with heads split -> what the output projection reads."""


class Residual(nn.Module):
    """x + part(x) for each part, read by a linear head: the model around whatever is looked at."""

    def __init__(self, *parts: nn.Module, seed: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, 5)
        self.double().eval()
        randomise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return self.head(x)  # type: ignore[no-any-return]


def split(x: Tensor, heads: int) -> Tensor:
    """(rows, tokens, heads head) -> (rows, heads, tokens, head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse of :func:`split`."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None = None) -> Tensor:
    """Attention of (rows, heads, tokens, head) with something added to the logits; heads side by side in the result."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return joined(torch.softmax(scores if logits is None else scores + logits, dim=-1) @ v)


class Whole(torch.autograd.Function):
    """Attention whose workings do not show."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.softmax(q @ k.mT, -1) @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            q, k, v = inputs
            return torch.autograd.grad(torch.softmax(q @ k.mT, -1) @ v, inputs, grad)


def repeated(module: Any, x: Tensor) -> Tensor:
    """Keys (or values) once for each of their query heads."""
    return x.repeat_interleave(module.heads // module.key_heads, dim=1)


def relative(table: Tensor, tokens: int = TOKENS) -> Tensor:
    """Rows of a table (2 tokens - 1, ...) by the distance of query and key: (tokens, tokens, ...)."""
    at = torch.arange(tokens)
    return table[at[:, None] - at[None, :] + tokens - 1]


def plain(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nothing unusual; keys and values may be shared by several query heads."""
    return attend(q, repeated(m, k), repeated(m, v))


class Projected(nn.Module):
    """Separate projections; ``core`` is what happens between them and the output projection.

    ``key_heads`` of keys and values, ``head`` and ``value`` their dimensions; further parameters by name and shape.
    """

    def __init__(
        self, core: Core = plain, *, heads: int = 4, key_heads: int | None = None, head: int = HEAD,
        value: int | None = None, bias: bool = True, out_bias: bool = True, **parameters: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        value = head if value is None else value
        self.core, self.heads, self.key_heads = core, heads, key_heads
        self.q = nn.Linear(WIDTH, heads * head, bias=bias)
        self.k = nn.Linear(WIDTH, key_heads * head, bias=bias)
        self.v = nn.Linear(WIDTH, key_heads * value, bias=bias)
        self.o = nn.Linear(heads * value, WIDTH, bias=out_bias)
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        positions = torch.arange(TOKENS).unsqueeze(-1) * 0.3 ** torch.arange(WIDTH / 4)
        self.register_buffer("positions", torch.cat([positions.sin(), positions.cos()] * 2, dim=-1)[:, :WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.key_heads), split(self.v(x), self.key_heads)
        return self.o(self.core(self, x, q, k, v))  # type: ignore[no-any-return]


_FUSED = {"s": 3, "n": 4, "h": HEAD, "p": 2, "w": 2}


class Fused(nn.Module):
    """One projection for queries, keys and values, whose outputs lie in the order that ``pattern`` names.

    ``pattern`` lists the axes of the outputs, outermost first: s part, n heads (or p shards of w heads each), h
    coordinates. ``parts`` says which parts are q, k and v; ``transposed`` stores [in, out]; ``bias`` is added "with"
    the product, or "after" it.
    """

    def __init__(self, pattern: str, *, parts: str = "qkv", transposed: bool = False, bias: str = "with") -> None:
        super().__init__()
        self.axes, self.parts, self.transposed = pattern.split(), parts, transposed
        size = 3 * 4 * HEAD
        self.weight = nn.Parameter(torch.empty((WIDTH, size) if transposed else (size, WIDTH)))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.after = bias == "after"
        self.out = nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.transposed else self.weight.T
        if self.bias is None or self.after:
            y = x @ weight if self.bias is None else x @ weight + self.bias
        else:
            y = torch.addmm(self.bias, x.flatten(0, 1), weight).view(*x.shape[:2], -1)
        y = y.unflatten(-1, [_FUSED[a] for a in self.axes])
        order = [2 + self.axes.index(a) for a in ("s", *(("p", "w") if "p" in self.axes else "n"), "h")]
        found = y.permute(*order, 0, 1).reshape(3, 4, HEAD, *x.shape[:2]).permute(0, 3, 1, 4, 2)
        q, k, v = (found[self.parts.index(part)] for part in "qkv")
        return self.out(self.mix(q, k, v))  # type: ignore[no-any-return]

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What becomes of the heads' queries, keys and values."""
        return attend(q, k, v)


class Grouped(nn.Module):
    """One projection that holds, for each key head, its query heads, its key and its value."""

    def __init__(self, key_heads: int = 2, group: int = 2) -> None:
        super().__init__()
        self.key_heads, self.group = key_heads, group
        self.qkv = nn.Linear(WIDTH, key_heads * (group + 2) * HEAD)
        self.out = nn.Linear(key_heads * group * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).unflatten(-1, (self.key_heads, self.group + 2, HEAD)).permute(0, 2, 3, 1, 4)
        q, k, v = y[:, :, :-2], y[:, :, -2:-1], y[:, :, -1:]
        mixed = torch.softmax(q @ k.mT, dim=-1) @ v
        return self.out(mixed.permute(0, 3, 1, 2, 4).flatten(2))  # type: ignore[no-any-return]


class Written(nn.Module):
    """Raw parameters and einsum, each with its axes in the order named: i input, n heads, h coordinates."""

    def __init__(self, projections: str, output: str) -> None:
        super().__init__()
        sizes = {"i": WIDTH, "n": 4, "h": HEAD}
        self.axes, self.out_axes = projections, output
        for name in "qkv":
            self.register_parameter(name, nn.Parameter(torch.zeros([sizes[a] for a in projections])))
        self.o = nn.Parameter(torch.zeros([sizes[a] for a in output]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum(f"bti,{self.axes}->bnth", x, w) for w in (self.q, self.k, self.v))
        weights = torch.einsum("bnth,bnsh->bnts", q, k).softmax(-1)
        mixed = torch.einsum("bnts,bnsh->btnh", weights, v)
        return torch.einsum(f"btnh,{self.out_axes}->bti", mixed, self.o)


class Applied(nn.Module):
    """Raw parameters (heads, head, in) without biases; ``project`` makes (rows, heads, tokens, head) of x and one."""

    def __init__(self, project: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project = project
        self.q, self.k, self.v = (nn.Parameter(torch.zeros(4, HEAD, WIDTH)) for _ in range(3))
        self.o = nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.project(x, w) for w in (self.q, self.k))
        return self.o(attend(q, k, torch.einsum("bti,nhi->bnth", x, self.v)))  # type: ignore[no-any-return]


class Pointwise(nn.Module):
    """Convolutions with a kernel of one point, channels first; ``groups`` of the projections."""

    def __init__(self, dimensions: int = 1, groups: int = 1) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d)[dimensions - 1]
        self.extra = dimensions - 1
        self.q, self.k, self.v = (convolution(WIDTH, 4 * HEAD, 1, groups=groups) for _ in range(3))
        self.o = convolution(4 * HEAD, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT[(..., *[None] * self.extra)]
        q, k, v = (p(x).flatten(2).unflatten(1, (4, HEAD)).mT for p in (self.q, self.k, self.v))
        mixed = (torch.softmax(q @ k.mT, dim=-1) @ v).mT.flatten(1, 2)
        return self.o(mixed[(..., *[None] * self.extra)]).flatten(2).mT  # type: ignore[no-any-return]


class Torch(nn.Module):
    """``nn.MultiheadAttention`` on one sequence, or on keys and values of another, narrower one."""

    def __init__(self, *, cross: bool = False, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options)
        self.cross, self.weights = cross, weights

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention
        k, v = (x[:, :5, : a.kdim], x[:, :5, : a.vdim]) if self.cross else (x, x)
        return a(x, k, v, need_weights=self.weights)[0]  # type: ignore[no-any-return]


class Handed(Projected):
    """Linear modules whose weights are handed to ``F.multi_head_attention_forward``, their biases in one vector."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        mixed, _ = functional.multi_head_attention_forward(
            x, x, x, WIDTH, 4, None, torch.cat((self.q.bias, self.k.bias, self.v.bias)), None, None, False, 0.0,
            self.o.weight, self.o.bias, False, None, False, None, True, self.q.weight, self.k.weight, self.v.weight,
        )  # fmt: skip
        return mixed.transpose(0, 1)


class Assembled(nn.Module):
    """One weight for all three projections, whose bias is put together of those of queries and values, and zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(4 * HEAD)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(4 * HEAD), persistent=False)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * 4 * HEAD, bias=False), nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = (split(t, 4) for t in functional.linear(x, self.qkv.weight, bias).chunk(3, -1))
        return self.o(attend(q, k, v))  # type: ignore[no-any-return]


class Chunked(nn.Module):
    """One parameter for all three projections, cut in pieces before use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * 4 * HEAD, WIDTH))
        self.bias = nn.Parameter(torch.zeros(3 * 4 * HEAD))
        self.o = nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(self.weight.chunk(3), self.bias.chunk(3), strict=True)
        return self.o(attend(*(split(functional.linear(x, w, b), 4) for w, b in pieces)))  # type: ignore[no-any-return]


class Copied(Chunked):
    """Weights are rearranged into new memory before use."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.view(4, 3, HEAD, WIDTH)
        return self.o(attend(*(split(x @ weights[:, i].reshape(-1, WIDTH).T, 4) for i in range(3))))  # type: ignore[no-any-return]


class Prepared(Projected):
    """Weights are copied, or computed of several, before use: ``project`` makes what q, k and v are split from."""

    def __init__(self, project: Callable[[Any, Tensor], Sequence[Tensor]], **options: Any) -> None:
        super().__init__(**options)
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attend(*(split(y, 4) for y in self.project(self, x))))  # type: ignore[no-any-return]


class Separate(nn.Module):
    """Modules of its own for each head, of the dimensions given."""

    def __init__(self, dimensions: Sequence[int]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, d) for _ in range(3)) for d in dimensions)
        self.o = nn.Linear(sum(dimensions), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = [torch.softmax(q(x) @ k(x).mT, dim=-1) @ v(x) for q, k, v in self.heads]  # type: ignore[misc]
        return self.o(torch.cat(mixed, dim=-1))  # type: ignore[no-any-return]


class Unequal(nn.Module):
    """One projection for heads of different dimensions."""

    def __init__(self, dimensions: Sequence[int]) -> None:
        super().__init__()
        self.dimensions = list(dimensions)
        self.q, self.k, self.v = (nn.Linear(WIDTH, sum(dimensions)) for _ in range(3))
        self.o = nn.Linear(sum(dimensions), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (p(x).split(self.dimensions, dim=-1) for p in (self.q, self.k, self.v))
        mixed = [torch.softmax(q @ k.mT, dim=-1) @ v for q, k, v in zip(*parts, strict=True)]
        return self.o(torch.cat(mixed, dim=-1))  # type: ignore[no-any-return]


class Joint(nn.Module):
    """Attention of two streams to each other, the first tokens and the others, each with projections of its own.

    ``norm`` acts on queries and keys of both; without ``both`` nothing reads what the first stream's queries mix.
    """

    FIRST = 3

    def __init__(self, norm: Act | None = None, *, both: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.both = norm, both
        self.first, self.second = (
            nn.ModuleList(nn.Linear(WIDTH, 4 * HEAD, bias=bias) for _ in range(3)) for _ in range(2)
        )
        self.outs = nn.ModuleList(nn.Linear(4 * HEAD, WIDTH) for _ in range(1 + both))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.first, self.second, strict=True)
        first, second = x[:, : self.FIRST], x[:, self.FIRST :]
        q, k, v = (split(torch.cat([a(first), b(second)], dim=1), 4) for a, b in parts)
        q, k = (q, k) if self.norm is None else (self.norm(q), self.norm(k))
        mixed = attend(q, k, v)
        made = self.outs[0](mixed[:, self.FIRST :])
        other = self.outs[1](mixed[:, : self.FIRST]) if self.both else first * 0
        return torch.cat([other, made], dim=1)


class Latent(nn.Module):
    """Keys and values of a narrow latent, with a norm on it or without."""

    def __init__(self, rank: int = 8, *, norm: bool = False) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(WIDTH, rank)
        self.norm = nn.LayerNorm(rank) if norm else nn.Identity()
        self.k, self.v = (nn.Linear(rank, 4 * HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.norm(self.down(x))
        return self.o(attend(*(split(t, 4) for t in (self.q(x), self.k(latent), self.v(latent)))))  # type: ignore[no-any-return]


class Absorbed(Latent):
    """The same attention to the latent itself: the matrices of keys act on queries, those of values on what is mixed.

    They do so by an einsum, or one after the other as ``matrices``.
    """

    def __init__(self, *, matrices: bool = False) -> None:
        super().__init__(norm=True)
        self.matrices = matrices

    def forward(self, x: Tensor) -> Tensor:
        latent = self.norm(self.down(x)).unsqueeze(1)
        k, v = (p.weight.unflatten(0, (4, HEAD)) for p in (self.k, self.v))
        q = split(self.q(x), 4)
        q = q @ k if self.matrices else torch.einsum("bnth,nhr->bntr", q, k)
        mixed = torch.softmax(q @ latent.mT / HEAD**0.5, dim=-1) @ latent
        mixed = mixed @ v.mT if self.matrices else torch.einsum("bntr,nhr->bnth", mixed, v)
        return self.o(joined(mixed))  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------- outside attention

Act = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """Two linear maps with an activation between, gated or not.

    ``fused`` says where the unit's gate and its linear half are in one projection; ``middle`` acts on what the second
    map reads.
    """

    def __init__(
        self, act: Act, *, gated: bool = False, fused: str = "", middle: Act | None = None, bias: bool = True,
        units: int = 20,
    ) -> None:  # fmt: skip
        super().__init__()
        self.act, self.fused, self.middle = act, fused, middle
        self.up = nn.Linear(WIDTH, 2 * units if fused else units, bias=bias)
        self.gate = nn.Linear(WIDTH, units, bias=bias) if gated and not fused else None
        self.down = nn.Linear(units, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(x), None if self.gate is None else self.gate(x)
        if self.fused in ("gate first", "gate second"):
            gate, up = up.chunk(2, dim=-1) if self.fused == "gate first" else up.chunk(2, dim=-1)[::-1]
        elif self.fused:
            gate, up = (up[..., ::2], up[..., 1::2]) if self.fused == "gate even" else (up[..., 1::2], up[..., ::2])
        y = self.act(up) if gate is None else self.act(gate) * up
        return self.down(y if self.middle is None else self.middle(y))  # type: ignore[no-any-return]


class Chain(nn.Module):
    """Linear maps in a row of the sizes given, ``act`` between each two."""

    def __init__(self, act: Act, *sizes: int) -> None:
        super().__init__()
        ends = [WIDTH, *sizes, WIDTH]
        self.act = act
        self.maps = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(ends))

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.maps):
            x = linear(x if i == 0 else self.act(x))
        return x


class Adapted(nn.Module):
    """A linear map with a low-rank update, scaled; ``act`` between its two factors, which LoRA does not have."""

    def __init__(self, rank: int = 4, act: Act | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if self.act is None else self.act(self.a(x))
        return self.base(x) + 2.0 * self.b(y)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Gated MLPs in 3-D parameters, weighted by a router; those not in ``visited`` get no token."""

    def __init__(self, visited: Sequence[int] = (0, 1, 2), count: int = 3) -> None:
        super().__init__()
        self.visited = visited
        self.gate_up = nn.Parameter(torch.zeros(count, 2 * 20, WIDTH))
        self.down = nn.Parameter(torch.zeros(count, WIDTH, 20))
        self.router = nn.Linear(WIDTH, count)

    def forward(self, x: Tensor) -> Tensor:
        share, out = torch.softmax(self.router(x.flatten(0, 1)), dim=-1).unflatten(0, x.shape[:2]), x * 0
        for e in self.visited:
            gate, up = functional.linear(x, self.gate_up[e]).chunk(2, dim=-1)
            out = out + share[..., e, None] * functional.linear(functional.silu(gate) * up, self.down[e])
        return out


class Normed(nn.Module):
    """Attention with a norm on queries and keys: ``per`` "head" (weights for all), "heads", "width", "none".

    With ``scaled`` that function of a vector multiplies the queries, too.
    """

    def __init__(
        self, per: str = "head", rotary: Act | None = None, *, first: str = "norm", bias: bool = False,
        offset: float = 0.0, centred: bool = False, key_heads: int = 4, scaled: Act | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scaled = scaled
        self.scale = nn.Parameter(torch.ones(HEAD)) if scaled else None
        self.per, self.rotary, self.first, self.offset, self.centred = per, rotary, first, offset, centred
        self.key_heads = key_heads
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * HEAD) for _ in range(2))
        self.q_norm, self.k_norm = (self._norm(n, bias) for n in (4, key_heads))

    def _norm(self, heads: int, bias: bool) -> nn.Module:
        if self.per == "none":
            return HeadNorm(None, self.offset, bias=False, centred=self.centred)
        size = {"head": (HEAD,), "heads": (heads, 1, HEAD), "width": (heads * HEAD,)}[self.per]
        return HeadNorm(size, self.offset, bias=bias, centred=self.centred)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), split(self.v(x), self.key_heads)
        if self.per == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = split(q, 4), split(k, self.key_heads)
        turned = self.rotary is not None
        for step in ("norm", "rotary") if self.first == "norm" else ("rotary", "norm"):
            if step == "norm" and self.per != "width":
                q, k = self.q_norm(q), self.k_norm(k)
            elif step == "rotary" and turned:
                q, k = self.rotary(q), self.rotary(k)  # type: ignore[misc]
        q = q if self.scaled is None else q * self.scaled(self.scale)
        k, v = (t.repeat_interleave(4 // self.key_heads, dim=1) for t in (k, v))
        return self.o(attend(q, k, v))  # type: ignore[no-any-return]


class SubNormed(nn.Module):
    """Attention whose heads, side by side, go through a norm before the output projection."""

    def __init__(
        self, *, offset: float = 0.0, centred: bool = False, bias: bool = False, out_bias: bool = True,
        key_heads: int = 4, twice: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.key_heads, self.twice = key_heads, twice
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH, bias=out_bias)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * HEAD) for _ in range(2))
        self.norm = HeadNorm((4 * HEAD,), offset, bias=bias, centred=centred)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(p(x), self.key_heads).repeat_interleave(4 // self.key_heads, dim=1) for p in (self.k, self.v))
        y = self.norm(attend(split(self.q(x), 4), k, v))
        return self.o(y) + (y if self.twice else 0)  # type: ignore[no-any-return]


class Differential(nn.Module):
    """The difference of two attentions to the same values, of which there are twice as many; each head normalised.

    The values of a head are those of two halves of the key heads, side by side.
    """

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * HEAD) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x), 4), split(self.k(x), self.key_heads), split(self.v(x), self.key_heads)
        k = k.repeat_interleave(4 // self.key_heads, dim=1)
        mixed = []
        for half_ in v.chunk(2, dim=1):
            values = half_.repeat(1, 2, 1, 1).repeat_interleave(4 // self.key_heads, dim=1)
            mixed.append(torch.softmax(q @ k.mT, dim=-1) @ values)
        first, second = torch.cat(mixed, dim=-1).chunk(2, dim=1)
        y = first - 0.3 * second
        return self.o(joined(y / y.norm(dim=-1, keepdim=True)))  # type: ignore[no-any-return]


class HeadNorm(nn.Module):
    """A norm over the last axis with a weight of any shape that broadcasts, as weight or as 1 + weight, or none."""

    def __init__(self, size: tuple[int, ...] | None, offset: float, *, bias: bool, centred: bool) -> None:
        super().__init__()
        self.offset, self.centred = offset, centred
        self.weight = None if size is None else nn.Parameter(torch.full(size, 1 - offset))
        self.bias = nn.Parameter(torch.zeros(size)) if size is not None and bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        y = y if self.weight is None else y * (self.offset + self.weight)
        return y if self.bias is None else y + self.bias


class Made(Protocol):
    """A case of a test: something that makes a module."""

    @property
    def module(self) -> Callable[[], nn.Module]:
        """Makes it."""
        ...


def finder(cases: Mapping[str, Made]) -> Callable[[str], tuple[nn.Module, SymmetryMap]]:
    """The model around a case's module, and what is found on it; each made and searched once."""

    @cache
    def find(name: str) -> tuple[nn.Module, SymmetryMap]:
        model = Residual(cases[name].module())
        return model, find_symmetries(model, inputs())

    return find
