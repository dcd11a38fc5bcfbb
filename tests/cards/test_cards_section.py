"""What the text of a card says of a score, and the command in it."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest

from hf_geosharp.cards import card, entry, index, section
from hf_geosharp.cards.document import split
from hf_geosharp.cards.reproduce import Recipe, recipe
from hf_geosharp.sharpness.choices import ASCENTS
from hf_geosharp.sharpness.result import CurvePoint, PairSummary, PartScore, Profile, Reproducible
from tests.cards.results import COMMIT, MODEL, make_result


def arguments(how: Recipe) -> dict[str, Any]:
    """What the command line makes of the command in the text."""
    from hf_geosharp.cli.score import command as score

    assert how.line is not None
    assert f"$ {how.line}\n" in how.markdown()
    program, name, *rest = shlex.split(how.line)
    assert (program, name) == ("hf-geosharp", "score")
    context = score.make_context("score", rest)
    assert isinstance(context, click.Context)
    return context.params


def test_value_interval_settings_and_versions() -> None:
    text = section.render(make_result(), MODEL)
    assert (
        "**0.0125000** nats ± 0.0005 (95 % interval 0.006 to 0.019) on nyu-mll/glue, config sst2, split train" in text
    )
    assert "radius ρ = 0.1" in text
    assert "inv, geodesic second, worst case" in text
    assert "32 pairs, 2,048 dimensions divided out" in text
    assert "256 in batches of 128, seed 0" in text
    assert "20 steps of Auto-PGD; settled in 1 of 2 batches" in text
    assert "Taken with hf-geosharp 0.1.0, torch 2.13.0." in text
    assert "no certificate of generalization" in text
    assert "| 0.03 | 0.00400000 | 0.001 to 0.007 |" in text
    assert "None" not in text
    assert "$" not in text.replace("\n$ hf-geosharp", "")


def test_of_a_score_from_a_training_there_is_no_command() -> None:
    result = make_result(model={**make_result().model, "step": 12}, data={"id": "train_dataset"})
    how = recipe(result, MODEL)
    assert how.line is None
    assert how.markdown() == "It was taken in training, at step 12, by `hf_geosharp.GeodesicSharpnessCallback`."


def test_a_loss_that_is_not_in_nats_says_whose_it_is() -> None:
    own = make_result(data={"loss": "my.loss 0123456789ab"})
    text = section.render(own, MODEL)
    assert "**0.0125000** units of the loss ± 0.0005" in text
    assert "| loss | `my.loss 0123456789ab`, 0.250000 units of the loss before the perturbation |" in text
    assert "nats" not in text
    assert entry.entry(own)["metrics"][0]["args"]["loss"] == "my.loss 0123456789ab"


def test_the_command_takes_the_same_score() -> None:
    params = arguments(recipe(make_result(), MODEL))
    expected = {
        "model": MODEL, "data": "nyu-mll/glue", "data_config": "sst2", "split": "train", "task": "text-classification",
        "text_column": "sentence", "label_column": "label", "metric": "inv", "geodesic": "second", "symmetries": "full",
        "rho": (0.1, 0.03), "samples": 256, "batch_size": 128, "steps": 20, "seed": 0, "average": False,
        "baselines": True, "labels": "data", "dtype": "float32", "revision": COMMIT,
    }  # fmt: skip
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize("ascent", ASCENTS)
@pytest.mark.parametrize("params", ["all", "lora"])
def test_the_command_climbs_in_the_same_way_with_the_same_weights(ascent: str, params: str) -> None:
    given = arguments(recipe(make_result(ascent=ascent, params=params), MODEL))
    assert (given["ascent"], given["params"]) == (ascent, params)


def test_a_length_that_was_chosen_is_in_the_command() -> None:
    data = make_result().data
    assert arguments(recipe(make_result(data={**data, "max_length": 64}), MODEL))["max_length"] is None
    chosen = make_result(data={**data, "max_length": 64, "max_length_chosen": True})
    assert arguments(recipe(chosen, MODEL))["max_length"] == 64


def test_several_starts_are_told_and_taken_again() -> None:
    result = make_result(starts=3, ascent="secant")
    assert arguments(recipe(result, MODEL))["starts"] == 3
    assert "by at most 20 steps of the secant ascent, from each of 3 starts" in section.render(result, MODEL)
    assert entry.entry(entry.plain(result))["metrics"][0]["args"]["starts"] == 3
    assert "starts" not in entry.entry(entry.plain(make_result()))["metrics"][0]["args"]


def test_scores_of_other_columns_are_two_scores() -> None:
    """They compare as scores of other data, and one took the place of the other in a card."""
    data = make_result().data
    content = b""
    for text in ("sentence", "body", "title", "body"):
        result = make_result(data={**data, "columns": {"text": text, "label": "label"}})
        content = card.merge(content, result, MODEL)
    args = [score["metrics"][0]["args"].get("columns") for score in index.scores(split(content).yaml)]
    assert args == [None, "text body", "text title"]


def test_scores_with_and_without_a_layout_are_two_scores() -> None:
    model = make_result().model
    plain, laid, edited = (
        make_result(),
        *(
            make_result(model={**model, "layouts": ["mine"], "layouts_digest": digest})
            for digest in ("0" * 12, "1" * 12)
        ),
    )
    content = b""
    for result in (plain, laid, edited, laid):
        content = card.merge(content, result, MODEL)
    args = [score["metrics"][0]["args"].get("layouts") for score in index.scores(split(content).yaml)]
    assert args == [None, "mine 000000000000", "mine 111111111111"]
    assert b", layouts mine 111111111111" in content


@pytest.mark.parametrize(
    ("ascent", "words"),
    [
        ("auto", "by at most 13 steps of the secant ascent, and 60 of Auto-PGD in rough balls (a lower bound"),
        ("secant", "by at most 20 steps of the secant ascent"),
        ("apgd", "by 20 steps of Auto-PGD"),
    ],
)
def test_the_ascent_is_named(ascent: str, words: str) -> None:
    assert words in section.render(make_result(ascent=ascent), MODEL)


def test_the_command_of_local_files_names_no_folder() -> None:
    result = make_result(
        model={"id": "/secret/my model", "task": "causal-lm", "dtype": "float64"},
        data={"id": "/secret/it's.csv", "split": "train", "columns": {"text": "a b"}, "labels": "model"},
        mode="average", baselines={}, rho=1e-7, curve=[CurvePoint(1e-7, 0.0125, None, None, None)],
    )  # fmt: skip
    params = arguments(recipe(result, "my model"))
    assert (params["model"], params["data"], params["text_column"]) == ("./my model", "./it's.csv", "a b")
    assert (params["labels"], params["average"], params["dtype"], params["rho"]) == ("model", True, "float64", (1e-7,))


def test_the_command_names_no_symmetries_where_there_were_none_to_choose() -> None:
    given = arguments(recipe(make_result(metric="adaptive", symmetries="none", geodesic="first"), MODEL))
    assert (given["metric"], given["symmetries"]) == ("adaptive", "full")
    skipped = arguments(recipe(make_result(data={"id": "x.csv", "skipped_batches": [3]}), MODEL))
    # The score is of 256 samples, and a batch of 128 was drawn and skipped.
    assert (skipped["on_nan"], skipped["samples"], skipped["batch_size"]) == ("skip", 384, 128)
    lacking = arguments(recipe(make_result(model={**make_result().model, "missing": ["a", "b"]}), MODEL))
    assert (lacking["allow_missing"], lacking["samples"]) == (True, 256)
    third = arguments(recipe(make_result(rho=1 / 3, curve=[CurvePoint(1 / 3, 0.0125, None, None, None)]), MODEL))
    assert third["rho"] == (1 / 3,)
    assert "`damping=0.01`" in recipe(make_result(damping=0.01), MODEL).note


def test_a_score_of_python_has_no_recipe() -> None:
    result = make_result(data={"fingerprint": "abc"})
    assert recipe(result, MODEL).line is None
    assert "by `hf_geosharp.score`" in recipe(result, MODEL).markdown()
    assert "custom data" in section.render(result, MODEL)


def test_a_label_map_is_mentioned() -> None:
    how = recipe(make_result(data={"id": "x.csv", "labels": "label map"}), MODEL)
    assert "--label-map" in how.note
    assert how.note in how.markdown()


def test_the_command_takes_the_parts_and_the_way_as_well() -> None:
    parts = [PartScore(f"encoder.{i}", "layer", i, None, None, 0.1, 0.01) for i in range(2)]
    given = arguments(recipe(make_result(per=parts, profile=Profile((0.0, 1.0), (0.0, 0.1), (0.0, 0.1), 0.1)), MODEL))
    assert (given["per"], given["profile"]) == ("layer", True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stderr": None, "interval95": None}, "one batch, so without an interval"),
        ({"reproducible": Reproducible(False, 0.5, "x")}, "**This score is not reproducible**"),
        ({"reproducible": Reproducible(None, None, "x")}, "not checked"),
        ({"data": {"id": "x.csv", "split": "test"}}, "It is of the split test"),
        ({"data": {"id": "x.csv", "skipped_batches": [3]}}, "1 of 3 batches were left out"),
        ({"model": {"id": "m", "missing": ["a", "b"]}}, "**Not all weights were trained**: the checkpoint lacks 2,"),
        ({"mode": "average"}, "mean rise of the mean loss"),
        ({"metric": "adaptive"}, "the same function at other weights can have another score"),
        ({"pairs": PairSummary(1, 2, dropped=["a", "b"])}, "2 dropped"),
        ({"data": {"id": "x.csv", "labels": "model"}}, "divergence from the model's own output"),
        ({"data": {"id": "we|ird `name` <b> [x]"}}, r"we\|ird \`name\` \<b\> \[x\]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)
def test_what_a_reader_must_know_is_said(changes: dict[str, Any], said: str) -> None:
    assert said in section.render(make_result(**changes), MODEL)


def test_the_picture_has_an_alternative_text() -> None:
    text = section.render(make_result(), MODEL, picture="p.png")
    assert "![Geodesic sharpness by radius: 0.00400000 at ρ = 0.03, 0.0125000 at ρ = 0.1](p.png)" in text


def test_the_section_is_replaced_where_it_stands() -> None:
    before = f"# T\n\n{section.START}\nold\n{section.END}\n\n## More\n".encode()
    merged = card.merge(before, make_result(), MODEL).decode()
    assert "old" not in merged
    assert merged.endswith(f"{section.END}\n\n## More\n")
    assert card.remove(merged.encode()).decode() == "# T\n\n## More\n"


def test_a_new_card_names_the_model_and_claims_nothing() -> None:
    text = card.new(MODEL).decode()
    assert "# small-bert\n" in text
    assert "license" not in text
    card.check(text.encode())
