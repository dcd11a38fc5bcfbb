"""Gains of norms: which fold into what reads them, and which do not because something else notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import Gain
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.verify import verify
from tests.families import randomise
from tests.symmetry.handmade import (
    TOKENS,
    WIDTH,
    Norm,
    Prepared,
    Projected,
    Residual,
    Running,
    half,
    inputs,
    joined,
    outputs,
    split,
)

Forward = Callable[["Reading", Tensor], Tensor]


class Reading(Running):
    """A norm and what reads it."""

    def __init__(self, forward: Forward, norm: nn.Module | None = None, **modules: nn.Module) -> None:
        super().__init__(forward, norm=Norm() if norm is None else norm, **modules)


class Named(nn.Module):
    """A layer norm whose parameters have other names, around one that has none."""

    def __init__(self, gain: str, shift: str, offset: float = 0.0) -> None:
        super().__init__()
        self.names, self.offset = (gain, shift), offset
        self.plain = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.register_parameter(gain, nn.Parameter(torch.full((WIDTH,), 1 - offset)))
        self.register_parameter(shift, nn.Parameter(torch.zeros(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        gain, shift = (getattr(self, name) for name in self.names)
        return self.plain(x) * (gain + self.offset) + shift  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Embeddings that read a norm too, through their one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, WIDTH), Norm()
        self.double().eval()
        randomise(self, 0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[1], device=x.device)
        return self.norm(x + self.table(tokens)) @ self.table.weight.T  # type: ignore[no-any-return]


class Raw(nn.Module):
    """x W with a parameter [in, out], in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2, dim=1)
        return torch.tanh(x @ first) + torch.cos(x @ second)


