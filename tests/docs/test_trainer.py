"""The page about the Trainer: its snippets run one after the other, and what it names exists."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from hf_geosharp import GeodesicSharpnessCallback
from hf_geosharp.sharpness.settings import Settings
from tests.docs.page import run_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names = run_snippets("docs/trainer.md", 5)
    assert all(record["eval_geodesic_sharpness"] > 0 for record in names["evaluations"])
    best = names["trainer"].state
    assert best.best_metric == min(r["eval_geodesic_sharpness"] for r in best.log_history if "eval_loss" in r)
    stored = json.loads((Path(best.best_model_checkpoint) / "trainer_state.json").read_text())
    assert stored["best_metric"] == best.best_metric


def test_the_passes_that_are_named_are_those_of_the_settings() -> None:
    settled, rough, few, *alone = re.findall(r"^\| `ascent=.* \| (\d+) and (\d+)\b", PAGE, flags=re.MULTILINE)
    assert passes(Settings(steps=13)) == passes(Settings(ascent="secant", steps=13)) == settled == few
    assert passes(Settings()) == rough
    assert [passes(Settings(ascent=ascent)) for ascent in ("secant", "apgd")] == alone
    assert passes(Settings(steps=20)) == passes(Settings())
    assert passes(Settings(steps=14)) != passes(Settings(ascent="secant", steps=14))


def passes(settings: Settings) -> tuple[str, str]:
    """Forward and backward passes at most: every search asks for the loss once more than it takes steps."""
    searches = 1 + (settings.rough is not None)
    return str(settings.evaluations), str(settings.evaluations - searches)


def test_every_argument_is_named_and_every_argument_named_exists() -> None:
    arguments = set(inspect.signature(GeodesicSharpnessCallback).parameters)
    assert {name for name in arguments if f"`{name}" not in PAGE and f"{name}=" not in PAGE} == set()


def test_the_defaults_that_are_named_are_the_defaults() -> None:
    defaults = {n: p.default for n, p in inspect.signature(GeodesicSharpnessCallback).parameters.items()}
    assert f"`samples` ({defaults['samples']})" in PAGE
    assert f"`batch_size` ({defaults['batch_size']}; one ball per batch)" in PAGE
