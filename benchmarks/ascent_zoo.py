"""A zoo of tiny models to measure the ascent on: vision transformers on the digits, BERTs on the film reviews.

    python benchmarks/ascent_zoo.py FOLDER [--models 20]

Trains ``--models`` of each kind on the data of the shipped demos and saves each in a folder of its own with its recipe
(``zoo.json``); models that are there already are left alone. Size, length of training, learning rate, weight decay,
number of samples and share of random labels are drawn from a seed of each model, so model i is the same whatever
``--models`` is. One thread is used: about 5 seconds a model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from make_demos import Recipe, Split, measure, save_model, take, train

from hf_geosharp import demos

KINDS = ("vit", "bert")
DEMOS = {"vit": "digits-vit", "bert": "vader-bert"}
TOKENS = 24


@dataclass(frozen=True)
class Sort:
    """What one model of the zoo is made of."""

    kind: str
    index: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    samples: int
    random_labels: float
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index:02d}"


def sort(kind: str, index: int) -> Sort:
    """The model with this number, from a seed of its own."""
    draw = random.Random(f"{kind} {index}")
    hidden = draw.choice((16, 32, 32) if kind == "vit" else (32, 32, 64))
    samples, batch_size, steps = draw.choice((400, 800, 1200)), draw.choice((32, 64)), draw.choice((250, 400, 600))
    recipe = Recipe(
        seed=draw.randrange(2**31),
        epochs=math.ceil(steps * batch_size / samples),
        learning_rate=draw.choice((2e-3, 4e-3, 8e-3) if kind == "vit" else (1e-3, 2e-3, 4e-3)),
        weight_decay=draw.choice((0.0, 0.05, 0.5)),
        batch_size=batch_size,
    )
    return Sort(
        kind, index,
        layers=draw.choice((1, 2)),
        hidden=hidden,
        heads=draw.choice((2, 4)),
        intermediate=draw.choice((1, 2)) * hidden,
        samples=samples,
        random_labels=draw.choice((0.0, 0.0, 0.1, 0.3)),
        recipe=recipe,
    )  # fmt: skip


@cache
def everything(kind: str) -> tuple[Split, int]:
    """The training split of the demo, encoded, and its number of classes."""
    folder = demos.path(DEMOS[kind])
    data = Dataset.from_parquet(str(folder / "data" / "train.parquet"))
    labels = torch.tensor(data["label"])
    if kind == "vit":
        images = transformers.AutoImageProcessor.from_pretrained(folder)(list(data["image"]), return_tensors="pt")
        return {"pixel_values": images["pixel_values"], "labels": labels}, 10
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = tokenizer(list(data["text"]), truncation=True, max_length=TOKENS, padding=True, return_tensors="pt")
    return {**texts, "labels": labels}, 2


def training_data(model: Sort) -> Split:
    """What a model is trained on: a draw of the demo's samples, some with random labels."""
    split, classes = everything(model.kind)
    generator = torch.Generator().manual_seed(model.recipe.seed)
    part = take(split, torch.randperm(len(split["labels"]), generator=generator)[: model.samples])
    wrong = torch.rand(model.samples, generator=generator) < model.random_labels
    part["labels"] = torch.where(wrong, torch.randint(classes, (model.samples,), generator=generator), part["labels"])
    return part


def build(model: Sort) -> Any:
    sizes = {
        "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate, "num_labels": everything(model.kind)[1],
    }  # fmt: skip
    torch.manual_seed(model.recipe.seed)
    if model.kind == "vit":
        config = transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, **sizes)
        return transformers.ViTForImageClassification(config)
    words = len(transformers.AutoTokenizer.from_pretrained(demos.path(DEMOS["bert"])))
    config = transformers.BertConfig(vocab_size=words, max_position_embeddings=TOKENS, **sizes)
    return transformers.BertForSequenceClassification(config)


def make(model: Sort, folder: Path) -> None:
    """Trains a model and saves it, unless it is there."""
    if (folder / "zoo.json").exists():
        return
    data = training_data(model)
    trained = build(model)
    train(trained, data, model.recipe)
    score = measure(trained, data)
    save_model(trained, folder)
    (folder / "zoo.json").write_text(json.dumps({**asdict(model), "train": asdict(score)}, indent=1) + "\n")
    print(f"{model.name}: accuracy {score.accuracy:.3f}, loss {score.loss:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=int, default=20, help="number of models of each kind")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for index in range(arguments.models):
        for kind in KINDS:
            model = sort(kind, index)
            make(model, arguments.folder / model.name)


if __name__ == "__main__":
    main()
