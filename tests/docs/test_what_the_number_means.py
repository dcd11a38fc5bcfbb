"""The page about the meaning of the number: its snippet runs, its commands parse, its figures are those measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagonal import PAPER
from tests.docs.page import fenced, parse, run_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "what-the-number-means.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_snippets("docs/what-the-number-means.md", 1)
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


def _zoos() -> dict[str, dict[str, Any]]:
    folder = ROOT / "benchmarks" / "data"
    return {p.stem.removeprefix("zoo_"): json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("zoo_*.json")}


WORST = ("euclidean", "adaptive", "inv second", "mix second")


def test_what_is_said_of_the_signs_is_what_was_measured() -> None:
    text = " ".join(PAGE.split())
    assert (
        "In all four zoos of 60 the *flatter* models have the larger gap in loss where the loss hardly rises (τ" in text
    )
    assert "the *sharper* ones where it rises by several nats (up to +0.6; for `mix` on images from scratch the" in text
    zoos = _zoos()
    assert {zoo: result["counts"]["reached"] for zoo, result in zoos.items()} == dict.fromkeys(zoos, 60)
    assert len(zoos) == 4
    smallest, largest = [], []
    for zoo, result in zoos.items():
        for name in WORST:
            found = [row["gap in loss"] for row in result["rows"] if row["name"] == name]
            smallest.append(found[0]["tau"])
            assert found[0]["high"] < 0
            assert (found[-1]["low"] > 0) == ((zoo, name) != ("image", "mix second"))
            largest.append(max(c["tau"] for c in found))
    assert f"(τ from {min(smallest):.2f} to {max(smallest):.2f})" in text
    assert max(largest) == pytest.approx(0.6, abs=0.05)


def test_what_is_said_of_fine_tunes_of_a_vision_transformer_is_what_was_measured() -> None:
    text = " ".join(PAGE.split())
    rows = {(r["name"], r.get("rho")): r["gap in error"] for r in _zoos()["finetune-image"]["rows"]}
    inv, adaptive = rows["inv second", 0.3]["tau"], rows["adaptive", 1.0]["tau"]
    means = max(c["tau"] for (name, _), c in rows.items() if name in ("inv second average", "adaptive average"))
    assert (
        f"`inv` at 0.3 and `adaptive` at 1 correlate with the gap in error (τ {inv:+.2f} and {adaptive:+.2f}, their "
        f"averages up to {means:+.2f})"
    ) in text
    assert all(rows[key]["among"] < 0.05 for key in (("inv second", 0.3), ("adaptive", 1.0)))
    assert all(c["low"] < 0 for (name, _), c in rows.items() if name == "mix second")
    plain = max(abs(c["tau"]) for (_, rho), c in rows.items() if rho is None)
    assert f"none of the baselines (losses, norms, margin, Hessian) has more than ±{plain:.2f}" in text


def test_on_texts_the_margin_and_the_training_loss_tell_more_of_the_gap_in_loss() -> None:
    text = " ".join(PAGE.split())
    assert (
        "there the training loss and the margin, which cost nothing, correlate more strongly with the gap in loss"
        in text
    )
    for zoo in ("text", "finetune"):
        rows = _zoos()[zoo]["rows"]
        sharp = max(abs(r["gap in loss"]["tau"]) for r in rows if "rho" in r)
        plain = {r["name"]: abs(r["gap in loss"]["tau"]) for r in rows if "rho" not in r}
        assert min(plain["margin"], plain["training loss"]) > sharp


def _orders(name: str) -> tuple[float, float]:
    """Of a setting against second order and all symmetries: median ratio of the scores, and change of τ with a gap.

    Where each of them is largest, over zoos and radii.
    """
    ratios, taus = [], []
    for result in _zoos().values():
        usual = f"{name.split()[0]} second"
        rows = {(row["name"], row["rho"]): row for row in result["rows"] if "rho" in row}
        for i, rho in enumerate(result["setting"]["radii"][name.split()[0]]):
            if (name, rho) in rows and (usual, rho) in rows:
                pairs = [(m["cells"][name][i], m["cells"][usual][i]) for m in result["models"]]
                ratios.append(statistics.median(a / b for a, b in pairs))
                taus += [
                    rows[name, rho][t]["tau"] - rows[usual, rho][t]["tau"] for t in ("gap in error", "gap in loss")
                ]
    return max(ratios, key=lambda r: abs(r - 1)), max(map(abs, taus))


def test_what_is_said_of_orders_and_of_the_papers_symmetries_is_what_was_measured() -> None:
    text = " ".join(PAGE.split())
    inv = [_orders(name) for name in ("inv first", "inv exact")]
    assert (
        f"changes the median score by at most {100 * max(abs(ratio - 1) for ratio, _ in inv):.1f} % and τ with a gap "
        f"by at most {max(tau for _, tau in inv):.2f}"
    ) in text
    ratio, tau = _orders("mix first")
    assert f"a median score is down to {ratio:.2f} of what it was, and τ with a gap moves by up to {tau:.2f}" in text
    assert (
        f"the exact geodesic, where it does not end inside the ball, moves it by up to {_orders('mix exact')[1]:.2f}"
        in text
    )
    paper = [_orders(f"{metric} second paper") for metric in ("inv", "mix")]
    assert (
        f"change a median score by up to {100 * max(abs(ratio - 1) for ratio, _ in paper):.0f} % and τ with a gap by "
        f"up to {max(tau for _, tau in paper):.2f}"
    ) in text


def test_what_is_said_of_settings_is_what_was_measured() -> None:
    zoos = _zoos()
    rows = {zoo: result["ablations"] for zoo, result in zoos.items()}
    text = " ".join(PAGE.split())
    (count,) = {row["models"] for found in rows.values() for row in found}
    assert f"Other settings were tried on {count} models of each zoo" in text

    def changes(name: str) -> list[float]:
        return [row["ratio"] - 1 for found in rows.values() for row in found if row["name"] == name]

    inv, mix = (100 * max(map(abs, changes(f"{metric} second no projection"))) for metric in ("inv", "mix"))
    assert f"raises the worst case of `inv` by at most {inv:.1g} % and that of `mix` by up to {mix:.0f} %" in text
    for metric in ("inv", "mix"):
        assert max(changes(f"{metric} second 60 steps")) < 0.005
        assert min(changes(f"{metric} second 5 steps")) < -0.03
