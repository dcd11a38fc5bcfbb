"""Caches of evaluate and datasets for tests, so that nothing touches those of the user; and no network."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import pytest

# A stand-in for the real one, which is on the Hub.
ACCURACY = '''
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """Share of predictions that are right."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(a == b for a, b in zip(predictions, references))
        return {"accuracy": right / len(predictions)}
'''


@functools.cache
def folder() -> Path:
    """One for the whole run: what evaluate has loaded stays imported from where it was."""
    path = tempfile.mkdtemp(prefix="geosharp-evaluate-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def put_metric(name: str, script: str) -> None:
    """Puts a metric where evaluate keeps those it has got from the Hub."""
    place = folder() / "modules" / "evaluate_modules" / "metrics" / f"evaluate-metric--{name}" / ("0" * 64)
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.py").write_text(script)


@pytest.fixture
def evaluate_cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    """evaluate and datasets with caches of their own, as they are without a network."""
    import datasets
    import evaluate

    for name in ("modules", "metrics", "evaluate"):
        monkeypatch.setattr(evaluate.config, f"HF_{name.upper()}_CACHE", folder() / name, raising=False)
    monkeypatch.setattr(evaluate.config, "DOWNLOADED_EVALUATE_PATH", str(folder() / "downloads"))
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder() / "datasets")
    return folder() / "modules"
