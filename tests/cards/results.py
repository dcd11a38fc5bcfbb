"""A score to put into cards."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_geosharp.sharpness.result import (
    BatchScore,
    CurvePoint,
    PairSummary,
    Passes,
    Reproducible,
    SharpnessResult,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "me/small-bert"


def make_result(**changes: Any) -> SharpnessResult:
    result = SharpnessResult(
        geodesic_sharpness=0.0125,
        stderr=0.0005,
        interval95=(0.006, 0.019),
        base_loss=0.25,
        rho=0.1,
        metric="inv",
        geodesic="second",
        symmetries="full",
        mode="worst",
        steps=20,
        seed=0,
        samples=256,
        batch_size=128,
        per_batch=[BatchScore(0, 0.2, 0.012, 20, True), BatchScore(1, 0.3, 0.013, 20, False)],
        curve=[
            CurvePoint(0.03, 0.004, 0.0002, (0.001, 0.007), True),
            CurvePoint(0.1, 0.0125, 0.0005, (0.006, 0.019), True),
        ],
        baselines={"adaptive": 0.5},
        pairs=PairSummary(32, 2048, {"qk GL(8)": 16, "vo GL(8)": 16}, {"key_bias": 4}),
        share={"attention": 1.0},
        reproducible=Reproducible(True, 1.5e-6, "weights moved by 1e-6"),
        passes=Passes(42, 40),
        seconds=3.25,
        model={
            "id": MODEL,
            "revision": COMMIT,
            "class": "BertForSequenceClassification",
            "task": "text-classification",
            "dtype": "float32",
        },
        data={
            "id": "nyu-mll/glue",
            "config": "sst2",
            "split": "train",
            "revision": COMMIT[::-1],
            "columns": {"text": "sentence", "label": "label"},
            "labels": "names",
        },
        versions={"hf-geosharp": "0.1.0", "torch": "2.13.0"},
    )
    return dataclasses.replace(result, **changes)
