"""The demos that ship with the package: their models load, their data are sound, their stated scores are true."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Image, Value
from PIL import Image as PILImage

DEMOS = Path(__file__).resolve().parents[2] / "hf_geosharp" / "demos"
MODEL_CLASSES = {
    "digits-vit": transformers.AutoModelForImageClassification,
    "vader-bert": transformers.AutoModelForSequenceClassification,
}
MODELS = sorted(MODEL_CLASSES)
SPLITS = ("train", "test")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def split(tmp_path: Path) -> Any:
    def read(name: str, part: str) -> Dataset:
        return Dataset.from_parquet(str(DEMOS / name / "data" / f"{part}.parquet"), cache_dir=str(tmp_path))

    return read


def stated(name: str) -> dict[str, Any]:
    return json.loads((DEMOS / name / "demo.json").read_text(encoding="utf-8"))


def letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalpha())


def model_inputs(name: str, data: Dataset) -> dict[str, torch.Tensor]:
    if name == "digits-vit":
        processor = transformers.AutoImageProcessor.from_pretrained(DEMOS / name)
        images = [np.asarray(image)[None] for image in data["image"]]  # channel first, which every version takes
        return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMOS / name)
    return dict(tokenizer(list(data["text"]), truncation=True, padding=True, return_tensors="pt"))


@torch.no_grad()
def logits(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = torch.arange(len(next(iter(inputs.values())))).split(500)
    return torch.cat([model(**{key: value[part] for key, value in inputs.items()}).logits for part in rows])


@pytest.mark.parametrize("name", MODELS)
def test_model_loads_with_every_weight_and_no_other(name: str) -> None:
    model, info = MODEL_CLASSES[name].from_pretrained(DEMOS / name, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind]
    assert sum(p.numel() for p in model.parameters()) == stated(name)["parameters"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("part", SPLITS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_scores_are_the_stated_ones(name: str, part: str, split: Any) -> None:
    data = split(name, part)
    model = MODEL_CLASSES[name].from_pretrained(DEMOS / name)
    labels = torch.tensor(list(data["label"]))
    output = logits(model, model_inputs(name, data))
    score = stated(name)[part]
    assert len(data) == score["examples"]
    assert float((output.argmax(-1) == labels).float().mean()) == pytest.approx(score["accuracy"], abs=1e-3)
    assert float(torch.nn.functional.cross_entropy(output, labels)) == pytest.approx(score["loss"], abs=5e-3)


def test_models_are_trained() -> None:
    digits, vader = stated("digits-vit"), stated("vader-bert")
    assert digits["train"]["accuracy"] >= 0.99
    assert digits["test"]["accuracy"] >= 0.94
    assert vader["train"]["accuracy"] >= 0.95
    assert vader["test"]["accuracy"] >= 0.70
    for demo in (digits, vader):
        assert demo["train"]["loss"] > 0.01, "a loss at zero has nothing left to measure"
        assert demo["train"]["loss"] < demo["test"]["loss"]


@pytest.mark.parametrize("name", MODELS)
def test_labels_have_the_names_of_the_config_and_are_balanced(name: str, split: Any) -> None:
    config = transformers.AutoConfig.from_pretrained(DEMOS / name)
    names = [config.id2label[index] for index in range(config.num_labels)]
    for part in SPLITS:
        data = split(name, part)
        assert isinstance(data.features["label"], ClassLabel)
        assert data.features["label"].names == names
        counts = Counter(data["label"])
        assert set(counts) == set(range(len(names)))
        for count in counts.values():
            assert 0.8 < count * len(names) / len(data) < 1.2


def test_digits_are_grey_images_of_8_by_8_in_one_split_only(split: Any) -> None:
    encoded: dict[str, set[bytes]] = {}
    for part in SPLITS:
        data = split("digits-vit", part)
        assert isinstance(data.features["image"], Image)
        raw = [row["bytes"] for row in data.cast_column("image", Image(decode=False))["image"]]
        images = [PILImage.open(io.BytesIO(content)) for content in raw]
        assert {(image.format, image.mode, image.size) for image in images} == {("PNG", "L", (8, 8))}
        pixels = np.stack([np.asarray(image) for image in images])
        assert (pixels.min(), pixels.max()) == (0, 255)
        assert len(np.unique(pixels)) == 17
        encoded[part] = {image.tobytes() for image in images}
    assert not encoded["train"] & encoded["test"]


def test_vader_has_no_near_duplicates(split: Any) -> None:
    keys = {part: [letters(text) for text in split("vader-bert", part)["text"]] for part in SPLITS}
    for part in SPLITS:
        assert all(keys[part])
        assert len(set(keys[part])) == len(keys[part])
    assert not set(keys["train"]) & set(keys["test"])


def test_vader_is_shuffled(split: Any) -> None:
    for part in SPLITS:
        assert 0.4 < np.mean(split("vader-bert", part)["label"][:500]) < 0.6


def test_vader_tokenizer_is_a_lower_casing_bert_tokenizer() -> None:
    folder = DEMOS / "vader-bert"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.model_max_length == config.max_position_embeddings
    ids = tokenizer("A gorgeous, witty movie.")["input_ids"]
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith("a gorgeous, witty movie")


def test_text_has_enough_long_paragraphs(split: Any) -> None:
    data = split("text", "train")
    assert data.features == {"text": Value("string")}
    paragraphs = list(data["text"])
    assert len(paragraphs) >= 300
    assert len(set(paragraphs)) == len(paragraphs)
    assert min(map(len, paragraphs)) >= 200
    assert 150_000 <= sum(map(len, paragraphs)) <= 250_000
    assert stated("text")["train"]["examples"] == len(paragraphs)


@pytest.mark.parametrize("name", [*MODELS, "text"])
def test_every_demo_states_what_it_is(name: str) -> None:
    demo = stated(name)
    keys = {"schema", "name", "title", "task", "license", "source", "train", "test", "parameters", "seed"}
    assert set(demo) == keys
    assert demo["schema"] == 1
    assert demo["name"] == name
    card = (DEMOS / name / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: ")


def test_demos_are_small() -> None:
    assert sum(path.stat().st_size for path in DEMOS.rglob("*") if path.is_file()) < 6_000_000
