"""What the README says: its snippets run, its commands parse, its figures are those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from hf_geosharp import score_pretrained
from hf_geosharp.cli import main
from hf_geosharp.sharpness.choices import METRICS
from tests.docs.page import fenced, parse, run_snippets
from tests.symmetry.table import TABLE

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """What follows each prompt, without its comment and without what it is piped into."""
    lines = [line[2:] for block in fenced(README, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [line.split("#")[0].split(" | ")[0].strip() for line in lines]


def data(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "data" / f"{name}.json").read_text())
    return rows


def markdown(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def twins_table() -> str:
    rows = [
        [f"{r['demo']}, {r['measure']}", f"{r['rho']:g}", f"{r['model']:#.6g}", f"{r['twin']:#.6g}",
         f"{r['ratio']:.5f}" if r["measure"].startswith("geodesic") else f"{r['ratio']:.3g}"]
        for r in data("twins")
    ]  # fmt: skip
    return markdown(["sharpness", "ρ", "model", "twin", "twin / model"], rows)


def test_the_table_is_that_of_the_measured_data() -> None:
    found = re.search(r"<!-- twins-table -->\n(.*?)\n<!-- /twins-table -->", README, flags=re.DOTALL)
    assert found is not None
    assert found[1] == twins_table()


def test_the_picture_shows_the_ratios_that_the_table_has() -> None:
    picture = (ROOT / "benchmarks" / "twins.svg").read_text(encoding="utf-8")
    labels = re.findall(r"<!-- ([\d.]+)(?: times)? -->", picture)
    for row in data("twins"):
        assert (f"{row['ratio']:.5f}" if row["measure"].startswith("geodesic") else f"{row['ratio']:.3g}") in labels


def test_the_twins_data_say_what_the_readme_says_of_them() -> None:
    for row in data("twins"):
        if row["measure"].startswith("geodesic"):
            assert abs(row["ratio"] - 1) < 1e-5
        if row["measure"] == "adaptive":
            assert row["ratio"] > 50


@pytest.mark.slow
def test_the_snippets_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_snippets("README.md", 4)
    assert names["result"].geodesic_sharpness > 0


def test_every_command_parses() -> None:
    lines = [line for line in commands() if line.startswith("hf-geosharp ")]
    assert len(lines) >= 12
    for line in lines:
        parse(line.removeprefix("hf-geosharp ").replace("<model-id>", "owner/name"))


def test_every_option_that_is_named_exists() -> None:
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    parameters = [parameter for command in commands if command is not None for parameter in command.params]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named - {"--help"} <= known


@pytest.mark.slow
def test_the_score_that_make_demo_shows_is_the_stated_one() -> None:
    (stated,) = re.findall(r"`make demo` shows, finds ([\d.]+) on digits-vit", README)
    assert score_pretrained("demo:digits-vit", device="cpu").geodesic_sharpness == pytest.approx(
        float(stated), rel=1e-4
    )


def test_the_count_of_families_is_that_of_the_table() -> None:
    text = " ".join(README.split())
    assert (
        f"In all {len(TABLE)} families and variants whose groups were worked out by hand both dimensions agree" in text
    )


def test_the_defaults_that_are_named_are_the_defaults() -> None:
    text = " ".join(README.split())
    assert f"The defaults of `inv` ({METRICS['inv'].rho:g}) and `mix` ({METRICS['mix'].rho:g}) are" in text


def test_the_summary_of_costs_is_what_was_measured() -> None:
    text = " ".join(README.split())
    measured = json.loads((ROOT / "benchmarks" / "data" / "ascent.json").read_text())
    auto = next(r for r in measured["summary"] if (r["where"], r["ascent"]) == ("all", "auto"))
    assert (
        f"takes {auto['median_passes']:g} passes over a batch at the median and {auto['p90_passes']:g} at the 90th "
        f"percentile, over two demos and {len({r['model'] for r in measured['rows']}) - 2} tiny models"
    ) in text
    bench = json.loads((ROOT / "benchmarks" / "data" / "bench.json").read_text())
    steps = {
        (r["case"].split(",")[0], r["metric"], r["geodesic"]): f"{100 * r['ratio']['median']:.0f} %"
        for r in bench["geometry"]["steps"]
        if r["ascent"] == "secant"
    }
    inv, mix = (
        [steps[case, metric, METRICS[metric].geodesic] for case in ("BERT", "BERT-base")] for metric in ("inv", "mix")
    )
    assert (
        f"The geometry of `inv` adds {inv[0]} to a pass of a small BERT and {inv[1]} to one of BERT-base, "
        f"that of `mix` with its exact geodesics {mix[0]} and {mix[1]}."
    ) in text
    times = [r["times"] for r in bench["memory"]]
    assert f"is {min(times):.0f} to {max(times):.0f} times the float32 parameters" in text
