"""The page of a report: whole, standing alone, escaped, and without sections that have nothing to say."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hf_geosharp.cards.section import number
from hf_geosharp.comparable import Named, named
from hf_geosharp.sharpness.result import PairSummary, Reproducible, SharpnessResult
from tests.report.html_page import LOADING, Page
from tests.report.results import EVIL, bare, full, heads
from tests.results import many

pytest.importorskip("matplotlib")

from hf_geosharp import heatmaps, plots
from hf_geosharp.report import page
from hf_geosharp.report.page import render


def page_of(*results: SharpnessResult) -> Page:
    return Page(render(named([Named(str(r.model["id"]), r, f"{i}.json") for i, r in enumerate(results)])))


def evil() -> SharpnessResult:
    """Every string that a result can hold is one that would run, or undo the page or a picture."""
    parts = tuple(replace(part, part=f"{EVIL}.0.{i}", kind=EVIL) for i, part in enumerate(full().per))
    return full(
        EVIL,
        share={f"{EVIL}.0.qk": 0.5, f"{EVIL}.1.{EVIL}": 0.25, EVIL: 0.25},
        per=parts,
        pairs=PairSummary(4, 64, {f"{EVIL} GL": 4}, {EVIL: 2}, [EVIL], [EVIL], 1e-15, 779.0),
        baselines={EVIL: 1.0},
        warnings=[EVIL],
        reproducible=Reproducible(False, 0.5, EVIL),
        data={"id": EVIL, "split": EVIL, "columns": {EVIL: EVIL}},
        versions={EVIL: EVIL},
        metric="mix",
        geodesic=EVIL,
        symmetries=EVIL,
    )


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are not drawn where only their places on the page matter."""
    monkeypatch.setattr(page, "inline", lambda figure, key, label: f'<svg role="img" aria-label="{key}"></svg>')
    monkeypatch.setattr(plots, "_drawn", lambda *_, **__: None)
    monkeypatch.setattr(heatmaps, "share_figure", lambda *_: None)


def test_a_part_that_does_not_repeat_is_marked(undrawn: None) -> None:
    result = full()
    first, *rest = result.per
    shaky = replace(first, reproducible=False, spread=0.5)
    text = render(named([Named("a", replace(result, per=(shaky, *rest)), "a.json")]))
    assert text.count("(not reproducible)") == 1
    assert "(not reproducible)" not in render(named([Named("a", result, "a.json")]))


# --------------------------------------------------------------------------------------------------------- stands alone


