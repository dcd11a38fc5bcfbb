"""The page about radii: its snippet runs, its commands parse, its table is that of the measured data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_geosharp import score_pretrained
from hf_geosharp.sharpness.choices import METRICS
from tests.docs.page import fenced, parse, run_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "choosing-a-radius.md").read_text(encoding="utf-8")
DEMOS = ("digits-vit", "vader-bert")


def data() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "data" / "radius.json").read_text(encoding="utf-8"))
    return rows


def radius_table() -> str:
    measured = {(r["metric"], r["rho"], r["model"].removeprefix("demo:")): r for r in data()}
    heads = [f"{demo}: {what}" for demo in DEMOS for what in ("rise", "growth", "converged", "spread")]
    lines = ["| " + " | ".join(["metric, ρ", *heads]) + " |", "| --- |" + " ---: |" * len(heads)]
    for metric, rho in dict.fromkeys(key[:2] for key in measured):
        cells = [f"**{metric} {rho:g}**" if rho == METRICS[metric].rho else f"{metric} {rho:g}"]
        for demo in DEMOS:
            r = measured[metric, rho, demo]
            cells += [
                f"{r['score'] / r['base_loss']:#.3g}".rstrip("."),
                "" if r["growth"] is None else f"{r['growth']:.1f}",
                f"{r['converged']} of {r['batches']}",
                f"{r['spread']:.0e}" if r["spread"] else "0",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def starts_table() -> str:
    summary = json.loads((ROOT / "benchmarks" / "data" / "ascent.json").read_text(encoding="utf-8"))["summary"]
    rows = {(row["where"], row["ascent"]): row for row in summary}
    lines = [
        "| metric, ρ | one start | `--starts 2` | `--starts 3` | passes: one | two | three |",
        "| --- |" + " ---: |" * 6,
    ]
    for where in (*(w for w, _ in rows if w.split()[-1][0].isdigit()), "all"):
        own = [rows[where, name] for name in ("auto", "auto, 2 starts", "auto, 3 starts")]
        cells = [*(str(row["higher"]["1.03"]) for row in own), *(f"{row['mean_passes']:.1f}" for row in own)]
        name = f"all {own[0]['cells']}" if where == "all" else where
        line = "| " + " | ".join([name, *cells]) + " |"
        lines += [line] if line not in lines else []
    return "\n".join(lines)


def test_the_table_of_starts_is_that_of_the_measured_data() -> None:
    assert PAGE.split("<!-- starts-table -->\n")[1].split("\n<!-- /starts-table -->")[0] == starts_table()


@pytest.mark.slow
def test_what_a_second_start_finds_is_as_stated() -> None:
    stated = re.search(
        r"gives ([\d.]+), the second ([\d.]+): in (\d) of the 8 .* by up to (\d+) %", " ".join(PAGE.split())
    )
    assert stated is not None
    for starts, value in zip((1, 2), stated.groups()[:2], strict=True):
        result = score_pretrained(
            "demo:digits-vit", rho=0.3, samples=512, batch_size=64, starts=starts, device="cpu"
        )  # fmt: skip
        # Which peak a batch ends on may depend on the machine's rounding.
        assert result.geodesic_sharpness == pytest.approx(float(value), rel=0.02)
    assert any("another start found more than the first" in text for text in result.warnings)


@pytest.mark.slow
def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_snippets("docs/choosing-a-radius.md", 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    rises = [float(line.split("rise ")[1].split()[0]) for line in lines]
    assert rises == sorted(rises)
    assert names["result"].rho == 0.1


def test_smaller_radii_change_nothing() -> None:
    assert "the same, to the last bit, whichever other radii you ask for" in " ".join(PAGE.split())
    alone, after = (
        score_pretrained("demo:digits-vit", samples=256, batch_size=64, rho=rho, device="cpu")
        for rho in (0.1, (0.1, 0.03, 0.01))
    )
    assert alone.per_batch == after.per_batch


def test_the_commands_parse() -> None:
    lines = [line.removeprefix("$ hf-geosharp ") for block in fenced(PAGE, "console") for line in block.splitlines()]
    assert lines
    for line in lines:
        parse(line)


def test_the_table_is_that_of_the_measured_data() -> None:
    found = re.search(r"<!-- radius-table -->\n(.*?)\n<!-- /radius-table -->", PAGE, flags=re.DOTALL)
    assert found is not None
    assert found[1] == radius_table()


def test_the_radius_data_say_what_the_page_says_of_them() -> None:
    rows = data()
    for metric, default in ((name, known.rho) for name, known in METRICS.items()):
        own = [r for r in rows if r["metric"] == metric]
        converged = {rho: all(r["converged"] == r["batches"] for r in own if r["rho"] == rho) for rho in
                     sorted({r["rho"] for r in own})}  # fmt: skip
        assert all(good for rho, good in converged.items() if rho <= default)
        if metric in ("inv", "mix"):
            assert not next(good for rho, good in converged.items() if rho > default)
        if metric == "adaptive":
            assert all(converged.values())
            assert default == METRICS["inv"].rho
    assert all(r["spread"] < 1.05e-4 for r in rows)
    rise = {(r["metric"], r["rho"], r["model"]): r["score"] / r["base_loss"] for r in rows}
    assert rise["inv", 0.3, "demo:digits-vit"] == pytest.approx(90, rel=0.05)
    assert rise["mix", 0.03, "demo:digits-vit"] == pytest.approx(14, rel=0.05)
    assert 3 < rise["inv", 0.1, "demo:digits-vit"] < 10
    assert 0.2 < rise["inv", 0.1, "demo:vader-bert"] < 0.3
    growth = {(r["metric"], r["rho"], r["model"]): r["growth"] for r in rows}
    assert growth["mix", 0.01, "demo:vader-bert"] < 1.2
    assert growth["mix", 0.1, "demo:vader-bert"] > 2
    assert all(growth["adaptive", 0.1, f"demo:{demo}"] < 1.3 for demo in DEMOS)


def test_every_default_radius_is_in_the_table_of_radii() -> None:
    for metric, rho in ((name, known.rho) for name, known in METRICS.items()):
        if metric != "euclidean":
            assert f"**{metric} {rho:g}**" in PAGE


def test_the_defaults_that_are_named_are_the_defaults() -> None:
    found = re.search(r"The defaults \((.*?)\)", PAGE, flags=re.DOTALL)
    assert found is not None
    assert found[1] == (
        f"`inv` {METRICS['inv'].rho:g}, `mix` {METRICS['mix'].rho:g}, `adaptive` and `euclidean` "
        f"{METRICS['adaptive'].rho:g}"
    )
    assert METRICS["adaptive"].rho == METRICS["euclidean"].rho


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rho", "geodesic", "value"),
    [(0.01, "second", 0.0500), (0.01, "exact", 0.0282), (0.003, "second", 0.00383), (0.003, "exact", 0.00383)],
)
def test_what_the_exact_geodesic_changes_is_as_stated(rho: float, geodesic: Any, value: float) -> None:
    assert f"{value:#.3g}" in PAGE
    found = score_pretrained("demo:digits-vit", metric="mix", rho=rho, geodesic=geodesic, samples=256)
    assert found.geodesic_sharpness == pytest.approx(value, rel=5e-3)