class Block(nn.Module):
    """A norm inside a submodule that returns what the norm wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return y, x


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def _channels(m: Reading, x: Tensor) -> Tensor:
    return m.a(m.norm(x).mT).mT  # type: ignore[no-any-return, operator]


def _into_attention(m: Reading, x: Tensor) -> Tensor:
    y = m.norm(x)
    return m.a(y, y, y, need_weights=False)[0]  # type: ignore[no-any-return, operator]


def _windows(m: Reading, x: Tensor) -> Tensor:
    """Tokens in another order, in new memory."""
    y = m.norm(x).transpose(0, 1).contiguous()
    return m.a(y).transpose(0, 1)  # type: ignore[no-any-return, operator]


def _in_place(m: Reading, x: Tensor) -> Tensor:
    y = m.norm(x)
    y += x
    return m.a(y)  # type: ignore[no-any-return, operator]


def _in_place_relu(m: Reading, x: Tensor) -> Tensor:
    return m.a(functional.relu(m.norm(x), inplace=True))  # type: ignore[no-any-return, operator]


def _picked_in_place(m: Reading, x: Tensor) -> Tensor:
    y = m.norm(x)[:, [0, 2]]
    y += 1.0
    return m.a(y).sum(1, keepdim=True)  # type: ignore[no-any-return, operator]


def _written(m: Reading, x: Tensor) -> Tensor:
    y, kept = m.norm(x), torch.zeros_like(x)
    kept[:, 1:] = y[:, 1:]
    return m.a(y) + torch.tanh(kept)  # type: ignore[no-any-return, operator]


def _written_for_a_map(m: Reading, x: Tensor) -> Tensor:
    y, kept = m.norm(x), torch.ones_like(x)
    kept[:, 1:] = y[:, 1:]
    return m.a(y) + m.b(kept)  # type: ignore[no-any-return, operator]


def _in_place_shift(m: Reading, x: Tensor) -> Tensor:
    y = m.norm(x)
    y[:, 0] += 1.0
    return m.a(y)  # type: ignore[no-any-return, operator]


@dataclass(frozen=True)
class Case:
    """A model; the module of the norm that folds -> the parameters that read it."""

    model: Callable[[], nn.Module]
    readers: Mapping[str, tuple[str, ...]]


def reads(forward: Forward, *readers: str, **modules: Callable[[], nn.Module]) -> Case:
    made = {"norm": tuple(readers)} if readers else {}
    return Case(lambda: Reading(forward, **{n: m() for n, m in modules.items()}), made)


A, B = "a.weight", "b.weight"

CASES: dict[str, Case] = {
    "a linear map": reads(lambda m, x: m.a(m.norm(x)), A, a=linear),
    "two linear maps": reads(lambda m, x: m.a(y := m.norm(x)) * m.b(y), A, B, a=linear, b=linear),
    "a linear map of Conv1D": reads(lambda m, x: m.a(m.norm(x)), A, a=lambda: Conv1D(WIDTH, WIDTH)),
    "a pointwise convolution": reads(_channels, A, a=lambda: nn.Conv1d(WIDTH, WIDTH, 1)),
    "a fused parameter": reads(lambda m, x: m.a(m.norm(x)), A, a=Raw),
    "nn.MultiheadAttention": reads(
        _into_attention, "a.in_proj_weight", a=lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    ),
    "attention": reads(lambda m, x: m.a(m.norm(x)), "a.q.weight", "a.k.weight", "a.v.weight", a=Projected),
    "one token only": reads(lambda m, x: m.a(m.norm(x)[:, :1]), A, a=linear),
    "tokens in another order, in new memory": reads(_windows, A, a=linear),
    "dropout in between": reads(
        lambda m, x: m.a(m.drop(m.norm(x))), A, a=linear, drop=lambda: nn.Dropout(0.5)
    ),
    "called on two inputs": reads(lambda m, x: m.a(m.norm(x)) + m.b(m.norm(x.flip(1))), A, B, a=linear, b=linear),
    "a norm inside a submodule": Case(
        lambda: Reading(lambda m, x: m.a(m.block(x)[0]), a=linear(), block=Block()), {"block.norm": (A,)}
    ),
    "tokens that are picked": reads(lambda m, x: m.a(m.norm(x)[:, [3, 1, 1]]).sum(1, keepdim=True), A, a=linear),
    "tokens by a mask": reads(
        lambda m, x: m.a(m.norm(x)[torch.arange(TOKENS).expand(x.shape[:2]) % 3 == 1]).sum(0), A, a=linear
    ),
    "times a number": reads(lambda m, x: m.a(m.norm(x) * 0.5) + m.b(2 * m.norm(x)), A, B, a=linear, b=linear),
    "rows times numbers": reads(lambda m, x: m.a(m.norm(x) * x.sigmoid().mean(-1, keepdim=True)), A, a=linear),
    "rows times numbers made of themselves": reads(
        lambda m, x: m.a(m.norm(x) * torch.sigmoid(m.b(m.norm(x)))), B, A, a=linear, b=lambda: nn.Linear(WIDTH, 1)
    ),
    "features times numbers": reads(lambda m, x: m.a(m.norm(x) * x.sigmoid()), A, a=linear),
    "divided": reads(lambda m, x: m.a(m.norm(x) / (1 + x * x)), A, a=linear),
    "what it divides": reads(lambda m, x: m.a(x / (3 + m.norm(x).square())), a=linear),
    "what it divides, as it is": reads(lambda m, x: m.a(x / m.norm(x)), a=linear),
    "times itself": reads(lambda m, x: m.a((y := m.norm(x)) * y), a=linear),
    "a mean of tokens": reads(lambda m, x: m.a(m.norm(x).mean(1, keepdim=True)), A, a=linear),
    "a mean of features": reads(lambda m, x: m.a(m.norm(x).mean(-1, keepdim=True).expand_as(x)), a=linear),
    "a sum of tokens, weighed": reads(
        lambda m, x: m.a((m.norm(x) * x.mean(-1, keepdim=True).softmax(1)).sum(1, keepdim=True)), A, a=linear
    ),
    "tokens pooled as channels": reads(
        lambda m, x: m.a(functional.adaptive_avg_pool1d(m.norm(x).mT, 1).flatten(1)[:, None]), A, a=linear
    ),
    "tokens mixed": reads(lambda m, x: m.a((x @ x.mT).softmax(-1) @ m.norm(x)), A, a=linear),
    "tokens mixed by an einsum": reads(
        lambda m, x: m.a(torch.einsum("bst,btc->bsc", torch.tanh(x @ x.mT), m.norm(x))), A, a=linear
    ),
    "features mixed": reads(lambda m, x: m.a(m.norm(x) @ torch.tanh(x[0].T @ x[0])), a=linear),
    "zeros beside it": reads(
        lambda m, x: m.a(torch.cat([m.norm(x)[:, :3], torch.zeros_like(x)[:, 3:]], 1)), A, a=linear
    ),
    "padded": reads(lambda m, x: m.a(functional.pad(m.norm(x), (0, 0, 1, 2)))[:, :TOKENS], A, a=linear),
    "padded with ones": reads(lambda m, x: m.a(functional.pad(m.norm(x), (0, 0, 1, 2), value=1.0))[:, 1:-2], a=linear),
    "masked": reads(lambda m, x: m.a(m.norm(x).masked_fill(x > 1, 0.0)), A, a=linear),
    "masked with ones": reads(lambda m, x: m.a(m.norm(x).masked_fill(x > 1, 1.0)), a=linear),
    "or zero": reads(lambda m, x: m.a(torch.where(x > 0, m.norm(x), torch.zeros_like(x))), A, a=linear),
    "or something else": reads(lambda m, x: m.a(torch.where(x > 0, m.norm(x), x)), a=linear),
    "compared": reads(lambda m, x: m.a(y := m.norm(x)) * (y > 0.3), a=linear),
    "the place of the largest": reads(
        lambda m, x: m.a(y := m.norm(x)) + x.gather(-1, y.argmax(-1, keepdim=True)), a=linear
    ),
    "looked at for numbers that are none": reads(
        lambda m, x: m.a(y := m.norm(x)).masked_fill(y.isnan() | torch.isinf(y), 0.0), A, a=linear
    ),
    "written somewhere, which is read": reads(_written, a=linear),
    "written somewhere, which a map reads": reads(_written_for_a_map, a=linear, b=linear),
    "channels in new memory, in another order": reads(
        lambda m, x: m.a(m.norm(x).mT.contiguous()[:, torch.arange(WIDTH).flip(0)].mT), a=linear
    ),
    "channels in new memory, tokens in another order": reads(
        lambda m, x: m.a(m.norm(x).mT.contiguous()[..., torch.arange(TOKENS).flip(0)].mT), A, a=linear
    ),
    "the largest of the tokens": reads(lambda m, x: m.a(m.norm(x).amax(1, keepdim=True)), a=linear),
    "a row of numbers for each": reads(lambda m, x: m.a(m.norm(x)[:, :1] * x.mean(-1, keepdim=True)), A, a=linear),
    "its type alone": reads(lambda m, x: m.a(y := m.norm(x)) + torch.tanh(x).type_as(y).flip(1), A, a=linear),
    "another type": reads(
        lambda m, x: m.a(m.norm(x).type(torch.float32).double()) * m.b(m.norm(x).float().type_as(x)),
        A, B, a=linear, b=linear,
    ),
    "its shape alone": reads(lambda m, x: m.a(y := m.norm(x)) + torch.ones_like(y) * y.new_zeros(WIDTH), A, a=linear),
    "tokens by their number": reads(
        lambda m, x: m.a(m.norm(x).index_select(1, torch.tensor([4, 2]))).sum(1, keepdim=True), A, a=linear
    ),
    "tokens several times": reads(
        lambda m, x: m.a(m.norm(x).repeat_interleave(2, dim=1)).cumsum(1)[:, ::2], A, a=linear
    ),
    "features that are picked": reads(
        lambda m, x: m.a(m.norm(x)[..., torch.arange(WIDTH).flip(0)]), a=linear
    ),
    "features turned around": reads(lambda m, x: m.a(m.norm(x).flip(-1)), a=linear),
    "features that roll": reads(lambda m, x: m.a(m.norm(x).roll((1, 1), dims=(1, 2))), a=linear),
    "picked tokens in place": reads(_picked_in_place, a=linear),
    "put together with something else": reads(
        lambda m, x: m.a(y := m.norm(x)) + sum(m.b(torch.cat([y, x])).chunk(2)), a=linear, b=linear
    ),
    "the residual too": reads(lambda m, x: m.a(y := m.norm(x)) + y, a=linear),
    "the residual too, in place": reads(_in_place, a=linear),
    "a shift in place": reads(_in_place_shift, a=linear),
    "an activation too": reads(lambda m, x: m.a(y := m.norm(x)) + torch.tanh(y), a=linear),
    "a gate of itself": reads(lambda m, x: (y := m.norm(x)) * torch.sigmoid(m.a(y)), a=linear),
    "an activation in between, in place": reads(_in_place_relu, a=linear),
    "an activation in between": reads(lambda m, x: m.a(functional.gelu(m.norm(x))), a=linear),
    "its own products": reads(lambda m, x: m.a(y := m.norm(x)) + (y @ y.mT).softmax(-1) @ x, a=linear),
    "a part of it": reads(lambda m, x: m.a(m.norm(x)[..., :10]), a=lambda: nn.Linear(10, WIDTH)),
    "a map of several tokens": reads(_channels, A, a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "one of each channel": reads(_channels, A, a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding="same", groups=WIDTH)),
    "one of groups of channels": reads(_channels, a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)),
    "one of channels and another of all": reads(
        lambda m, x: _channels(m, x) + m.b(m.norm(x).mT.unsqueeze(-1)).squeeze(-1).mT, A, B,
        a=lambda: nn.Conv1d(WIDTH, WIDTH, 5, padding=2, padding_mode="circular", groups=WIDTH),
        b=lambda: nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0), padding_mode="reflect"),
    ),
    "one of each channel, twice": reads(
        lambda m, x: _channels(m, x).unflatten(-1, (WIDTH, 2)).sum(-1),
        a=lambda: nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1, groups=WIDTH),
    ),
    "one of each channel, that spreads tokens": reads(
        lambda m, x: _channels(m, x)[:, ::2], A,
        a=lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2, groups=WIDTH),
    ),
    "one with holes, of three dimensions, its weight and input by name": reads(
        lambda m, x: functional.conv3d(
            input=m.norm(x).mT[..., None, None], weight=m.a.weight, padding=(2, 0, 0), dilation=(2, 1, 1)
        )[..., 0, 0].mT,
        A, a=lambda: nn.Conv3d(WIDTH, WIDTH, (3, 1, 1), bias=False),
    ),
    "one of a sample at a time": reads(
        lambda m, x: torch.stack([m.a(y.T).T for y in m.norm(x)]), A, a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    ),
    "one whose weight is made of others": reads(
        lambda m, x: functional.conv1d(m.norm(x).mT, m.a.weight.tanh(), padding=1).mT,
        a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, bias=False),
    ),
    "one that spreads tokens": reads(
        lambda m, x: _channels(m, x)[:, ::2], A, a=lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2)
    ),
    "a map of several tokens that reads something else too": reads(
        lambda m, x: _channels(m, x) + m.a(x.mT).mT, a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    ),
    "a map of several tokens whose weight something else has": reads(
        lambda m, x: _channels(m, x) + functional.linear(x, m.a.weight[..., 0]),
        a=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    ),
    "a map of several features": reads(
        lambda m, x: m.a(m.norm(x)), a=lambda: nn.Conv1d(TOKENS, TOKENS, 3, padding=1)
    ),
    "a map of as many tokens": reads(
        lambda m, x: m.a(m.norm(x.repeat(1, WIDTH, 1)[:, :WIDTH]).mT).mT[:, :TOKENS], a=linear
    ),
    "a map that reads something else too": reads(lambda m, x: m.a(m.norm(x)) + m.a(x), a=linear),
    "a map that reads two norms": reads(
        lambda m, x: m.a(m.norm(x)) + m.a(m.other(x)), a=linear, other=lambda: Norm()
    ),
    "grouped convolution": reads(_channels, a=lambda: nn.Conv1d(WIDTH, WIDTH, 1, groups=4)),
    "half of a parameter": reads(
        lambda m, x: functional.linear(m.norm(x), m.a.weight[:WIDTH]) + functional.linear(x, m.a.weight[WIDTH:]),
        A, a=lambda: nn.Linear(WIDTH, 2 * WIDTH, bias=False),
    ),
    "the middle of a parameter": reads(
        lambda m, x: functional.linear(m.norm(x), m.a.weight[3:-5], m.a.bias[3:-5]) + functional.linear(
            x, m.a.weight[-5:], m.a.bias[-5:]
        ).sum(-1, keepdim=True),
        A, a=lambda: nn.Linear(WIDTH, WIDTH + 8),
    ),
    "two norms, each half of a parameter": Case(
        lambda: Reading(
            lambda m, x: functional.linear(m.norm(x), m.a.weight[:, :WIDTH].T, m.a.bias[:WIDTH]) * functional.linear(
                m.other(x), m.a.weight[:, WIDTH:].T, m.a.bias[WIDTH:]
            ),
            a=Conv1D(2 * WIDTH, WIDTH), other=Norm(bias=True),
        ),
        {"norm": (A,), "other": (A,)},
    ),
    "parts that overlap": reads(
        lambda m, x: functional.linear(m.norm(x), m.a.weight[:WIDTH]) + functional.linear(x, m.a.weight[-WIDTH:]),
        a=lambda: nn.Linear(WIDTH, 2 * WIDTH - 1, bias=False),
    ),
    "two parts with others between": reads(
        lambda m, x: functional.linear(y := m.norm(x), m.a.weight[:WIDTH]) + functional.linear(y, m.a.weight[-WIDTH:]),
        a=lambda: nn.Linear(WIDTH, 2 * WIDTH + 3, bias=False),
    ),
    "the memory of a decoder": Case(
        lambda: Reading(
            lambda m, x: m.a(x, m.norm(x.flip(1))), a=nn.TransformerDecoderLayer(WIDTH, 4, WIDTH, 0.0, batch_first=True)
        ),
        {"norm": ("a.multihead_attn.in_proj_weight",)},
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def gains(found: SymmetryMap) -> list[Gain]:
    return [f for f in found.folds if isinstance(f, Gain)]


@each_case
def test_a_gain_folds_into_all_that_reads_it_or_not_at_all(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    assert {g.module: tuple(r.weight for r in g.readers) for g in gains(found)} == CASES[name].readers


@each_case
def test_what_does_not_fold_is_not_even_claimed(name: str) -> None:
    """A claim that the proof on the model has to refute is one that a score warns of."""
    found = find_symmetries(CASES[name].model(), inputs(), prove=False)
    assert {g.module: tuple(r.weight for r in g.readers) for g in gains(found)} == CASES[name].readers


@each_case
def test_every_gain_found_holds_on_the_model(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    proof = verify(model, found, [inputs(1), inputs(2)], each=True)
    assert proof.map == found
    assert all((c.deviation or 0.0) < 1e-12 and (c.control or 0.0) > 1e-4 for c in proof.claims)


def test_a_norm_with_a_bias_whose_rows_are_multiplied_does_not_fold() -> None:
    """Half of its bias would have to be added, or three times as much; a mean has the bias itself."""
    ways: dict[Forward, bool] = {
        lambda m, x: m.a(m.norm(x) * 0.5): False,  # type: ignore[operator]
        lambda m, x: m.a(m.norm(x)[:, :3].sum(1, keepdim=True)): False,  # type: ignore[operator]
        lambda m, x: m.a(m.norm(x).mean(1, keepdim=True)): True,  # type: ignore[operator]
    }
    for forward, folds in ways.items():
        for bias in (False, True):
            model = Reading(forward, Norm(bias=bias), a=linear())
            assert len(gains(find_symmetries(model, inputs(), prove=False))) == (folds or not bias)


@pytest.mark.parametrize(
    ("padding", "bias", "folds"), [(0, True, True), ("valid", True, True), (1, True, False), (0, False, False)]
)
def test_a_bias_folds_into_a_convolution_that_has_one_and_reads_no_zeros(
    padding: int | str, bias: bool, folds: bool
) -> None:
    convolution = nn.Conv2d(WIDTH, WIDTH, (2, 3), stride=(1, 2), padding=padding, bias=bias)
    model = Reading(
        lambda m, x: m.a(m.norm(x).mT.unflatten(-1, (2, -1))).flatten(1)[:, None, :WIDTH] + m.b(m.norm(x)),  # type: ignore[operator]
        Norm(bias=True), a=convolution, b=linear(),
    )  # fmt: skip
    batch = {"x": inputs()["x"][:, : TOKENS // 2 * 2]}
    found = find_symmetries(model, batch)
    (gain,) = gains(found)
    assert (gain.folds_bias, gain.dimension) == (folds, (1 + folds) * WIDTH)
    before = outputs(model, batch)
    found.apply(model, found.random_element(model, 0, 10.0))
    torch.testing.assert_close(outputs(model, batch), before, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        gain.canonicalise(dict(model.named_parameters()))
    torch.testing.assert_close(outputs(model, batch), before, rtol=1e-10, atol=1e-10)


def test_norms_of_a_pyramid_fold_into_the_convolutions_that_make_keys_shorter() -> None:
    """All but those that the residual stream is made of, and the last one, which the model returns."""
    model = tiny.build("segformer")
    tiny.randomise(model, 0)
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    found = find_symmetries(model, synthetic(model))
    assert norms - {g.module for g in gains(found)} == {
        "stages.3.layer_norm", *(f"stages.{n}.patch_embeddings.layer_norm" for n in range(4))
    }  # fmt: skip
    convolved = [g for g in gains(found) if any(r.points == 2 for r in g.readers)]
    # Two blocks in each stage but the last; between stages zeros around.
    assert [g.folds_bias for g in convolved] == [True, True, False] * 3


def test_the_gain_of_a_batch_norm_folds_into_what_reads_its_channels() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = Reading(
        lambda m, x: m.a(m.norm(x.mT).mT) + m.b(m.norm(x.mT)).mT, norm, a=linear(), b=nn.Conv1d(WIDTH, WIDTH, 1)
    )
    nn.init.normal_(norm.running_mean)
    found = find_symmetries(model, inputs())
    (gain,) = gains(found)
    assert (gain.gain, gain.dimension) == ("norm.weight", 2 * WIDTH)
    before = outputs(model, inputs())
    found.apply(model, found.random_element(model, 0, 10.0))
    torch.testing.assert_close(outputs(model, inputs()), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tokens", [WIDTH, WIDTH - 1])
def test_where_sizes_do_not_say_which_axis_counts_channels_nothing_false_is_claimed(tokens: int) -> None:
    """As many tokens as channels: a linear map of tokens would look like one of channels."""
    channels = Reading(lambda m, x: m.a(m.norm(x.mT).mT), nn.BatchNorm1d(WIDTH), a=linear())  # type: ignore[operator]
    across = Reading(
        lambda m, x: m.a(m.norm(x.mT)).mT,  # type: ignore[operator]
        nn.BatchNorm1d(WIDTH), a=nn.Linear(tokens, tokens),
    )  # fmt: skip
    batch = {"x": torch.randn(3, tokens, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    assert len(gains(find_symmetries(channels, batch, prove=False))) >= (tokens != WIDTH)
    assert gains(find_symmetries(across, batch, prove=False)) == []


def test_a_norm_whose_output_the_model_returns_too_does_not_fold() -> None:
    class Returning(nn.Module):
        """As models without a head do: the last norm's output, and what a pooler makes of it."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.pooler = Norm(), linear()
            self.double().eval()
            randomise(self, 0)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.norm(x)
            return {"last": y, "pooled": torch.tanh(self.pooler(y[:, 0]))}

    assert gains(find_symmetries(Returning(), inputs())) == []


