"""Zoos: recipes, data, training and what is measured, on tiny models; the page against its data."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import ViTForImageClassification

from benchmarks.zoo import __main__ as command
from benchmarks.zoo import findings, measures, summary, training
from benchmarks.zoo.data import DEVIATION, MEAN, Data, MissingDataError, balanced, fashion, idx, turned
from benchmarks.zoo.measures import Cell, Journal
from benchmarks.zoo.page import page

ROOT = Path(__file__).resolve().parents[2]
KEPT = sorted((ROOT / "benchmarks" / "data").glob("zoo_*.json"))


def pictures(count: int = 40) -> Data:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    pixels = torch.randn(count, 1, 28, 28, generator=generator) + labels.view(-1, 1, 1, 1)
    split = {"pixel_values": pixels, "labels": labels}
    return Data(split, split, {"other": split}, classes=2)


# ------------------------------------------------------------------------------------------------- data, training


def test_a_quarter_turn_is_a_quarter_turn() -> None:
    picture = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    there = turned(picture, 90.0)
    assert torch.allclose(there, picture.rot90(1, (2, 3)), atol=1e-5) or torch.allclose(
        there, picture.rot90(-1, (2, 3)), atol=1e-5
    )


def test_balanced_rows_are_half_and_half_and_too_few_are_refused() -> None:
    rows = [("a", 1), ("b", 1), ("c", 0), ("d", 1), ("e", 0)]
    assert balanced(rows, 4) == [("a", 1), ("b", 1), ("c", 0), ("e", 0)]
    with pytest.raises(ValueError, match="fewer than 3 of a label"):
        balanced(rows, 6)


def idx_file(values: Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + bytes(values.flatten().tolist()), mtime=0)


def clothes(folder: Path, count: int = 6, side: int = 28) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, side, side), generator=generator)
    labels = torch.arange(count) % 10
    (folder / "train-images-idx3-ubyte.gz").write_bytes(idx_file(pixels))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(idx_file(labels))
    return pixels, labels


def test_idx_files_are_read_in_their_shape() -> None:
    for values in (torch.arange(256), torch.arange(24).view(2, 3, 4)):
        found = idx(idx_file(values), "x")
        assert found.dtype == torch.uint8
        assert torch.equal(found.long(), values)


@pytest.mark.parametrize(
    ("content", "message"),
    # Times are written into the bytes otherwise, and with them into the names of the tests.
    [
        (b"no gzip", "x is no whole gzip file"),
        (idx_file(torch.arange(9))[:-9], "x is no whole gzip file"),
        (b"", "x is no IDX file"),
        (gzip.compress(b"", mtime=0), "x is no IDX file"),
        (gzip.compress(bytes([0, 0, 13, 1, 0, 0, 0, 1]) + bytes(4), mtime=0), "x is no IDX file of unsigned bytes"),
        (gzip.compress(bytes([0, 0, 8, 3, 0, 0, 0, 1]), mtime=0), "x is no IDX file"),
        (
            gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 5]) + bytes(4), mtime=0),
            r"x has 4 numbers, and its head says \[5\]",
        ),
    ],
)
def test_what_is_no_idx_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        idx(content, "x")


def test_fashion_is_encoded_as_the_digits_are(tmp_path: Path) -> None:
    pixels, labels = clothes(tmp_path)
    split = fashion(tmp_path)
    assert split["pixel_values"].shape == (6, 1, 28, 28)
    again = split["pixel_values"][:, 0] * DEVIATION + MEAN
    assert torch.allclose(again * 255, pixels.float(), atol=1e-3)
    assert torch.equal(split["labels"], labels)


def test_images_that_do_not_fit_their_labels_are_refused(tmp_path: Path) -> None:
    clothes(tmp_path, side=14)
    with pytest.raises(ValueError, match="do not fit images"):
        fashion(tmp_path)
    clothes(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(idx_file(torch.zeros(5, dtype=torch.long)))
    with pytest.raises(ValueError, match="5 labels do not fit images"):
        fashion(tmp_path)


def test_missing_data_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        MissingDataError, match=r"train-images.* and train-labels.*apt install dataset-fashion-mnist.*--fash"
    ):
        fashion(tmp_path)
    clothes(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(MissingDataError, match=r"^train-images-idx3-ubyte\.gz of Fashion-MNIST not found in "):
        fashion(tmp_path)


def test_the_command_ends_with_that_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.sources, "load", lambda *_: pictures())
    monkeypatch.setattr(command, "make", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("sys.argv", ["zoo", "finetune-image", "--work", str(tmp_path), "--fashion", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert "apt install dataset-fashion-mnist" in capsys.readouterr().err


@pytest.mark.parametrize("zoo", sorted(training.CHOICES))
def test_a_recipe_follows_from_its_number_and_recipes_differ(zoo: str) -> None:
    recipes = [training.draw(zoo, index) for index in range(60)]
    assert recipes == [training.draw(zoo, index) for index in range(60)]
    assert len(set(recipes)) == 60
    for name in ("optimizer", "rate", "decay", "batch_size", "steps", "dropout", "augmentation", "noise"):
        assert len({getattr(recipe, name) for recipe in recipes}) > 1, name


def test_noise_changes_about_its_part_of_the_labels_and_nothing_else() -> None:
    data = pictures(4000)
    recipe = training.Recipe("adamw", 1e-3, 0.0, 16, 2, 0.0, 0.0, 0.2, seed=3)
    split = training.training_split(data, recipe)
    # Half of the drawn labels are the right ones.
    assert float((split["labels"] != data.train["labels"]).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert torch.equal(split["pixel_values"], data.train["pixel_values"])
    assert torch.equal(split["labels"], training.training_split(data, recipe)["labels"])


def test_every_sample_is_seen_once_a_round() -> None:
    rows = list(training.batches(10, 4, 6, torch.Generator().manual_seed(0)))
    assert [len(r) for r in rows] == [4, 4, 2, 4, 4, 2]
    for part in (rows[:3], rows[3:]):
        assert sorted(torch.cat(part).tolist()) == list(range(10))


def test_augmentation_moves_pictures_by_a_pixel_and_hides_words_but_no_special_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    picture = torch.zeros(50, 1, 8, 8)
    picture[:, :, 4, 4] = 1
    moved = training.augmented({"pixel_values": picture}, 1.0, generator)["pixel_values"]
    places = moved.flatten(1).argmax(1)
    assert set(places.tolist()) == {8 * y + x for y in (3, 4, 5) for x in (3, 4, 5)}
    ids = torch.tensor([[2, 10, 11, 3, 0]]).expand(200, -1)
    hidden = training.augmented({"input_ids": ids}, 0.5, generator)["input_ids"]
    assert torch.equal(hidden[:, [0, 3, 4]], ids[:, [0, 3, 4]])
    words = hidden[:, 1:3]
    assert set(words.flatten().tolist()) == {1, 10, 11}
    assert float((words == 1).float().mean()) == pytest.approx(0.5, abs=0.1)


def test_a_model_is_trained_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = training.Recipe("sgd", 0.05, 0.0, 8, 30, 0.0, 0.0, 0.0, seed=0)
    monkeypatch.setattr(training, "draw", lambda zoo, index: recipe)
    row = training.make("image", 0, pictures(), tmp_path)
    assert row["train"]["error"] < 0.2
    assert training.make("image", 0, pictures(), tmp_path) == row
    again = training.make("image", 0, pictures(), tmp_path / "other")
    assert again == row
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    training.make("image", 0, pictures(), tmp_path)


@pytest.mark.parametrize(("zoo", "keeps"), [("finetune", True), ("finetune-image", False)])
def test_fine_tunes_start_from_one_model_and_keep_its_head_where_classes_are_the_same(
    zoo: str, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pictures()
    short = replace(training.PRETRAINING[zoo], recipe=replace(training.PRETRAINING[zoo].recipe, steps=3))
    monkeypatch.setitem(training.PRETRAINING, zoo, short)
    start = training.pretrained(zoo, data, lambda: data.train, tmp_path)
    assert ("classifier.weight" in start) == keeps
    again = training.pretrained(zoo, data, lambda: pytest.fail("trained again"), tmp_path)
    assert all(torch.equal(again[name], start[name]) for name in start)

    monkeypatch.setattr(training, "train", lambda *_: None)
    models = []
    for index in (0, 1):
        training.make(zoo, index, data, tmp_path, start)
        kept = ViTForImageClassification.from_pretrained(tmp_path / f"{index:03d}")
        models.append(kept.state_dict())
    assert all(torch.equal(model[name], start[name]) for model in models for name in start)
    assert torch.equal(models[0]["classifier.weight"], models[1]["classifier.weight"]) == keeps


# ------------------------------------------------------------------------------------------------------- measures


class Linear(nn.Module):
    """Logits that are linear in the only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = x @ self.weight.T
        return SimpleNamespace(logits=logits)


