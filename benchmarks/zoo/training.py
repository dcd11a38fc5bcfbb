"""The models of the zoos: recipes drawn at random, trained and tested one by one, each kept in a folder of its own."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.make_demos import Split, logits_and_loss, measure, take
from benchmarks.zoo.data import TOKENS, Data

ACCURACY = {"image": 0.95, "text": 0.95, "finetune": 0.95, "finetune-image": 0.95}
"""Training accuracy, on the labels it was trained on, from which a model counts."""

SHIFT = 1
"""Pixels by which an augmented picture is moved at most, each way."""

OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]] = {
    "adamw": lambda groups, rate: torch.optim.AdamW(groups, lr=rate, fused=True),
    "sgd": lambda groups, rate: torch.optim.SGD(groups, lr=rate, momentum=0.9, fused=True),
    "rmsprop": lambda groups, rate: torch.optim.RMSprop(groups, lr=rate),
    "adagrad": lambda groups, rate: torch.optim.Adagrad(groups, lr=rate),
}
"""By name, of groups of parameters and a learning rate. SGD does not train these BERTs: they stay at chance."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. ``noise`` is the part of the labels that are drawn at random, once.

    ``augmentation`` is the part of the pictures that are moved, or of the words that are hidden, in every step.
    """

    optimizer: str
    rate: float
    decay: float
    batch_size: int
    steps: int
    dropout: float
    augmentation: float
    noise: float
    seed: int


@dataclass(frozen=True)
class Choices:
    """What recipes are drawn from: optimizers with their rates and decays, batch sizes with their usual steps, ..."""

    optimizers: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...]
    batches: tuple[tuple[int, int], ...]
    lengths: tuple[float, ...]
    dropouts: tuple[float, ...]
    augmentations: tuple[float, ...]
    noises: tuple[float, ...] = (0.0, 0.0, 0.0, 0.05, 0.1)


_ADAMW = ("adamw", (3e-3, 5e-3, 8e-3), (0.0, 0.1, 0.5))
CHOICES = {
    "image": Choices(
        optimizers=(_ADAMW, _ADAMW, ("sgd", (0.05, 0.08, 0.12), (0.0, 1e-4, 1e-3))),
        batches=((16, 800), (32, 500), (64, 300), (128, 180)),
        lengths=(0.8, 1.0, 1.3),
        dropouts=(0.0, 0.0, 0.03),
        augmentations=(0.0, 0.0, 0.25),
    ),
    "text": Choices(
        optimizers=(("adamw", (1e-3, 2e-3, 3e-3), (0.0, 0.1, 0.5)), ("adamw", (1e-3, 2e-3, 3e-3), (0.0, 0.1, 0.5)),
                    ("rmsprop", (7e-4, 1e-3, 1.5e-3), (0.0, 1e-5, 1e-4)),
                    ("adagrad", (0.02, 0.03, 0.05), (0.0, 1e-5, 1e-4))),
        batches=((16, 500), (32, 320), (64, 220)),
        lengths=(0.8, 1.0, 1.3),
        dropouts=(0.0, 0.0, 0.1),
        augmentations=(0.0, 0.0, 0.1),
    ),
    "finetune": Choices(
        optimizers=(("adamw", (1e-3, 2e-3, 3e-3), (0.0, 0.1, 0.5)), ("adamw", (1e-3, 2e-3, 3e-3), (0.0, 0.1, 0.5)),
                    ("rmsprop", (7e-4, 1e-3, 1.5e-3), (0.0, 1e-5, 1e-4)),
                    ("adagrad", (0.02, 0.03, 0.05), (0.0, 1e-5, 1e-4))),
        batches=((16, 600), (32, 360), (64, 240)),
        lengths=(0.8, 1.0, 1.3),
        dropouts=(0.0, 0.0, 0.1),
        augmentations=(0.0, 0.0, 0.1),
    ),
    "finetune-image": Choices(
        optimizers=(("adamw", (2e-3, 3e-3, 5e-3), (0.0, 0.1, 0.5)), ("adamw", (2e-3, 3e-3, 5e-3), (0.0, 0.1, 0.5)),
                    ("sgd", (0.05, 0.08, 0.12), (0.0, 1e-4, 1e-3))),
        batches=((16, 600), (32, 400), (64, 250), (128, 150)),
        lengths=(0.8, 1.0, 1.3),
        dropouts=(0.0, 0.0, 0.03),
        augmentations=(0.0, 0.0, 0.25),
    ),
}  # fmt: skip


def draw(zoo: str, index: int) -> Recipe:
    """The recipe with this number."""
    chance, choices = random.Random(f"{zoo} {index}"), CHOICES[zoo]
    optimizer, rates, decays = chance.choice(choices.optimizers)
    batch_size, steps = chance.choice(choices.batches)
    return Recipe(
        optimizer,
        rate=chance.choice(rates),
        decay=chance.choice(decays),
        batch_size=batch_size,
        steps=round(steps * chance.choice(choices.lengths)),
        dropout=chance.choice(choices.dropouts),
        augmentation=chance.choice(choices.augmentations),
        noise=chance.choice(choices.noises),
        seed=chance.randrange(2**31),
    )


def training_split(data: Data, recipe: Recipe) -> Split:
    """The training data with the labels that this model is trained on."""
    labels = data.train["labels"]
    generator = torch.Generator().manual_seed(recipe.seed)
    changed = torch.rand(len(labels), generator=generator) < recipe.noise
    drawn = torch.randint(data.classes, (len(labels),), generator=generator)
    return {**data.train, "labels": torch.where(changed, drawn, labels)}


def build(data: Data, dropout: float) -> Any:
    """A model for these data, with random weights."""
    common = {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": data.classes,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        # Larger than usual, for models this narrow learn slowly from small weights; and Hessians need attention that
        # is differentiable twice.
        "initializer_range": 0.1, "attn_implementation": "eager",
    }  # fmt: skip
    if not data.words:
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=28, patch_size=7, num_channels=1, hidden_size=32, intermediate_size=64, **common
            )
        )
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=data.words, max_position_embeddings=TOKENS, hidden_size=48, intermediate_size=96, **common
        )
    )


def augmented(batch: Split, part: float, generator: torch.Generator) -> Split:
    """Some pictures moved by a few pixels, or some words hidden."""
    if not part:
        return batch
    if "pixel_values" in batch:
        pictures = batch["pixel_values"].clone()
        chosen = torch.rand(len(pictures), generator=generator) < part
        for i in chosen.nonzero().flatten().tolist():
            move = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
            pictures[i] = pictures[i].roll(move, (1, 2))  # the border of a digit is empty
        return {**batch, "pixel_values": pictures}
    ids = batch["input_ids"]
    hidden = (torch.rand(ids.shape, generator=generator) < part) & (ids > 4)
    return {**batch, "input_ids": torch.where(hidden, 1, ids)}  # special tokens come first, [UNK] is the second


def train(model: nn.Module, split: Split, recipe: Recipe) -> None:
    """Trains a model in place; the rate rises for a tenth of the steps and falls to 0."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": recipe.decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[recipe.optimizer](groups, recipe.rate)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, recipe.steps // 10, recipe.steps)
    model.train()
    for rows in batches(len(split["labels"]), recipe.batch_size, recipe.steps, generator):
        _, loss = logits_and_loss(model, augmented(take(split, rows), recipe.augmentation, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def batches(samples: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of each step, in a new order every time that all have been seen."""
    per_round = math.ceil(samples / size)
    for step in range(steps):
        if step % per_round == 0:
            order = torch.randperm(samples, generator=generator).split(size)
        yield order[step % per_round]


def make(zoo: str, index: int, data: Data, folder: Path, start: Mapping[str, Tensor] | None = None) -> Row:
    """Trains and tests the model with this number, unless it is there, and says how it went."""
    kept = folder / f"{index:03d}" / "zoo.json"
    if kept.exists():
        found: Row = json.loads(kept.read_text())
        return found
    recipe = draw(zoo, index)
    torch.manual_seed(recipe.seed)
    model = build(data, recipe.dropout)
    if start is not None:
        model.load_state_dict({**model.state_dict(), **start})  # what it lacks, a head, is new
    split = training_split(data, recipe)
    train(model, split, recipe)
    parts = {"train": split, "test": data.test, **data.other}
    row = {"index": index, "recipe": asdict(recipe)} | {
        name: {"error": round(1 - score.accuracy, 6), "loss": score.loss}
        for name, score in ((name, measure(model, part)) for name, part in parts.items())
    }
    model.save_pretrained(kept.parent)
    kept.write_text(json.dumps(row, indent=1) + "\n")  # last: a folder without it is made again
    return row


def reached(zoo: str, row: Row) -> bool:
    """Whether a model fits its training data as well as all have to."""
    return bool(1 - row["train"]["error"] >= ACCURACY[zoo])


@dataclass(frozen=True)
class Pretraining:
    """How the model is trained that all fine-tunes start from, and whether they keep its head or draw a new one."""

    recipe: Recipe
    keeps_head: bool


PRETRAINING = {
    "finetune": Pretraining(
        Recipe("adamw", 2e-3, 0.1, batch_size=64, steps=600, dropout=0.1, augmentation=0.0, noise=0.0, seed=0),
        keeps_head=True,
    ),
    "finetune-image": Pretraining(
        Recipe("adamw", 3e-3, 0.1, batch_size=64, steps=5000, dropout=0.0, augmentation=0.0, noise=0.0, seed=0),
        keeps_head=False,
    ),
}
"""By zoo: the sentiment of IMDB's reviews, and Fashion-MNIST's clothes, whose classes are others than the digits'."""


def pretrained(zoo: str, data: Data, earlier: Callable[[], Split], folder: Path) -> dict[str, Tensor]:
    """The weights that fine-tuning starts from, trained unless they are there; ``earlier`` gives what on."""
    from safetensors.torch import load_file, save_file

    kept = folder / "start.safetensors"
    if not kept.exists():
        how, split = PRETRAINING[zoo], earlier()
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(how.recipe.seed)
        model = build(data, how.recipe.dropout)
        train(model, split, how.recipe)
        print(f"{zoo}: all start from a model with {measure(model, split)}", file=sys.stderr, flush=True)
        weights = model.state_dict()
        save_file({n: w for n, w in weights.items() if how.keeps_head or not n.startswith("classifier.")}, kept)
    return load_file(kept)