def test_a_weight_tied_to_one_that_reads_something_else_does_not_take_a_gain() -> None:
    model = Reading(lambda m, x: m.a(m.norm(x)) + m.b(x), a=linear(), b=linear())
    model.b.weight = model.a.weight  # type: ignore[union-attr]
    assert gains(find_symmetries(model, inputs())) == []


def test_a_weight_tied_to_one_that_reads_the_norm_too_takes_its_gain_once_or_not_at_all() -> None:
    model = Reading(lambda m, x: torch.tanh(m.a(m.norm(x))) + m.b(m.norm(x)), a=linear(), b=linear())
    model.b.weight = model.a.weight  # type: ignore[union-attr]
    found = find_symmetries(model, inputs())
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_embeddings_that_read_the_norm_too_do_not_take_its_gain() -> None:
    assert gains(find_symmetries(Tied(), inputs(), prove=False)) == []


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("names", [("gamma", "beta"), ("a_2", "b_2"), ("scale", "shift")])
def test_the_parameters_of_a_norm_may_have_any_names(names: tuple[str, str], offset: float) -> None:
    model = Reading(lambda m, x: m.a(m.norm(x)), norm=Named(*names, offset), a=linear())
    found = find_symmetries(model, inputs())
    (gain,) = gains(found)
    assert (gain.gain, gain.bias, gain.offset) == (f"norm.{names[0]}", f"norm.{names[1]}", offset)
    assert gain.dimension == 2 * WIDTH
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_a_norm_shared_by_two_places_does_not_fold_where_one_of_them_is_no_linear_map() -> None:
    model = Reading(lambda m, x: m.a(m.norm(x)) + torch.tanh(m.norm(x.flip(1))), a=linear())
    assert gains(find_symmetries(model, inputs())) == []


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("norm_bias", "reader_bias"), [(False, True), (True, True), (True, False)])
def test_offset_and_bias_are_told_and_a_bias_folds_only_into_a_bias(
    offset: float, norm_bias: bool, reader_bias: bool
) -> None:
    model = Reading(lambda m, x: m.a(m.norm(x)), norm=Norm(offset=offset, bias=norm_bias), a=linear(), b=linear())
    if not reader_bias:
        model.a = linear(bias=False).double()
    found = find_symmetries(model, inputs())
    (gain,) = gains(found)
    assert gain.offset == offset
    assert gain.folds_bias == (norm_bias and reader_bias)
    assert gain.dimension == WIDTH * (2 if norm_bias and reader_bias else 1)
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_a_gain_of_zero_cannot_carry_a_bias_that_does_not_fold() -> None:
    model = Reading(lambda m, x: m.a(m.norm(x)), norm=Norm(bias=True), a=linear(bias=False))
    with torch.no_grad():
        model.norm.weight[3] = 0.0  # type: ignore[index]
    assert gains(find_symmetries(model, inputs())) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_models_fold_the_same_gains(dtype: torch.dtype) -> None:
    model = CASES["two linear maps"].model().to(dtype)
    found = find_symmetries(model, {"x": inputs()["x"].to(dtype)})
    assert [g.module for g in gains(found)] == ["norm"]


