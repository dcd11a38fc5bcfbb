"""What the README says: its snippets run, its commands parse, its figures are those that were measured."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from hf_geosharp import score_pretrained
from hf_geosharp.cli import main
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.sharpness.settings import DEFAULT_RHO
from tests.docs.page import anchors, fenced
from tests.symmetry.table import TABLE

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
DEMOS = ("digits-vit", "vader-bert")


def blocks(language: str) -> list[str]:
    return fenced(README, language)


def commands() -> list[str]:
    """What follows each prompt, without its comment and without what it is piped into."""
    lines = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
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


def radius_table() -> str:
    measured = {(r["metric"], r["rho"], r["model"].removeprefix("demo:")): r for r in data("radius")}
    rows = []
    for metric, rho in dict.fromkeys(key[:2] for key in measured):
        name = f"{metric} {rho:g}"
        cells = [f"**{name}**" if rho == DEFAULT_RHO[metric] else name]
        for demo in DEMOS:
            r = measured[metric, rho, demo]
            cells += [f"{r['score'] / r['base_loss']:#.3g}".rstrip("."), f"{r['converged']} of {r['batches']}",
                      f"{r['spread']:.0e}" if r["spread"] else "0"]  # fmt: skip
        rows.append(cells)
    heads = [f"{demo}: {what}" for demo in DEMOS for what in ("rise", "converged", "spread")]
    return markdown(["metric, ρ", *heads], rows)


@pytest.mark.parametrize(("name", "table"), [("twins", twins_table), ("radius", radius_table)])
def test_the_tables_are_those_of_the_measured_data(name: str, table: Any) -> None:
    found = re.search(rf"<!-- {name}-table -->\n(.*?)\n<!-- /{name}-table -->", README, flags=re.DOTALL)
    assert found is not None
    assert found[1] == table()


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


def test_the_radius_data_say_what_the_readme_says_of_them() -> None:
    rows = data("radius")
    for metric, default in DEFAULT_RHO.items():
        own = [r for r in rows if r["metric"] == metric]
        converged = {rho: all(r["converged"] == r["batches"] for r in own if r["rho"] == rho) for rho in
                     sorted({r["rho"] for r in own})}  # fmt: skip
        assert all(good for rho, good in converged.items() if rho <= default)
        if metric in ("inv", "mix"):
            assert not next(good for rho, good in converged.items() if rho > default)
        if metric == "adaptive":
            assert all(converged.values())
            assert default == DEFAULT_RHO["inv"]
    assert all(r["spread"] < 1.05e-4 for r in rows)
    rise = {(r["metric"], r["rho"], r["model"]): r["score"] / r["base_loss"] for r in rows}
    assert 3 < rise["inv", 0.1, "demo:digits-vit"] < 10
    assert 0.2 < rise["inv", 0.1, "demo:vader-bert"] < 0.3
    growth = {(r["metric"], r["rho"], r["model"]): r["growth"] for r in rows}
    assert growth["mix", 0.01, "demo:vader-bert"] < 1.2
    assert growth["mix", 0.03, "demo:vader-bert"] > 2
    assert all(growth["adaptive", 0.1, f"demo:{demo}"] < 1.3 for demo in DEMOS)


@pytest.mark.slow
def test_the_snippets_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = blocks("python")
    assert len(snippets) >= 4
    names: dict[str, Any] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"README, snippet {number}", "exec"), names)
    assert names["result"].geodesic_sharpness > 0


def test_every_command_parses() -> None:
    lines = [line for line in commands() if line.startswith("hf-geosharp ")]
    assert len(lines) >= 12
    group = click.Context(main)
    for line in lines:
        name, *arguments = shlex.split(line.replace("<model-id>", "owner/name"))[1:]
        command = main.get_command(group, name)
        assert command is not None, line
        command.make_context(name, arguments, parent=group)


def test_every_option_that_is_named_exists() -> None:
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    parameters = [parameter for command in commands if command is not None for parameter in command.params]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named - {"--help"} <= known


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named or document == "CHANGELOG.md"
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|benchmarks|hf_geosharp|cli)/[\w./-]*|constraints[\w-]*\.txt|LICENSE)`", text)
    named += re.findall(r"\]\(((?!http|#)[^)]+)\)", text)
    assert named or document == "CHANGELOG.md"
    for path in named:
        file, _, heading = path.partition("#")
        found = next((x for x in (ROOT / file, (ROOT / document).parent / file) if x.exists()), None)
        assert found is not None, path
        assert not heading or heading in anchors(found.read_text(encoding="utf-8")), path


@pytest.mark.slow
def test_the_score_that_make_demo_shows_is_the_stated_one() -> None:
    (stated,) = re.findall(r"`make demo` shows, finds ([\d.]+) on digits-vit", README)
    assert score_pretrained("demo:digits-vit", device="cpu").geodesic_sharpness == pytest.approx(
        float(stated), rel=1e-4
    )


def test_the_table_of_fields_has_every_field_of_a_result() -> None:
    section = README.split("## The result")[1].split("\n## ")[0]
    for field in SharpnessResult.__dataclass_fields__:
        assert f"`{field}" in section, field


def test_every_default_radius_is_in_the_table_of_radii() -> None:
    for metric, rho in DEFAULT_RHO.items():
        if metric != "euclidean":
            assert f"**{metric} {rho:g}**" in README


def test_the_figures_of_the_ascent_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "data" / "ascent.json").read_text())
    rows = {(r["where"], r["ascent"]): r for r in measured["summary"]}
    auto, secant, reference = rows["all", "auto"], rows["all", "secant"], rows["all", "apgd"]
    rough = sum(row["run"] == "auto" and row["forwards"] > 60 for row in measured["rows"])

    def within(row: dict[str, Any], percent: int) -> int:
        return int(row["cells"] - row[f"below_{100 - percent}"])

    text = " ".join(README.split())
    assert (
        f"the default search takes {auto['median_passes']:g} passes over a batch at the median and "
        f"{auto['p90_passes']:g} at the 90th percentile; in {within(auto, 1)} of {auto['cells']} cells it ends within "
        f"1 % of the best of 60 steps of Auto-PGD, in {within(auto, 3)} within 3 %. Of 20 steps of Auto-PGD it is "
        f"{within(reference, 1)} and {within(reference, 3)} cells, of the secant ascent alone {within(secant, 1)} and "
        f"{within(secant, 3)}. {rough} of the balls are rough, most of them at the largest radii; there the search "
        f"takes 74 passes, and {auto['mean_passes']:.0f} on average over all cells (secant alone "
        f"{secant['mean_passes']:.1f})"
    ) in text


def test_the_figures_of_several_starts_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "data" / "ascent.json").read_text())
    one, two = (next(r for r in measured["summary"] if r["ascent"] == n) for n in ("auto", "auto, 2 starts"))
    assert one["where"] == two["where"] == "all"
    assert (
        f"That takes {two['mean_passes']:.1f} passes on average instead of {one['mean_passes']:.1f}, and in "
        f"{two['higher']['1.03']} of the {two['cells']} cells it finds more than 103 % of the reference, in "
        f"{two['higher']['1.1']} more than 110 % (one start: {one['higher']['1.03']} and {one['higher']['1.1']})"
    ) in " ".join(README.split())


def test_the_count_of_families_is_that_of_the_table() -> None:
    text = " ".join(README.split())
    assert (
        f"In all {len(TABLE)} families and variants whose groups were worked out by hand both dimensions agree" in text
    )


def cost_table() -> str:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in json.loads((ROOT / "benchmarks" / "data" / "bench.json").read_text())["geometry"]["steps"]:
        if row["geodesic"] == "second":
            rows.setdefault((row["case"], row["ascent"]), {})[row["metric"]] = row
    cells = []
    for (case, ascent), by_metric in rows.items():
        seconds = sum(r["pass_seconds"] for r in by_metric.values()) / len(by_metric)
        shares = [f"{100 * by_metric[m]['ratio']['median']:.2g} %" for m in ("inv", "mix")]
        cells.append(f"| {case} | {ascent} | {seconds:.2g} s | {' | '.join(shares)} |")
    head = "| model, batch | ascent | forward + backward | rest of a step, `inv` | `mix` |"
    return "\n".join([head, "| --- | --- | ---: | ---: | ---: |", *cells])


def test_the_costs_are_those_that_were_measured() -> None:
    assert f"<!-- cost-table -->\n{cost_table()}\n" in README
    memory = json.loads((ROOT / "benchmarks" / "data" / "bench.json").read_text())["memory"]
    times = {(r["model"], r["ascent"]): r["times"] for r in memory}
    small, base, llama, reference = (
        times[model, ascent]
        for model, ascent in (
            ("BERT, 4 layers, hidden 128", "secant"),
            ("BERT-base", "secant"),
            ("Llama, 4 layers, hidden 2048", "secant"),
            ("Llama, 4 layers, hidden 2048", "apgd"),
        )
    )
    assert max(times.values()) <= 8
    text = " ".join(README.split())
    assert (
        f"is {small:.1f} times the float32 parameters of the small BERT, {base:.1f} times those of BERT-base and "
        f"{llama:.1f} times those of a Llama of 374 million ({reference:.1f} with `--ascent apgd`)" in text
    )
    tiny = [r["times"] for r in memory if r["model"].startswith("Llama") and r["parameters"] < 60e6]
    assert f"Llamas of less than 60 million take up to {max(tiny):.1f} times" in text
