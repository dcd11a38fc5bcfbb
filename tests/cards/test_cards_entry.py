"""The record in the metadata: what the Hub wants of it, what never gets into it, and what it replaces."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from hf_geosharp.cards import card, entry, index
from hf_geosharp.cards.document import split
from hf_geosharp.errors import CardError
from tests.cards.results import COMMIT, MODEL, make_result

BEFORE = b"---\nlicense: mit\n---\n# T\n"


def scores(content: bytes) -> list[dict[str, Any]]:
    return index.scores(split(content).yaml)


def values(content: bytes) -> list[float]:
    return [score["metrics"][0]["value"] for score in scores(content)]


def leaves(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return [leaf for value in item.values() for leaf in leaves(value)]
    if isinstance(item, (list, tuple)):
        return [leaf for value in item for leaf in leaves(value)]
    return [item]


def test_it_has_what_the_hub_requires() -> None:
    made = entry.entry(make_result())
    assert made["task"] == {"type": "text-classification"}
    assert made["dataset"]["type"] == made["dataset"]["name"] == "nyu-mll/glue"
    assert made["metrics"][0]["type"] == "geodesic_sharpness"
    assert made["metrics"][0]["value"] == 0.0125
    assert made["source"]["url"].startswith("https://")
    assert all(type(leaf) in (str, int, float) for leaf in leaves(made))
    # Only the Hub itself may say so.
    assert "verified" not in made["metrics"][0]


def test_the_hubs_client_reads_it() -> None:
    merged = card.merge(BEFORE, make_result(), MODEL).decode()
    (result,) = ModelCard(merged).data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("geodesic_sharpness", 0.0125, "train")
    assert result.metric_args["rho"] == 0.1


def test_a_score_survives_the_hubs_client_and_is_then_replaced() -> None:
    # Its round trip sorts, reflows and groups metrics by data set, the other metrics of the same data among them.
    other = (
        b"---\nmodel-index:\n- name: small-bert\n  results:\n  - task:\n      type: text-classification\n    dataset:\n"
        b"      name: nyu-mll/glue\n      type: nyu-mll/glue\n      config: sst2\n      split: train\n      revision: '"
        + COMMIT[::-1].encode()
        + b"'\n    metrics:\n    - type: accuracy\n      value: 0.9\n---\n# T\n"
    )
    merged = card.merge(other, make_result(), MODEL)
    again = str(ModelCard(merged.decode())).encode()
    assert len(yaml.safe_load(split(again).yaml)["model-index"][0]["results"]) == 1
    new = card.merge(again, make_result(geodesic_sharpness=0.5), MODEL)
    (result,) = yaml.safe_load(split(new).yaml)["model-index"][0]["results"]
    assert [(m["type"], m["value"]) for m in result["metrics"]] == [("accuracy", 0.9), ("geodesic_sharpness", 0.5)]
    (result,) = yaml.safe_load(split(card.remove(new)).yaml)["model-index"][0]["results"]
    assert [m["type"] for m in result["metrics"]] == ["accuracy"]


NUMBERS = [
    np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5), torch.tensor([0.5]),
    torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True),
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__}{getattr(number, 'shape', '')}")
def test_scalars_of_numpy_and_torch_become_plain_numbers(number: Any) -> None:
    result = make_result(geodesic_sharpness=number, rho=number, stderr=number, interval95=(number, number))
    merged = card.merge(BEFORE, result, MODEL)
    assert b"!!" not in merged
    (score,) = scores(merged)
    assert score["metrics"][0]["value"] == 0.5
    assert type(score["metrics"][0]["args"]["rho"]) is float
    assert yaml.safe_load(split(merged).yaml)["license"] == "mit"


def test_whole_numbers_of_numpy_become_plain_numbers() -> None:
    result = make_result(steps=np.int64(7), samples=np.int32(256), seed=torch.tensor(3))
    args = scores(card.merge(BEFORE, result, MODEL))[0]["metrics"][0]["args"]
    assert [(type(args[name]), args[name]) for name in ("steps", "samples", "seed")] == [(int, 7), (int, 256), (int, 3)]


NO_NUMBERS = [
    None, math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), "0.5", torch.ones(2), np.ones(2),
    object,
]  # fmt: skip


@pytest.mark.parametrize("number", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("field", ["geodesic_sharpness", "rho"])
def test_what_is_no_finite_number_is_refused(field: str, number: Any) -> None:
    with pytest.raises(CardError, match=field):
        card.merge(BEFORE, make_result(**{field: number}), MODEL)


@pytest.mark.parametrize("field", ["stderr", "base_loss"])
def test_neither_does_nan_reach_the_text(field: str) -> None:
    with pytest.raises(CardError, match="not a finite number"):
        card.merge(BEFORE, make_result(**{field: math.nan}), MODEL)


@pytest.mark.parametrize(("field", "value"), [("steps", 1.5), ("samples", None), ("metric", None), ("geodesic", " ")])
def test_settings_of_another_type_are_refused(field: str, value: Any) -> None:
    with pytest.raises(CardError, match=r"result's"):
        card.merge(BEFORE, make_result(**{field: value}), MODEL)


def test_small_numbers_are_numbers_to_every_reader() -> None:
    # 1e-05 is text to YAML 1.1, which wants a point.
    merged = card.merge(BEFORE, make_result(geodesic_sharpness=1e-5, rho=1e-7), MODEL)
    assert b"value: 1.0e-05" in merged
    assert values(merged) == [1e-5]


def test_text_that_looks_like_something_else_is_quoted() -> None:
    data = {"id": "a/b", "revision": "1" * 39 + "e", "config": "no", "split": "1e5"}
    merged = card.merge(BEFORE, make_result(data=data), MODEL)
    assert scores(merged)[0]["dataset"] == {
        "name": "a/b", "type": "a/b", "config": "no", "split": "1e5", "revision": "1" * 39 + "e"
    }  # fmt: skip
    assert b'"1e5"' in merged


def test_the_same_settings_replace() -> None:
    merged = card.merge(card.merge(BEFORE, make_result(), MODEL), make_result(geodesic_sharpness=0.7), MODEL)
    assert values(merged) == [0.7]


@pytest.mark.parametrize(
    "changes",
    [
        {"rho": 0.2},
        {"metric": "mix"},
        {"steps": 30},
        {"samples": 128},
        {"seed": 1},
        {"mode": "average"},
        {"symmetries": "paper"},
        {"data": {"id": "nyu-mll/glue", "revision": COMMIT, "config": "mnli"}},
        {"data": {"id": "x.csv"}},
        {"data": {"id": "y.csv"}},
        {"model": {"id": "x", "task": "causal-lm"}},
    ],
    ids=str,
)
def test_other_settings_stand_beside(changes: dict[str, Any]) -> None:
    merged = card.merge(BEFORE, make_result(), MODEL)
    both = card.merge(merged, make_result(geodesic_sharpness=0.7, **changes), MODEL)
    assert values(both) == [0.0125, 0.7]
    assert card.merge(both, make_result(geodesic_sharpness=0.7, **changes), MODEL) == both
    # The first one again: it is replaced where it stands, and the text tells of it.
    assert values(card.merge(both, make_result(), MODEL)) == [0.0125, 0.7]
    assert b"Other scores in the metadata" in both


def test_the_list_of_other_scores_tells_them_apart() -> None:
    """Two that differ in the case or in how they were searched had the same line."""
    merged = BEFORE
    for changes in (
        {"mode": "average", "steps": 100, "ascent": "none"},
        {"steps": 40},
        {"ascent": "secant", "starts": 2, "samples": 512, "seed": 3},
        {"damping": 0.5, "geodesic": "first"},
        {},
    ):
        merged = card.merge(merged, make_result(**changes), MODEL)
    name, data = "Geodesic sharpness (inv, rho 0.1)", "nyu-mll/glue, train"
    start = merged.decode().index("Other scores in the metadata")
    assert merged.decode()[start:].splitlines()[2:6] == [
        f"- 0.0125: {name}, average case, 100 draws, {data}",
        f"- 0.0125: {name}, worst case, 40 steps of Auto-PGD, {data}",
        f"- 0.0125: {name}, worst case, at most 20 steps of the secant ascent, from each of 2 starts, {data}, "
        "samples 512, seed 3",
        f"- 0.0125: {name}, worst case, 20 steps of Auto-PGD, {data}, geodesic first, damping 0.5",
    ]
    # Seen from one with a setting that the others leave at its default, and with what an older version wrote.
    older = re.sub(rb"\n +(case: worst|ascent: apgd)(?=\n)", b"", merged)
    text = card.merge(older, make_result(damping=0.25), MODEL).decode()
    assert f"- 0.0125: {name}, 20 steps, {data}, default damping" in text
    assert f"- 0.0125: {name}, average case, 100 draws, {data}, default damping" in text


def test_versions_and_times_are_not_in_the_metadata() -> None:
    one, two = (split(card.merge(BEFORE, make_result(versions={"hf-geosharp": v}, seconds=s), MODEL))
                for v, s in (("1", 1.0), ("2", 2.0)))  # fmt: skip
    assert one.yaml == two.yaml
    assert one.rest != two.rest


@pytest.mark.parametrize(
    ("metric", "kind"),
    [("inv", "geodesic_sharpness"), ("mix", "geodesic_sharpness"), ("adaptive", "adaptive_sharpness"),
     ("euclidean", "euclidean_sharpness")],
)  # fmt: skip
def test_what_is_not_geodesic_is_not_called_so(metric: str, kind: str) -> None:
    merged = card.merge(BEFORE, make_result(metric=metric), MODEL)
    assert scores(merged)[0]["metrics"][0]["type"] == kind
    assert entry.TITLES[kind].encode() in split(merged).rest.encode()
    assert card.remove(merged) == BEFORE


def test_a_metric_of_somebody_else_with_the_same_name_is_left_alone() -> None:
    theirs = (
        b"---\nmodel-index:\n- name: x\n  results:\n  - task:\n      type: t\n"
        b"    dataset:\n      type: d\n      name: d\n"
        b"    metrics:\n    - type: geodesic_sharpness\n      value: 3\n---\n"
    )
    assert card.remove(theirs) == theirs
    assert card.remove(card.merge(theirs, make_result(), MODEL)) == theirs


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        ({"id": "/home/me/private/reviews.csv"}, "reviews.csv", "csv"),
        ({"id": "C:\\Users\\me\\reviews.parquet"}, "reviews.parquet", "parquet"),
        ({"id": "../photos"}, "photos", "custom"),
        ({"id": "demo:digits-vit"}, "demo:digits-vit", "parquet"),
        ({"id": "shipped text"}, "shipped text", "parquet"),
        ({}, "custom data", "custom"),
    ],
)
def test_folders_of_local_data_are_not_published(data: dict[str, Any], name: str, kind: str) -> None:
    model = {"id": "/home/me/private/model", "task": "causal-lm"}
    merged = card.merge(BEFORE, make_result(data=data, model=model), "model")
    (score,) = scores(merged)
    assert (score["dataset"]["name"], score["dataset"]["type"], score["task"]["type"]) == (
        name,
        kind,
        "text-generation",
    )
    assert b"private" not in merged
    assert b"Users" not in merged


def test_local_data_are_no_data_set_for_the_next_score() -> None:
    from hf_geosharp.tasks.data import card_data
    from hf_geosharp.tasks.kinds import find_task

    for data in ({"id": "reviews.csv"}, {"id": "demo:vader-bert"}, {}):
        merged = card.merge(BEFORE, make_result(data=data), MODEL)
        assert card_data(yaml.safe_load(split(merged).yaml), find_task("text-classification")) == []


def test_the_model_of_the_cards_name_gets_the_score() -> None:
    two = b"---\nmodel-index:\n- name: other\n  results: []\n- name: Small-BERT\n  results: []\n---\n"
    merged = yaml.safe_load(split(card.merge(two, make_result(), MODEL)).yaml)["model-index"]
    assert [(model["name"], len(model["results"])) for model in merged] == [("other", 0), ("Small-BERT", 1)]


def test_no_other_model_gets_the_score() -> None:
    two = b"---\nmodel-index:\n- name: a\n  results: []\n- name: b\n  results: []\n---\n"
    merged = yaml.safe_load(split(card.merge(two, make_result(), MODEL)).yaml)["model-index"]
    assert [(model["name"], len(model["results"])) for model in merged] == [("a", 0), ("b", 0), ("small-bert", 1)]


def test_a_single_model_gets_the_score_whatever_its_name() -> None:
    one = b"---\nmodel-index:\n- name: checkpoint-1200\n  results: []\n---\n"
    merged = yaml.safe_load(split(card.merge(one, make_result(), MODEL)).yaml)["model-index"]
    assert [(model["name"], len(model["results"])) for model in merged] == [("checkpoint-1200", 1)]


def test_a_score_that_is_no_measurement_gets_into_no_card() -> None:
    (first, *rest) = make_result().per_batch
    lost = dataclasses.replace(first, value=0.0, stopped="lost")
    with pytest.raises(CardError, match="is not a measurement: in 1 of 2 batches"):
        entry.plain(make_result(per_batch=[lost, *rest]))


def test_a_length_and_a_precision_that_were_chosen_are_settings() -> None:
    result = make_result()
    args = entry.entry(entry.plain(result))["metrics"][0]["args"]
    assert not {"max_length", "dtype"} & set(args)
    chosen = make_result(
        data={**result.data, "max_length": 8, "max_length_chosen": True}, model={**result.model, "dtype": "float64"}
    )
    args = entry.entry(entry.plain(chosen))["metrics"][0]["args"]
    assert (args["max_length"], args["dtype"]) == (8, "float64")
