"""Results made from numbers, as a score would have written them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_geosharp.comparable import Named, named
from hf_geosharp.sharpness.result import BatchScore, CurvePoint, PairSummary, Passes, Reproducible, SharpnessResult
from hf_geosharp.sharpness.statistics import mean_with_error

DATA = {"id": "reviews.csv", "split": "train", "fingerprint": "0123456789abcdef", "rows": 1000, "seed": 0}


def result_of(
    name: str, values: Sequence[float], losses: Sequence[float] | None = None, /, *, rho: float = 0.1, **changes: Any
) -> SharpnessResult:
    losses = losses or [0.5] * len(values)
    mean, stderr, interval = mean_with_error(values)
    ok = changes.pop("ok", True)
    settings: dict[str, Any] = {
        "metric": "inv", "geodesic": "second", "symmetries": "full", "mode": "worst", "ascent": "secant", "steps": 20,
        "seed": 0, "samples": 32 * len(values), "batch_size": 32, "baselines": {},
        "reproducible": Reproducible(ok, 1e-6 if ok else 0.5, "moved"),
        "model": {"id": name, "task": "text-classification", "dtype": "float32", "revision": None},
        "data": dict(DATA), "versions": {"hf-geosharp": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        **changes,
    }  # fmt: skip
    return SharpnessResult(
        geodesic_sharpness=mean,
        stderr=stderr,
        interval95=interval,
        base_loss=math.fsum(losses) / len(losses),
        rho=rho,
        per_batch=[
            BatchScore(i, loss, value, 20, True) for i, (loss, value) in enumerate(zip(losses, values, strict=True))
        ],
        curve=[CurvePoint(rho, mean, stderr, interval, ok)],
        pairs=PairSummary(4, 64),
        share={},
        passes=Passes(1, 1),
        seconds=1.0,
        **settings,
    )


def many(**values: Sequence[float]) -> list[Named]:
    """A result for each name."""
    return named([Named(name, result_of(name, own), name) for name, own in values.items()])


def write(folder: Path, name: str, result: SharpnessResult, **edits: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result.to_dict() | edits))
    return path