def test_frozen_norms_and_readers_fold_like_others_and_stay_frozen() -> None:
    model = CASES["a linear map"].model().requires_grad_(False)
    assert [g.module for g in gains(find_symmetries(model, inputs()))] == ["norm"]
    assert not any(p.requires_grad for p in model.parameters())


def test_outputs_stay_when_all_gains_are_one() -> None:
    model = CASES["attention"].model()
    base = outputs(model, inputs())
    weights = {n: p.detach() for n, p in model.named_parameters()}
    for fold in find_symmetries(model, inputs()).folds:
        fold.canonicalise(weights)
    assert torch.equal(model.norm.weight, torch.ones(WIDTH, dtype=torch.float64))  # type: ignore[arg-type]
    assert float((outputs(model, inputs()) - base).norm() / base.norm()) < 1e-13


@pytest.mark.parametrize(
    ("change", "dimension"),
    [
        (torch.clone, 2 * WIDTH),
        (lambda w: w.bfloat16().to(w.dtype), 2 * WIDTH),
        (lambda w: w.T.contiguous().T, 2 * WIDTH),
        # A bias of the norm would come out times the number, or masked.
        (lambda w: 0.3 * w, WIDTH),
        (lambda w: w * (torch.arange(WIDTH) % 3 > 0), WIDTH),
    ],
    ids=["copied", "in half precision", "turned in memory", "times a number", "masked"],
)
def test_a_norm_folds_into_weights_that_are_copied_before_use(
    change: Callable[[Tensor], Tensor], dimension: int
) -> None:
    def project(m: Prepared, x: Tensor) -> list[Tensor]:
        return [functional.linear(x, change(p.weight), p.bias) for p in (m.q, m.k, m.v)]

    model = Residual(nn.Sequential(nn.LayerNorm(WIDTH), Prepared(project)))
    found = find_symmetries(model, inputs())
    assert [f.dimension for f in found.folds if isinstance(f, Gain)] == [dimension]
    assert found.dropped == ()
    assert all(c.status == "holds" for c in verify(model, found, [inputs(1)], each=True).claims)