def some(count: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(count, 4, generator=generator),
        "labels": torch.randint(3, (count,), generator=generator),
    }


def test_the_hessian_is_that_of_the_mean_loss() -> None:
    pytest.importorskip("curvlinops")
    model, batch = Linear(), some()

    def loss(w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(batch["x"] @ w.view(3, 4).T, batch["labels"])

    full = torch.autograd.functional.hessian(loss, model.weight.detach().flatten())
    top, trace = measures.hessian(model, batch)
    assert top == pytest.approx(float(torch.linalg.eigvalsh(full)[-1]), rel=1e-2)
    assert trace == pytest.approx(float(full.trace()), rel=0.5)  # of ten random vectors


def test_the_margin_is_a_low_quantile_of_the_lead() -> None:
    model, batch = Linear(), some(501)
    logits = (batch["x"] @ model.weight.T).tolist()
    leads = sorted(
        row[label] - max(value for k, value in enumerate(row) if k != label)
        for row, label in zip(logits, batch["labels"].tolist(), strict=True)
    )
    assert measures.margin(model, batch) == pytest.approx(leads[50], abs=1e-5)


@pytest.mark.slow
def test_a_score_is_taken_at_every_radius_and_grows_with_it() -> None:
    data = pictures(64)
    torch.manual_seed(0)
    model = training.build(data, 0.0).eval()
    for cell in (Cell("inv", "second", batches=2, batch_size=16), Cell("adaptive", batches=1, batch_size=32)):
        cell = cell.at("image")
        values = measures.sharpness(model, data.train, cell)
        assert len(values) == len(cell.radii)
        found = [value for value in values if value is not None]
        assert found == sorted(found)
        assert found[0] > 0


def test_radii_are_those_of_the_zoo_and_wider_for_the_average() -> None:
    assert Cell("inv", "second").at("image").radii == measures.RADII["image"]["inv"]
    wide = Cell("inv", "second", mode="average").at("text")
    assert wide.radii == pytest.approx([measures.WIDER["text"] * rho for rho in measures.RADII["text"]["inv"]])
    assert wide.usual.at("text") == wide
    assert len(Cell("mix", "exact").at("text").radii) == measures.EXACT


def test_cells_have_names_of_their_own() -> None:
    names = [cell.name for cell in (*measures.GRID, *measures.ABLATIONS)]
    assert len(set(names)) == len(names)


def test_what_is_measured_is_measured_once_and_half_a_line_again(tmp_path: Path) -> None:
    path, how = tmp_path / "measured.jsonl", {"radii": [0.1, 0.3]}
    Journal(path).once(3, "a", how, lambda: [1.0, None])
    with path.open("a") as file:
        file.write('{"index": 3, "name": "b", "fou')
    journal = Journal(path)
    journal.once(3, "a", how, lambda: pytest.fail("measured again"))
    journal.once(3, "b", how, lambda: [2.0])
    assert [row["found"] for row in Journal(path).rows.values()] == [[1.0, None], [2.0]]


def test_what_was_measured_in_another_way_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    Journal(path).once(0, "a", {"radii": [0.1]}, lambda: [1.0])
    Journal(path).once(0, "a", {"radii": [0.2]}, lambda: [2.0])
    assert Journal(path).rows[0, "a"]["found"] == [2.0]


# ----------------------------------------------------------------------------------------------------------- page


def results() -> dict[str, dict[str, Any]]:
    found = {path.stem.removeprefix("zoo_"): json.loads(path.read_text(encoding="utf-8")) for path in KEPT}
    return {zoo: found[zoo] for zoo in command.ZOOS if zoo in found}


def test_the_page_is_made_of_the_data() -> None:
    written = ROOT / "benchmarks" / "ZOO.md"
    assert written.exists() == bool(KEPT)
    if KEPT:
        assert written.read_text(encoding="utf-8") == page(results())


def test_the_table_of_the_guide_is_that_of_the_page() -> None:
    guide = (ROOT / "docs" / "what-the-number-means.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- zoo-table -->\n(.*?)\n<!-- /zoo-table -->", guide, flags=re.DOTALL)
    assert found is not None
    assert found[1] == findings.table(results())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_data_are_of_the_settings_in_the_scripts_and_small(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 1_000_000
    assert result["setting"] == summary.setting(result["zoo"])
    assert result["counts"]["reached"] == len(result["models"]) <= result["counts"]["trained"]
    for model in result["models"]:
        assert model["train"]["error"] <= 1 - result["setting"]["accuracy"] + 1e-9
        recipe = training.draw(result["zoo"], model["index"])
        assert model["recipe"] == vars(recipe)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_taus_are_scipys_of_the_models(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    figures, rows = summary.figures(result["zoo"], result["models"])
    assert [row["name"] for row in rows] == [row["name"] for row in result["rows"]]
    for values, row in list(zip(figures.values(), result["rows"], strict=True))[::7]:
        for name, of in summary.TARGETS.items():
            target = [of(model) for model in result["models"]]
            found = stats.kendalltau(values, target).statistic  # tau-b: equal but for ties, of which there are few
            assert row[name]["tau"] == pytest.approx(found, abs=0.02)
            assert row[name]["low"] <= row[name]["tau"] <= row[name]["high"]
            assert row[name]["p"] <= row[name]["among"]
