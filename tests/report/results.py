"""Results with and without what a report can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_geosharp.sharpness.result import CurvePoint, PairSummary, PartScore, Profile, SharpnessResult
from tests.results import result_of

EVIL = '<script>alert("1")</script>&\'$x_$'
VALUES = [0.2, 0.15, 0.21, 0.16]


def bare(name: str = "me/model", **changes: Any) -> SharpnessResult:
    """One batch, one radius, and nothing that was asked for besides."""
    return replace(_of_hub(result_of(name, [0.2])), **{"pairs": PairSummary(0, 0), **changes})


def full(name: str = "me/model", **changes: Any) -> SharpnessResult:
    """Everything that a score can hold."""
    result = _of_hub(result_of(name, VALUES, [0.5, 0.4, 0.6, 0.5]))
    curve = [CurvePoint(rho, rho / 2, rho / 9, (rho / 4, rho), True) for rho in (0.01, 0.03)]
    layers = [PartScore(f"bert.layer.{i}", "layer", i, None, None, 0.1 / (i + 1), 0.01) for i in range(2)]
    settings: dict[str, Any] = {
        "curve": [*result.curve, *curve],
        "share": {
            "bert.layer.0.attention.qk": 0.5, "bert.layer.1.attention.qk": 0.25, "bert.layer.1.mlp.up.weight": 0.125,
            "bert.layer.1.mlp.up.bias": 0.0625, "classifier.weight": 0.0625,
        },
        "per": (*layers, PartScore("classifier", "layer", None, None, None, 0.02, None)),
        "profile": Profile((0.0, 0.5, 1.0), (0.0, 0.05, 0.2), (0.0, 0.06, 0.15), 0.1),
        "baselines": {"adaptive": 0.0123},
        "pairs": PairSummary(
            4, 64, {"qk GL(8)": 4}, {"key_bias": 2}, ["bert.layer.1.attention.qk head 3"],
            ["bert.layer.0.attention.vo: refuted"], 1e-15, 779.0,
        ),
        "warnings": ["weights were widened"],
        **changes,
    }  # fmt: skip
    return replace(result, **settings)


def heads(modules: tuple[str, ...], count: int) -> tuple[PartScore, ...]:
    """A score for each head of some modules."""
    return tuple(
        PartScore(f"{module} head {head}", "head", int(module.split(".")[-2]), head, None, 0.01 * (1 + head), 0.001)
        for module in modules
        for head in range(count)
    )


def _of_hub(result: SharpnessResult) -> SharpnessResult:
    return replace(result, model={**result.model, "revision": "0123456789"})
