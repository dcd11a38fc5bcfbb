"""The cards of the demo models: what the command makes of their cards and of scores that were really taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_geosharp import demos
from hf_geosharp.cards import card
from hf_geosharp.sharpness.reading import read_result

ROOT = Path(__file__).resolve().parents[2] / "model_cards"
PICTURE = "geodesic-sharpness.png"


def test_every_demo_has_one() -> None:
    assert sorted(path.parent.name for path in ROOT.glob("*/README.md")) == demos.names()


@pytest.mark.parametrize("name", demos.names())
def test_the_cards_are_in_step_with_demos_templates_and_scores(name: str) -> None:
    result = read_result(ROOT / name / "result.json")
    assert result.model["id"] == f"{demos.PREFIX}{name}"
    before = (demos.path(name) / "README.md").read_bytes()
    made = card.merge(before, result, name, PICTURE)
    # If this fails: make cards
    assert made == (ROOT / name / "README.md").read_bytes()
    assert card.remove(made) == before
    assert (ROOT / name / PICTURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_score_is_the_one_that_is_taken_today() -> None:
    from hf_geosharp import score_pretrained

    kept = read_result(ROOT / "digits-vit" / "result.json")
    point = min(kept.curve, key=lambda point: point.rho)
    taken = score_pretrained("demo:digits-vit", rho=point.rho)
    # At the smallest radius, where the ascent converges on every machine.
    assert taken.geodesic_sharpness == pytest.approx(point.geodesic_sharpness, rel=1e-3)
    assert taken.base_loss == pytest.approx(kept.base_loss, rel=1e-5)
