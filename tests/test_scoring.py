"""Whole scores of the shipped demos: the twin is the same function, and its score is the same number."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_geosharp import SharpnessResult, demos, inspect_pretrained, load_pretrained, score_pretrained
from hf_geosharp.comparison import compare_pretrained
from hf_geosharp.errors import UsageError
from hf_geosharp.tasks.models import load_model
from hf_geosharp.tasks.prepare import prepare


def scored(name: str, **changes: Any) -> SharpnessResult:
    return score_pretrained(name, **{"samples": 256, "device": "cpu", **changes})


def agree_to_five_digits(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-5 * max(abs(a), abs(b))


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "geodesic"), [("inv", "second"), ("mix", "second"), ("mix", "exact")])
@pytest.mark.parametrize("name", ["digits-vit", "vader-bert"])
def test_a_demo_and_its_twin_agree_to_five_digits_where_adaptive_sharpness_differs(
    name: str, metric: str, geodesic: str
) -> None:
    options = {"metric": metric, "geodesic": geodesic, "baselines": ["adaptive"]}
    model, twin = (scored(f"demo:{name}{suffix}", **options) for suffix in ("", "-twin"))
    assert model.geodesic_sharpness > 1e-3
    assert model.reproducible.ok
    assert twin.reproducible.ok
    assert agree_to_five_digits(model.geodesic_sharpness, twin.geodesic_sharpness)
    for a, b in zip(model.per_batch, twin.per_batch, strict=True):
        if geodesic == "exact":
            # A rise is a difference of losses, of which single precision has so many digits, and this one is small.
            assert abs(a.value - b.value) <= 1e-5 * min(a.base_loss + a.value, b.base_loss + b.value)
        else:
            assert agree_to_five_digits(a.value, b.value)
    assert twin.baselines["adaptive"] > 3 * model.baselines["adaptive"]
    assert twin.model["id"] == f"demo:{name}-twin"
    assert twin.data == model.data


@pytest.mark.parametrize("name", ["digits-vit", "vader-bert"])
def test_a_twin_is_the_same_function_at_other_weights(name: str) -> None:
    from hf_geosharp.scoring import make_twin

    folder = demos.path(name)
    loaded = load_model(str(folder), dtype="float64", device="cpu")
    prepared = prepare(loaded, data=str(folder / "data"), samples=32, batch_size=32)
    model, batch = prepared.model.eval(), prepared.batches[0]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        outputs = model(**batch).logits
        make_twin(model)
        moved = model(**batch).logits
    torch.testing.assert_close(moved, outputs, rtol=1e-9, atol=1e-9)
    distance = max(float((p.detach() - before[n]).norm() / before[n].norm()) for n, p in model.named_parameters())
    assert distance > 0.5


def test_a_copied_demo_scored_from_its_folder_gives_the_same_number(tmp_path: Path) -> None:
    folder = demos.copy("digits-vit", tmp_path / "mine")
    options = {"samples": 64, "batch_size": 32, "steps": 3}
    shipped = scored("demo:digits-vit", **options)
    copied = scored(str(folder), data=str(folder / "data"), **options)
    assert copied.geodesic_sharpness == shipped.geodesic_sharpness
    assert copied.per_batch == shipped.per_batch
    assert shipped.data["id"] == "demo:digits-vit"
    assert (shipped.data["chosen"], copied.data["chosen"]) == ("shipped with the demo", "argument")


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("name", ["digits-vit", "vader-bert"])
def test_in_double_precision_every_batch_of_a_twin_agrees_to_ten_digits(name: str, metric: str) -> None:
    model, twin = (scored(f"demo:{name}{suffix}", metric=metric, dtype="float64") for suffix in ("", "-twin"))
    for a, b in zip(model.per_batch, twin.per_batch, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-10)


def test_float64_and_float32_agree_on_a_demo() -> None:
    options = {"samples": 64, "batch_size": 64, "steps": 5}
    narrow, wide = (scored("demo:digits-vit", dtype=d, **options) for d in ("float32", "float64"))
    assert narrow.geodesic_sharpness == pytest.approx(wide.geodesic_sharpness, rel=1e-4)


def test_labels_of_the_model_need_no_label_column() -> None:
    result = scored("demo:digits-vit", samples=32, batch_size=32, steps=2, labels="model")
    assert abs(result.base_loss) < 1e-6
    assert result.data["labels"] == "model"


def test_a_demo_that_does_not_ship_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="there is no demo 'digits-cnn'"):
        scored("demo:digits-cnn")


@pytest.mark.slow
def test_a_radius_at_which_rounding_decides_the_score_is_reported() -> None:
    result = scored("demo:digits-vit", metric="mix", geodesic="second", rho=(15.0, 1e-3), samples=128, ascent="apgd")
    assert {p.rho: p.reproducible for p in result.curve} == {1e-3: True, 15.0: False}
    assert result.reproducible.ok is False
    assert result.reproducible.spread > 0.01
    assert any("rho 15 is not reproducible" in w and "smaller radius" in w for w in result.warnings)


@pytest.mark.slow
def test_a_model_that_is_loaded_is_scored_as_by_its_name() -> None:
    options = {"samples": 32, "batch_size": 32, "steps": 2}
    loaded = load_pretrained("demo:digits-vit", device="cpu", dtype="float64")
    by_name = scored("demo:digits-vit", dtype="float64", **options)
    # Twice: the first leaves no trace.
    for result in (score_pretrained(loaded, **options), score_pretrained(loaded, **options)):
        assert result.geodesic_sharpness == by_name.geodesic_sharpness
        assert (result.model, result.data) == (by_name.model, by_name.data)
    own = Dataset.from_parquet(str(demos.path("digits-vit") / "data" / "train.parquet"))
    in_memory = score_pretrained(loaded, data=own, **options)
    assert in_memory.geodesic_sharpness == by_name.geodesic_sharpness


def test_options_that_a_loaded_model_or_data_in_memory_cannot_heed_are_refused() -> None:
    loaded = load_pretrained("demo:digits-vit", device="cpu")
    with pytest.raises(UsageError, match="give dtype, revision to load_pretrained"):
        score_pretrained(loaded, dtype="float64", revision="main")
    with pytest.raises(UsageError, match="only for data that are given by name"):
        score_pretrained(loaded, data=[{}], split="test")


def test_numbers_of_rows_and_seeds_may_be_those_of_numpy() -> None:
    """As for the other settings (tests/sharpness/test_bad_input.py); data in memory take the same way."""
    options = {"samples": np.int64(64), "batch_size": np.int64(32), "seed": np.int64(1)}
    result = scored("demo:digits-vit", steps=1, **options)
    assert SharpnessResult.from_dict(json.loads(result.to_json())) == result
    inspected = inspect_pretrained("demo:digits-vit", random_init=True, seed=np.int64(1), device="cpu")
    assert json.loads(inspected.to_json())["model"]["seed"] == 1
    assert result == replace(
        scored("demo:digits-vit", steps=1, samples=64, batch_size=32, seed=1), seconds=result.seconds
    )


def test_names_of_files_that_are_empty_or_have_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    quick: dict[str, Any] = {"samples": 32, "batch_size": 32, "steps": 1}
    scored("demo:digits-vit", output="~/run", **quick)
    assert (tmp_path / "home" / "run" / "result.json").is_file()
    for empty, says in (("output", "output is an empty name"), ("data", "is empty; for the folder")):
        with pytest.raises(UsageError, match=says):
            scored("demo:digits-vit", **{empty: ""}, **quick)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    folder = shutil.copytree(demos.path("digits-vit"), tmp_path / "model")
    data = next((folder / "data").glob("train*"))
    options: dict[str, Any] = {"data": data, "samples": 32, "batch_size": 32, "steps": 1, "device": "cpu"}
    found, named = (score_pretrained(place, **options) for place in (folder, str(folder)))
    assert found.geodesic_sharpness == named.geodesic_sharpness
    assert found.model == named.model
    assert inspect_pretrained(folder, random_init=True, device="cpu").model["id"] == str(folder)
    ranking = compare_pretrained([folder, Path(shutil.copytree(folder, tmp_path / "other"))], **options)
    assert [model.name for model in ranking.ranking] == ["model", "other"]


def test_the_divergence_from_the_own_output_starts_at_zero_whatever_autocast_is_on() -> None:
    options: dict[str, Any] = {"samples": 32, "batch_size": 32, "steps": 2, "labels": "model"}
    plain = score_pretrained("demo:digits-vit", device="cpu", **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = score_pretrained("demo:digits-vit", device="cpu", **options)
    assert cast.per_batch == plain.per_batch
    assert abs(plain.base_loss) < 1e-6
