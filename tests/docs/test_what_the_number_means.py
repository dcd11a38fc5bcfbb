"""The page about the meaning of the number: its snippet runs, its commands parse, its figures are those measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagonal import PAPER
from tests.docs.page import fenced, parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "what-the-number-means.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = fenced(PAGE, "python")
    exec(compile(snippet, "docs/what-the-number-means.md", "exec"), {})
    geodesic, adaptive = (float(line.split(": ")[1]) for line in capsys.readouterr().out.splitlines())
    assert geodesic == pytest.approx(1, abs=1e-3)
    assert 100 < adaptive < 1000


def test_the_commands_parse() -> None:
    lines = [line.removeprefix("$ hf-geosharp ") for block in fenced(PAGE, "console") for line in block.splitlines()]
    assert lines
    for line in lines:
        parse(line)


def test_the_figures_of_diagonal_networks_are_those_that_were_measured() -> None:
    text = " ".join(PAGE.split())
    result = json.loads((ROOT / "benchmarks" / "data" / "diagonal.json").read_text(encoding="utf-8"))
    cells: list[dict[str, Any]] = [c for c in result["cells"] if (c["metric"], c["order"]) == ("inv", "exact")]
    taus = [c["tau"] for c in cells]
    assert f"{min(taus):+.2f} to {max(taus):+.2f} over the radii for `inv`" in text
    seeds = next(c["seeds"] for c in cells if c["rho"] == 0.1)
    assert f"It moved from {min(seeds):+.2f} to {max(seeds):+.2f} between draws of the data" in text
    assert f"{PAPER['inv']:+.2f} and {PAPER['mix']:+.2f} on diagonal networks" in text


def test_what_is_said_of_settings_is_what_was_measured() -> None:
    rows = {
        zoo: json.loads((ROOT / "benchmarks" / "data" / f"zoo_{zoo}.json").read_text(encoding="utf-8"))["ablations"]
        for zoo in ("image", "text")
    }
    text = " ".join(PAGE.split())
    counts = {zoo: {row["models"] for row in found} for zoo, found in rows.items()}
    assert f"on {counts['image'].pop()} of the image models and {counts['text'].pop()} of the text models" in text

    def changes(name: str) -> list[float]:
        return [row["ratio"] - 1 for found in rows.values() for row in found if row["name"] == name]

    for name in ("inv first", "inv exact"):
        assert max(map(abs, changes(name))) < 0.02, name
        assert min(r["ranking"] for found in rows.values() for r in found if r["name"] == name) > 0.9, name
    (largest,) = (r for r in rows["image"] if (r["name"], r["rho"]) == ("mix first", 0.3))
    assert f"(τ of the two rankings {largest['ranking']:+.2f})" in text
    for metric in ("inv", "mix"):
        assert max(map(abs, changes(f"{metric} second no projection"))) < 0.055
        assert max(changes(f"{metric} second 60 steps")) < 0.005
        assert min(changes(f"{metric} second 5 steps")) < -0.03


def test_pages_that_are_linked_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
