"""Nothing is left out: what is found has as many dimensions as there are directions that the function does not feel.

By brute force: every linear map of the features of one head onto each other, on either side of a pair, is a direction
in which the weights of a layer can move. The derivatives of the model's outputs along all of them, by differences in
double precision, have a null space. Its dimension has to be that of the symmetries found, of the means of heads as many
as there are coordinates (which direction of the inputs is added makes no difference to these maps).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from hf_geosharp.symmetry.probe import Widened, double_by_default

HEAD = 8
TOKENS = 47
STEP = 1e-5
NOTHING = 1e-7
"""Singular value, relative to the largest, of a direction that is not felt: rounding of the differences is 1e-9."""


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


def _outputs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    with torch.no_grad(), Widened(), double_by_default():
        return model(**batch)[0].flatten()  # type: ignore[no-any-return]


def directions_not_felt(model: nn.Module, batch: Mapping[str, Any], sides: list[tuple[str, int]]) -> int:
    """Dimension of the null space over all maps of one feature of a head onto another, on both sides."""
    parameters = dict(model.named_parameters())
    derivatives = []
    for name, axis in sides:
        weight = parameters[name].data.movedim(axis, 0)
        bias = parameters.get(name.removesuffix("weight") + "bias") if axis == 0 else None
        for head in range(0, len(weight), HEAD):
            for a in range(head, head + HEAD):
                for b in range(head, head + HEAD):
                    ends = []
                    for sign in (1, -1):
                        kept = weight[a].clone(), None if bias is None else bias.data[a].clone()
                        weight[a] += sign * STEP * weight[b].clone()
                        if bias is not None:
                            bias.data[a] += sign * STEP * bias.data[b].clone()
                        ends.append(_outputs(model, batch))
                        weight[a] = kept[0]
                        if bias is not None:
                            bias.data[a] = kept[1]
                    derivatives.append((ends[0] - ends[1]) / (2 * STEP))
    jacobian = torch.stack(derivatives)
    # Random sums of the outputs tell as much as all of them.
    mix = torch.randn(
        jacobian.shape[1], len(jacobian) + 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    values = torch.linalg.svdvals(jacobian @ mix)
    return int((values <= NOTHING * values[0]).sum())


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
    batch = synthetic(model, tokens=TOKENS)
    sides = [(_only(model, case.first), 0), (_only(model, case.second), case.axis)]
    found = claimed(find_symmetries(model, batch), case.kind, [n for n, _ in sides])
    assert found > 0
    assert directions_not_felt(model, batch, sides) == found
