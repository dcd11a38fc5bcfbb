"""A stand-in for scoring, so that the command line is tested by itself and in no time."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hf_geosharp.cli import main
from hf_geosharp.sharpness.result import (
    BatchScore,
    CurvePoint,
    PairSummary,
    Passes,
    Reproducible,
    SharpnessResult,
)


def make_result(**changes: Any) -> SharpnessResult:
    result = SharpnessResult(
        geodesic_sharpness=0.01234567,
        stderr=0.00045,
        interval95=(0.0113, 0.0134),
        base_loss=0.25,
        rho=0.05,
        metric="inv",
        geodesic="second",
        symmetries="full",
        mode="worst",
        steps=20,
        seed=0,
        samples=256,
        batch_size=128,
        per_batch=[BatchScore(0, 0.2, 0.012, 20, True), BatchScore(1, 0.3, 0.013, 20, False)],
        curve=[CurvePoint(0.05, 0.01234567, 0.00045, (0.0113, 0.0134), True)],
        baselines={},
        pairs=PairSummary(32, 2048, {"query/key": 16, "value/output": 16}, {"key bias": 4}),
        share={f"vit.encoder.layer.{i}.attention query/key": s for i, s in enumerate((0.4, 0.3, 0.1, 0.1, 0.05, 0.05))},
        reproducible=Reproducible(True, 1.5e-6, "weights moved by 1e-6, tolerance 1e-3"),
        passes=Passes(42, 40),
        seconds=3.25,
        model={"id": "demo:digits-vit", "class": "ViTForImageClassification", "parameters": 12345},
        data={"id": "demo:digits-vit", "split": "train"},
        versions={"hf-geosharp": "0.1.0"},
    )
    return dataclasses.replace(result, **changes)


class Stub:
    """Plays ``score_pretrained``: keeps the calls, then does what ``behaviour`` says."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.behaviour: Callable[[], SharpnessResult] = make_result

    def __call__(self, model_id: str, **arguments: Any) -> SharpnessResult:
        self.calls.append({"model_id": model_id} | arguments)
        return self.behaviour()

    def fails_with(self, error: BaseException) -> None:
        def behaviour() -> SharpnessResult:
            raise error

        self.behaviour = behaviour


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    module = types.ModuleType("hf_geosharp.scoring")
    module.score_pretrained = stub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hf_geosharp.scoring", module)
    return stub


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command sets environment variables for the libraries; they must not reach other tests."""
    before = dict(os.environ)
    for name in ("HF_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def run() -> Callable[..., Result]:
    def run(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), prog_name="hf-geosharp")

    return run


@pytest.fixture
def result_with() -> Callable[..., SharpnessResult]:
    return make_result
