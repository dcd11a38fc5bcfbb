"""A small attention model written out in plain torch, in variants whose symmetries differ by one line."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

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
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (self.offset + self.weight)
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
