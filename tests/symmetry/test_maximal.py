"""Nothing is left out: what is found has as many dimensions as there are directions that the function does not feel.

By brute force: every linear map of the features of one head onto each other, on either side of a pair, is a direction
in which the weights of a layer can move. The derivatives of the model's outputs along all of them, in double precision,
have a null space. Its dimension has to be that of the symmetries found, of the means of heads as many as there are
coordinates (which direction of the inputs is added makes no difference to these maps).

Of very small models all directions are tried, those of each weight by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import Mean
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.trials.probe import Widened, double_by_default

HEAD = 8
TOKENS = 47
NOTHING = 1e-9
"""Singular value, relative to the largest, of a direction that is not felt: rounding is 1e-14."""
SUMS = 24
"""Random sums of the outputs of one input."""
MORE = 40
"""Derivatives of how many more random sums of the outputs are taken than there are directions: they tell all."""


@dataclass(frozen=True)
class Case:
    """A family; patterns of the names of its first layer's projections whose features meet, and their feature axis."""

    type: str
    kind: str
    first: str
    second: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    axis: int = 0
    """Of the second one: outputs (0) or, of an output projection, inputs (1)."""


LLAMA = {n: rf"layers\.0\.self_attn\.{n}_proj\.weight$" for n in "qkvo"}
SWIN = {n: rf"layers\.0\.blocks\.0\..*{n}\.weight$" for n in ("query", "key")}
ROUGH = {"rms_norm_eps": 1e-2, "layer_norm_eps": 1e-2}
"""So that norms feel lengths, which they do not where this is zero."""


def _qk(type_: str, **attributes: Any) -> Case:
    return Case(type_, "qk", LLAMA["q"], LLAMA["k"], attributes)


def _vo(type_: str, **attributes: Any) -> Case:
    return Case(type_, "vo", LLAMA["v"], LLAMA["o"], attributes, axis=1)


CASES = {
    "BERT": Case("bert", "qk", r"layer\.0\..*\.query\.weight$", r"layer\.0\..*\.key\.weight$"),
    "rotary": _qk("llama"),
    "rotary on a part": _qk("phi"),
    "layer norms": _qk("cohere", use_qk_norm=True, **ROUGH),
    "norms without weights": Case("swinv2", "qk", SWIN["query"], SWIN["key"]),
    "values": _vo("llama"),
    "normalised values": _vo("gemma4_text", **ROUGH),
    "gates": _vo("afmoe", **ROUGH),
    "a norm of all heads": _vo("bitnet", **ROUGH),
}


def _only(model: nn.Module, pattern: str) -> str:
    (name,) = (n for n, _ in model.named_parameters() if re.search(pattern, n))
    return name


def derivatives(model: nn.Module, weights: Sequence[Tensor], count: int) -> Iterator[tuple[Tensor, ...]]:
    """Of so many random sums of outputs in these weights, on inputs of several lengths."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.requires_grad_(any(p is w for w in weights))
    for seed in range(-(-count // SUMS)):
        with Widened(), double_by_default():
            out = model(**synthetic(model, tokens=TOKENS - seed % 5, seed=seed))[0].flatten()
            for _ in range(min(SUMS, count - seed * SUMS)):
                mix = torch.randn(out.shape, generator=generator, dtype=torch.float64)
                yield torch.autograd.grad(out, weights, mix, retain_graph=True)


def null_dimension(rows: Tensor) -> int:
    """Dimension of the null space of (sums, directions), whatever the lengths of the rows."""
    values = torch.linalg.svdvals(rows / rows.norm(dim=1, keepdim=True))
    return int((values <= NOTHING * values[0]).sum())


def directions_not_felt(model: nn.Module, sides: list[tuple[str, int]]) -> int:
    """Dimension of the null space over all maps of one feature of a head onto another, on both sides."""
    parameters = dict(model.named_parameters())
    weights, terms = [], []
    for side, (name, axis) in enumerate(sides):
        weights.append(parameters[name])
        terms.append((side, weights[-1].detach().movedim(axis, 0), axis))
        bias = parameters.get(name.removesuffix("weight") + "bias") if axis == 0 else None
        if bias is not None:
            weights.append(bias)
            terms.append((side, bias.detach()[:, None], 0))
    count = sum(HEAD * len(w) for side, w, _ in terms if w.shape[1] > 1)
    rows = []
    for gradient in derivatives(model, weights, count + MORE):
        # Along what adds feature b to feature a: the product of the derivative in a with what b is.
        along = [torch.zeros(len(parameters[name].movedim(axis, 0)), HEAD, dtype=torch.float64) for name, axis in sides]
        for g, (side, w, axis) in zip(gradient, terms, strict=True):
            mine, heads = (x.reshape(-1, HEAD, w.shape[1]) for x in (g.movedim(axis, 0) if g.ndim > 1 else g, w))
            along[side] += (mine @ heads.mT).flatten(0, 1)
        rows.append(torch.cat([x.flatten() for x in along]))
    return null_dimension(torch.stack(rows))


def claimed(found: SymmetryMap, kind: str, names: list[str]) -> int:
    """Dimensions of what is found on these parameters."""
    pairs = [s for s in (*found.pairs, *found.scales) if s.kind == kind and set(names) & set(s.parameters)]
    means = [f for f in found.folds if isinstance(f, Mean) and set(names) & set(f.parameters)]
    return sum(s.dimension for s in pairs) + sum(f.views[0].count * f.views[0].width for f in means)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_as_many_directions_are_not_felt_as_are_found(name: str) -> None:
    case = CASES[name]
    if case.type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    model = tiny.build(case.type, **case.attributes).double().eval()
    sides = [(_only(model, case.first), 0), (_only(model, case.second), case.axis)]
    found = claimed(find_symmetries(model, synthetic(model, tokens=TOKENS)), case.kind, [n for n, _ in sides])
    assert found > 0
    assert directions_not_felt(model, sides) == found


SMALL = {"hidden_size": 16, "head_dim": 4, "intermediate_size": 12, "num_hidden_layers": 1}
WHOLE: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "glm4_moe": {**SMALL, "moe_intermediate_size": 8},
    "dinov2": {"hidden_size": 16, "num_hidden_layers": 1, "mlp_ratio": 1},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_inner": 12},
    "mixtral": {**SMALL, "intermediate_size": 6},
    "cohere": {**SMALL, "use_qk_norm": True},
}
"""Families and their sizes: rotary embeddings and grouped queries, plain attention, experts, layer scales, means."""


@pytest.mark.slow
@pytest.mark.parametrize("family", WHOLE)
def test_of_all_weights_no_direction_is_left_out(family: str) -> None:
    """Of all but embeddings."""
    model = tiny.build(family, **WHOLE[family]).double().eval()
    for module in model.modules():  # norms that feel lengths, which they do not where this is zero
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-2)
    found = find_symmetries(model, synthetic(model, tokens=TOKENS))
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    names = {n for n, p in model.named_parameters() if id(p) not in embedded and "embeddings" not in n}
    weights = [p for n, p in model.named_parameters() if n in names]
    count = sum(p.numel() for p in weights)
    rows = torch.stack([torch.cat([g.flatten() for g in gs]) for gs in derivatives(model, weights, count + MORE)])
    assert null_dimension(rows) == found.within(names).dimension > 0
    # What is left of the claims is about embeddings, and what they are added to.
    left = {s.name: s.kind for s in found.symmetries if not set(s.parameters) <= names}
    assert set(left.values()) <= {"written_mean", "stream_bias"}