class Keys(nn.Module):
    """Attention whose keys have no bias, or a part of what may follow from that."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.sink = nn.Parameter(torch.zeros(4, 1, WIDTH // 4))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(linear(x), 4) for linear in (self.q, self.k, self.v))
        if self.way == "normalised":
            k = functional.normalize(k, dim=-1)
        if self.way == "a sink":
            k, v = (torch.cat([self.sink.expand(len(x), -1, -1, -1), y], 2) for y in (k, v))
        if self.way == "turned":
            q, k = half(q), half(k)
        logits = q @ k.mT
        if self.way == "masked":
            logits = logits.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        weights = torch.sigmoid(logits) if self.way == "sigmoids" else logits.softmax(-1)
        if self.way == "causal":
            return self.o(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))  # type: ignore[no-any-return]
        mixed = self.o(joined(weights @ v))
        return mixed + torch.tanh(self.k(x)) if self.way == "seen" else mixed  # type: ignore[no-any-return]


@pytest.mark.parametrize("saturated", [False, True])
@pytest.mark.parametrize(
    ("way", "folds"),
    [("plain", True), ("masked", True), ("causal", True), ("turned", False), ("a sink", False), ("normalised", False),
     ("sigmoids", False), ("seen", False)],
)  # fmt: skip
def test_a_bias_of_a_norm_folds_where_keys_that_have_none_need_none(way: str, folds: bool, saturated: bool) -> None:
    """What it adds to all of them a softmax does not see: of each query the same to every logit.

    Of a saturated one only a single weight of a row is not zero.
    """
    model = Reading(lambda m, x: m.a(m.norm(x)), Norm(bias=True), a=Keys(way))  # type: ignore[operator]
    if saturated:
        model.get_parameter("a.q.weight").data.mul_(1e5)
    found = find_symmetries(model, inputs(), prove=False)
    (gain,) = gains(found)
    assert (gain.folds_bias, gain.dimension) == (folds, (1 + folds) * WIDTH)
    assert [r.weight for r in gain.readers if r.shiftable] == ["a.k.weight"] * folds
    if not saturated:
        assert verify(model, found, [inputs(1), inputs(2)], each=True).map == found
    before = outputs(model, inputs(1))
    with torch.no_grad():
        gain.canonicalise(dict(model.named_parameters()))
    assert bool(model.norm.bias.any()) is not folds
    torch.testing.assert_close(outputs(model, inputs(1)), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["whisper", "beit"])
def test_families_without_biases_of_keys_fold_all_of_their_norms_biases(family: str) -> None:
    found = find_symmetries(tiny.build(family), synthetic(tiny.build(family)))
    folds = [g for g in gains(found) if any(r.shiftable for r in g.readers)]
    assert folds
    assert all(g.folds_bias for g in gains(found) if g.bias)
