"""The score of families of the table, moved along their orbits: the same function has the same sharpness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.inputs import output_tensors, synthetic
from hf_geosharp.symmetry.trials.probe import Widened
from tests.symmetry.attention.test_sites import SITES
from tests.symmetry.handmade import Absorbed, Differential, Joint, Normed, Residual, SubNormed, half, inputs
from tests.symmetry.table import TABLE, Row, unknown


@pytest.fixture(autouse=True)
def _found_anew(request: pytest.FixtureRequest) -> None:
    """The slow tests score each model four times, with what was found before the first one."""
    if not request.node.get_closest_marker("slow"):
        request.getfixturevalue("finds_anew")


MOVED = (
    "roformer", "modernbert", "xlnet", "deberta-v2 own", "gpt_neox", "codegen", "falcon 40b", "cohere normed",
    "cohere2", "phi normed", "qwen3", "gemma3_text", "hunyuan_v1_dense", "nanochat", "deepseek_v3", "swinv2",
    "sam_vision_model", "afmoe", "olmo2", "bitnet", "persimmon", "chameleon", "diffllama",
    "timesfm2_5",
)  # fmt: skip
"""Rotary in both pairings and in part, tables, fused and sharded layouts, groups, norms, latents, gates, means."""

ROWS = {str(row): row for row in TABLE}


def loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Something smooth of all that the model returns first."""
    first = output_tensors(outputs)[0]
    waves = torch.arange(first.shape[-1], dtype=first.dtype).cos()
    return (first - waves).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(ROWS[name], id=name.replace(" ", "-")) for name in MOVED if name in ROWS])
def test_the_score_is_the_same_along_the_orbit(row: Row) -> None:
    if reason := unknown(row):
        pytest.skip(reason)
    model = tiny.build(row.type, **row.attributes).double()
    exact, close = 1e-12, 1e-9
    widened: Callable[[], AbstractContextManager[Any]] = Widened  # or casts in the model say more than the move
    try:
        batch = synthetic(model)
        with widened():
            model(**batch)
    except (ValueError, RuntimeError):  # experts that are multiplied in single precision only
        model.float()
        batch, exact, close, widened = synthetic(model), 1e-5, 1e-4, nullcontext
    measured = []
    for moved in (False, True):
        if moved:
            found = find_symmetries(model)
            found.apply(model, found.random_element(model, 3, 100.0))
        for metric, rho in (("inv", 0.03), ("mix", 0.001)):
            with widened():
                result = score(model, [batch], metric=metric, rho=rho, steps=4, loss=loss, reproducibility=False)
            assert result.metric == metric
            measured.append((result.base_loss, result.geodesic_sharpness))
    for (base, value), (base_of_twin, value_of_twin) in zip(measured[:2], measured[2:], strict=True):
        assert base_of_twin == pytest.approx(base, rel=exact)
        assert value_of_twin == pytest.approx(value, rel=close)
        assert value > 1e-4 * base


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a layer norm of all heads, with a bias": lambda: SubNormed(centred=True, bias=True),
    "a norm of all heads, one plus weight": lambda: SubNormed(offset=1.0, bias=True, key_heads=2),
    "layer norms without weights on queries and keys": lambda: Normed("none", centred=True),
    "layer norms on queries and keys": lambda: Normed("head", half, centred=True, bias=True),
    "the larger of two queries": SITES["the larger of two queries"].module,
    "heads normalised in part": SITES["heads normalised in part"].module,
    "a gate for each head": SITES["a gate for each head"].module,
    "two softmaxes that share values": lambda: Differential(2),
    "two streams that attend to each other": Joint,
    "two streams that attend to each other, one of them read": lambda: Joint(both=False),
    "matrices of keys and values on the other side of a latent": Absorbed,
}


@pytest.mark.parametrize("name", MODULES)
def test_the_score_of_a_module_with_the_trait_is_the_same_along_the_orbit(name: str) -> None:
    """In double precision throughout: rounding alone is left."""
    model, batch = Residual(MODULES[name]()), inputs(1)

    def measured() -> list[float]:
        return [
            score(
                model, [batch], metric=metric, rho=rho, steps=4, loss=loss, dtype="float64", reproducibility=False
            ).geodesic_sharpness
            for metric, rho in (("inv", 0.03), ("mix", 0.001), ("adaptive", 0.03))
        ]  # fmt: skip

    *before, plain = measured()
    found = find_symmetries(model, inputs())
    found.apply(model, found.random_element(model, 3, 30.0))
    *after, plain_after = measured()
    assert after == pytest.approx(before, rel=1e-9)
    assert abs(plain_after / plain - 1) > 0.1


@pytest.mark.parametrize("name", ["persimmon", "phi normed"])
def test_a_bias_of_the_norm_on_keys_is_a_key_bias_where_nothing_turns_it(name: str) -> None:
    row = ROWS[name]
    if reason := unknown(row):
        pytest.skip(reason)
    model = tiny.build(row.type, **row.attributes).double()
    tiny.randomise(model, 0)
    batch = synthetic(model)
    found = find_symmetries(model)
    folds = [fold for fold in found.folds if fold.kind == "key_bias" and "layernorm.bias" in fold.parameters[0]]
    layers = model.config.num_hidden_layers
    assert len(folds) == layers
    scores = []
    for shift in (0.0, 3.0):
        with torch.no_grad():
            for fold in folds:
                bias = dict(model.named_parameters())[fold.parameters[0]]
                # Half of the coordinates are turned.
                assert fold.dimension == bias.numel() // 2
                fold.apply(dict(model.named_parameters()), {"c": torch.full(fold.bias.shape(), shift)})
            outputs = output_tensors(model(**batch))[0]
        scores.append((outputs, score(model, [batch], loss=loss, rho=0.03, steps=3, reproducibility=False)))
    (before, first), (after, second) = scores
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert second.geodesic_sharpness == pytest.approx(first.geodesic_sharpness, rel=1e-4)
