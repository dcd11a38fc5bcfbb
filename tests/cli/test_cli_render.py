"""The table: what stands in it, and that it fits."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from hf_geosharp.cli import render
from hf_geosharp.sharpness.result import CurvePoint, PairSummary, PartScore, Profile, Reproducible, SharpnessResult

Make = Callable[..., SharpnessResult]


def text_of(result: SharpnessResult, width: int = 80, **settings: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, **settings).print(render.table(result))
    return stream.getvalue()


def test_says_everything_at_80_columns(result_with: Make) -> None:
    text = text_of(result_with(baselines={"adaptive": 0.5}))
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for part in (
        "Geodesic sharpness 0.0123457 ± 0.00045 (95 % interval 0.0113 to 0.0134)",
        "demo:digits-vit, class ViTForImageClassification, parameters 12,345",
        "256 in 2 batches of 128",
        "0.250000 nats",
        "rho 0.05",
        "inv, geodesic second, worst case, seed 0",
        "search 20 steps of Auto-PGD; settled in 1 of 2 batches",
        "full: 32 pairs (16 query/key, 16 value/output), 2,048 dimensions divided out; folded 4 key bias",
        "reproducible yes (spread 1.5e-06; weights moved by 1e-6, tolerance 1e-3)",
        "adaptive 0.500000",
        "42 forwards, 40 backwards, 3.2 s",
        "40.0% vit.encoder.layer.0.attention query/key",
        "5.0% 1 other place",
    ):
        assert part in flat
    assert "Curve" not in text
    assert "Warnings" not in text


def test_single_batch_has_no_error(result_with: Make) -> None:
    text = text_of(result_with(stderr=None, interval95=None))
    assert "±" not in text
    assert "interval" not in text


def test_curve_of_several_radii(result_with: Make) -> None:
    curve = [
        CurvePoint(0.05, 0.0123, 0.0004, (0.011, 0.013), True),
        CurvePoint(0.1, 0.05, None, None, False),
        CurvePoint(0.2, 0.1, None, None, None),
    ]
    text = text_of(result_with(curve=curve))
    rows = [line.split() for line in text.partition("Curve")[2].splitlines()]
    assert ["0.05", "0.0123000", "±", "0.0004", "0.011", "to", "0.013", "yes"] in rows
    assert ["0.1", "0.0500000", "NO"] in rows
    assert ["0.2", "0.100000", "not", "checked"] in rows


def test_parts_are_ranked_and_said_not_to_add_up(result_with: Make) -> None:
    parts = tuple(PartScore(f"layer.{i}", "layer", i, None, None, 0.001 * (i + 1), 0.0001) for i in range(14))
    text = text_of(result_with(per=parts, params="lora"))
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "When only one layer is perturbed (the values do not add up) 0.0140000 ± 0.0001 layer.13" in flat
    assert "at most 0.00200000 2 others; --json has all" in flat
    assert "perturbed the adapter alone (lora)" in flat
    assert "perturbed" not in text_of(result_with())


def test_a_part_that_does_not_repeat_is_marked(result_with: Make) -> None:
    parts = [PartScore(f"layer.{i}", "layer", i, None, None, 1.0 - i, 0.01, ok, 0.1) for i, ok in
             enumerate((True, False, None))]  # fmt: skip
    text = text_of(result_with(per=tuple(parts)))
    assert text.count("NOT reproducible") == 1
    assert "layer.1 NOT reproducible" in " ".join(text.split())


def test_the_way_to_the_worst_perturbation_is_shown(result_with: Make) -> None:
    """Without --json nothing was seen of it."""
    profile = Profile((0.0, 0.5, 1.0), (0.0, 0.003, 0.012), (0.0, 0.0031, 0.0118), 0.05)
    text = text_of(result_with(profile=profile))
    assert max(map(len, text.splitlines())) <= 80
    assert "Rise on the way to the first batch's worst perturbation, rho 0.05" in text
    assert "50% 0.00300000 0.00310000 100% 0.0120000 0.0118000" in " ".join(text.split())
    assert "Rise on the way" not in text_of(result_with())


def test_what_is_wrong_stands_out(result_with: Make) -> None:
    text = text_of(
        result_with(
            reproducible=Reproducible(False, 0.4, "moved"),
            pairs=PairSummary(1, 4, reduced=["a"], dropped=["layer.0 [query/key]"]),
            warnings=["the score at rho 0.05\nis not reproducible"],
        )
    )
    flat = " ".join(text.split())
    assert "reproducible NO (spread 0.4; moved)" in flat
    assert "1 pair, 4 dimensions divided out; 1 of reduced rank; dropped 1: layer.0 [query/key]" in flat
    assert "Warnings - the score at rho 0.05 is not reproducible" in flat


@pytest.mark.parametrize(
    ("changes", "title"),
    [({"metric": "adaptive"}, "Adaptive sharpness"), ({"metric": "mix", "mode": "average"}, "Geodesic sharpness")],
)
def test_headline_says_what_was_measured(result_with: Make, changes: dict[str, str], title: str) -> None:
    text = text_of(result_with(**changes))
    assert text.startswith(title)
    if "mode" in changes:
        assert "average case" in text
        assert "Where the average perturbation lives" in text


def test_names_are_not_markup_and_fold(result_with: Make) -> None:
    name = "[bold]" + "very/long/folder/" * 12
    text = text_of(result_with(model={"id": name}))
    assert name in "".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_no_color(result_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;32m" in text_of(result_with(), force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in text_of(result_with(), force_terminal=True, color_system="standard")


def test_stream_that_cannot_show_the_signs(result_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    render.show(result_with(model={"id": "modèle"}))
    sys.stdout.flush()
    assert b"0.0123457 +/- 0.00045" in raw.getvalue()
    assert b"mod?le" in raw.getvalue()


def test_no_value_is_left_out_however_narrow_the_terminal(
    result_with: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    render.show(result_with(baselines={"adaptive": 0.5}))
    text = "".join(capsys.readouterr().out.split())
    for value in ("demo:digits-vit", "0.250000nats", "0.500000", "42forwards,40backwards,3.2s"):
        assert value in text


def test_a_loss_that_is_not_in_nats_is_not_told_in_nats(result_with: Make, capsys: pytest.CaptureFixture[str]) -> None:
    render.show(result_with(data={"id": "scores.csv", "labels": "regression"}))
    out = capsys.readouterr().out
    assert "0.250000 units of the loss" in out
    assert "nats" not in out
