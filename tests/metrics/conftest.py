"""Caches for tests, and the metric registered in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.metrics.caches import evaluate_cache

__all__ = ["evaluate_cache"]


@pytest.fixture(autouse=True)
def _caches(evaluate_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A folder from which no relative path leads to the metric.
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def metric(_caches: None) -> Any:
    """The metric as a user loads it."""
    import evaluate

    from hf_geosharp import registration

    registration.register()
    return evaluate.load("geodesic_sharpness")