@pytest.mark.parametrize("results", [[bare()], [full()], [evil(), bare()]])
def test_nothing_is_loaded_and_nothing_runs(results: list[SharpnessResult]) -> None:
    shown = page_of(*results)
    assert not {"script", "link", "iframe", "object", "embed", "base", "img"} & {tag for tag, _ in shown.tags}
    for tag, attributes in shown.tags:
        assert not LOADING & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name, value in attributes.items():
            if name == "href":
                # A link that is followed by hand, a place on this page, or what is written out in the page itself.
                own = tag == "a" and value == "https://arxiv.org/abs/2505.05409"
                assert own or str(value).startswith(("#", "data:image/png;base64,")), (tag, value)
            if name == "style":
                assert "url(" not in str(value)
    policy = next(a["content"] for a in shown.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")


def test_the_style_loads_nothing() -> None:
    style = re.findall(r"<style>(.*?)</style>", render([Named("m", bare())]), flags=re.DOTALL)
    assert len(style) == 1
    assert not re.search(r"url\(|@import|@font-face|http", style[0])


@pytest.mark.slow
def test_ids_are_there_once_and_whatever_is_referred_to_exists() -> None:
    text = render(named([Named(name, full(name), f"{name}.json") for name in ("a/a", "b/b")]))
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    assert {"result-1", "result-2"} <= set(ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


@pytest.mark.slow
def test_the_same_results_give_the_same_page() -> None:
    assert render([Named("m", full())]) == render([Named("m", full())])


# -------------------------------------------------------------------------------------------------------------- escapes


def test_what_a_result_says_is_text() -> None:
    shown = page_of(evil())
    assert EVIL in shown.text
    # In names and settings, in checks and warnings, and in the pictures.
    assert shown.text.count("alert(") >= 15
    label = next(a["aria-label"] for a in shown.all("svg") if "Sharpness when" in str(a["aria-label"]))
    assert EVIL in str(label)


# ------------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.slow
def test_every_picture_says_what_it_shows() -> None:
    pictures = page_of(full(), replace(full("b/b"), seed=0)).all("svg")
    assert len(pictures) == 11
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert len(str(attributes["aria-label"])) > 30
        assert "viewbox" in attributes
        assert not {"width", "height"} & set(attributes)


def test_pictures_take_their_colours_and_font_from_the_page() -> None:
    text = render([Named("m", full())])
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--picture)" in drawn
    assert "var(--second)" in drawn
    assert "currentColor" in drawn
    assert not re.search(r"#2a6f97|#ffffff|#000000|DejaVu|font: ", drawn)


# ------------------------------------------------------------------------------------------------------------- sections

SECTIONS = [
    "Warnings",
    "Over the radius",
    "Where the worst perturbation lives",
    "When only one part is perturbed",
    "The way to the worst perturbation",
    "Batch by batch",
    "Other measures at the same radius",
    "Symmetries",
]
ALWAYS = ["How it was computed", "Settings", "Model", "Data", "Cost and versions", "To reproduce it"]


@pytest.mark.usefixtures("undrawn")
def test_all_sections_of_a_full_result() -> None:
    shown = page_of(full())
    assert shown.headings == ["me/model", *SECTIONS, *ALWAYS]
    said = [
        "0.180000", "95 % interval 0.13", "reviews.csv, train", "weights were widened", "0.0123000", "refuted",
        "bert.layer.1.attention.qk head 3", "4 of GL(8)", "--per layer --profile", "5.24.0", "secant ascent",
    ]  # fmt: skip
    for text in said:
        assert text in shown.text


def test_sections_without_data_are_not_there() -> None:
    shown = page_of(bare())
    assert shown.headings == ["me/model", *ALWAYS]
    assert shown.all("svg") == []
    assert shown.all("table") == []
    assert "From a single batch there is no interval." in shown.text


@pytest.mark.parametrize(
    ("missing", "heading"),
    [
        ({"warnings": []}, "Warnings"),
        ({"share": {}}, "Where the worst perturbation lives"),
        ({"per": ()}, "When only one part is perturbed"),
        ({"profile": None}, "The way to the worst perturbation"),
        ({"baselines": {}}, "Other measures at the same radius"),
        ({"pairs": PairSummary(0, 0)}, "Symmetries"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_each_section_goes_with_its_data(missing: dict[str, Any], heading: str) -> None:
    found = page_of(full(**missing)).headings
    assert found == ["me/model", *(name for name in SECTIONS if name != heading), *ALWAYS]


def test_places_without_layers_are_a_table_without_a_picture() -> None:
    shown = page_of(bare(share={"weight": 0.75, "bias": 0.25}))
    assert "Where the worst perturbation lives" in shown.headings
    assert "75.0 %" in shown.text
    assert shown.all("svg") == []


@pytest.mark.usefixtures("undrawn")
def test_the_words_are_those_of_the_case_and_the_metric() -> None:
    assert "as the relative change of each factor" in page_of(full()).text
    average = page_of(full(mode="average", ascent="none", metric="euclidean", profile=None)).text
    assert "Random perturbations" in average
    assert "Euclidean sharpness" in average
    assert "Search settled" not in average
    model = page_of(full(data={"id": "d.csv", "labels": "model"})).text
    assert "so it starts from 0" in model
    numbers = page_of(full(data={"id": "d.csv", "labels": "regression"})).text
    assert "can raise the loss by this much, in units of the loss" in numbers
    assert "nats" not in numbers


@pytest.mark.usefixtures("undrawn")
def test_a_score_that_is_not_reproducible_says_so() -> None:
    shown = page_of(full(reproducible=Reproducible(False, 0.5, "moved")))
    assert "Reproducible: no" in shown.text
    assert {"class": "bad"} in shown.all("li")


def test_batches_that_were_skipped_and_weights_that_were_not_there_are_said() -> None:
    whole = full()
    html = render(
        [Named("m", full(data={**whole.data, "skipped_batches": [2]}, model={**whole.model, "missing": ["w"]}))]
    )
    assert "1 of 5 skipped" in html
    assert "1 missing" in html
    assert "skipped" not in render([Named("m", whole)])


def test_a_score_that_is_no_measurement_shows_no_number() -> None:
    """As in the terminal: where no finite loss was found in a batch, its value 0 is none."""
    whole = full()
    lost = replace(whole, per_batch=[replace(whole.per_batch[0], value=0.0, stopped="lost"), *whole.per_batch[1:]])
    headline = render([Named("m", lost)]).partition("Warnings")[0]
    assert "no measurement" in headline
    assert "No measurement: in 1 of 4 batches" in headline
    assert number(whole.geodesic_sharpness) not in headline
    assert "can raise the loss by this much" not in headline
    assert "no measurement" not in render([Named("m", whole)]).lower()


def test_one_that_was_taken_from_python_has_no_command() -> None:
    shown = page_of(bare(data={"samples": 32}))
    assert shown.all("pre") == []
    assert "It was taken from Python" in shown.text


@pytest.mark.usefixtures("undrawn")
def test_of_a_folder_only_the_last_part_is_told() -> None:
    result = replace(full(), model={"id": "/home/me/secret/bert"}, data={"id": "/home/me/secret/reviews.csv"})
    text = render(named([Named("", result, "a.json")]))
    assert "secret" not in text
    assert "./bert" in text


# -------------------------------------------------------------------------------------------------------------- several


def test_results_taken_alike_are_ranked() -> None:
    shown = Page(render(many(a=[1.0, 1.2, 1.4], b=[1.1, 1.3, 1.2], c=[3.0, 3.2, 3.4])))
    assert shown.headings[:2] == ["Sharpness of 3 results", "Overview"]
    assert [a["href"] for a in shown.all("a")][:3] == ["#result-1", "#result-2", "#result-3"]
    assert [a["id"] for a in shown.all("article")] == ["result-1", "result-2", "result-3"]
    assert "1 (1 to 2)" in shown.text
    ranks = [a for a in shown.all("td") if a.get("data-label") == "rank"]
    assert len(ranks) == 3
    assert "The results by their sharpness" in str(shown.all("svg")[0]["aria-label"])


@pytest.mark.usefixtures("undrawn")
def test_results_of_other_settings_are_side_by_side_with_what_differs() -> None:
    items = named([Named(n, full(n, **c), f"{n}.json") for n, c in (("a/a", {}), ("b/b", {}), ("c/c", {"seed": 3}))])
    shown = Page(render(items))
    assert "They are not ranked" in shown.text
    assert "c/c: seed 3 here, 0 in a/a" in shown.text
    assert [a for a in shown.all("td") if a.get("data-label") == "rank"] == []


@pytest.mark.usefixtures("undrawn")
def test_headings_go_down_one_step_at_a_time() -> None:
    for text in (render([Named("m", full())]), render(many(a=[1.0, 2.0], b=[2.0, 3.0]))):
        levels = [int(level) for level in re.findall(r"<h([1-4])>", text)]
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))


def test_heads_of_encoder_and_decoder_have_a_map_each() -> None:
    from hf_geosharp import heatmaps

    modules = ("encoder.layers.10.attention", "encoder.layers.9.attention", "decoder.layers.0.cross")
    figure = heatmaps.heads_figure(heads(modules, 3))
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in maps] == ["encoder.layers.*.attention", "decoder.layers.*.cross"]
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ["9", "10"]
    assert maps[0].images[0].get_array()[1].tolist() == pytest.approx([0.01, 0.02, 0.03])
