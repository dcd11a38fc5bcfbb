"""Does sharpness predict on zoos of small transformers? Trains them, measures them, and says what goes with what.

    python -m benchmarks.zoo image|text|finetune|finetune-image [--models 60] [--work build/zoo] [--train-only]
    python -m benchmarks.zoo page

Models are trained from recipes drawn at random until that many reach the training accuracy that all have to. Then each
is measured and a summary written to ``benchmarks/data/zoo_NAME.json``, with a picture and the page ``ZOO.md`` that all
zoos share; ``page`` makes the latter two again from the summaries. Models and single measurements stay in the folder
``--work``: a run that was stopped goes on. Delete it to begin again. One thread is used, so that one set of library
versions gives one result.

Data are downloaded by pip, but for "finetune-image", which is pre-trained on Fashion-MNIST: that has to be there, in
Debian's package dataset-fashion-mnist or with its IDX files in the folder ``--fashion``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

from benchmarks.make_demos import Split
from benchmarks.zoo import data as sources
from benchmarks.zoo.measures import ABLATIONS, GRID, Journal, grid, measure
from benchmarks.zoo.page import page
from benchmarks.zoo.plot import plot
from benchmarks.zoo.summary import model_row, summary
from benchmarks.zoo.training import PRETRAINING, Recipe, make, pretrained, reached, training_split

HERE = Path(__file__).resolve().parents[1]
ZOOS = {"image": "image", "text": "text", "finetune": "text", "finetune-image": "image"}
"""Names, and the data of each."""

ABLATED = 12
"""Models, the first ones, on which the settings are varied."""

ATTEMPTS = 4
"""Recipes tried for each model that is wanted, before it is given up."""


def run(zoo: str, models: int, work: Path, fashion: Path, train_only: bool, ablated: int) -> None:
    """Trains, measures and writes the summary."""
    data = sources.load(ZOOS[zoo], work / "data")
    folder = work / zoo

    def earlier() -> Split:
        return data.earlier or sources.fashion(fashion)

    start = pretrained(zoo, data, earlier, folder) if zoo in PRETRAINING else None
    rows: dict[int, dict[str, Any]] = {}
    good: list[int] = []
    while len(good) < models:
        index = len(rows)
        if index == ATTEMPTS * models:
            raise SystemExit(f"{zoo}: of {index} models only {len(good)} reach the training accuracy of all")
        row = rows[index] = make(zoo, index, data, folder, start)
        good += [index] if reached(zoo, row) else []
        print(f"{zoo} {index}: {row['train']}, {len(good)} good", file=sys.stderr, flush=True)
    if train_only:
        return

    def read(index: int) -> tuple[nn.Module, Split]:
        auto = transformers.AutoModelForImageClassification if ZOOS[zoo] == "image" else (
            transformers.AutoModelForSequenceClassification
        )  # fmt: skip
        model = auto.from_pretrained(folder / f"{index:03d}", attn_implementation="eager").eval()
        return model, training_split(data, Recipe(**rows[index]["recipe"]))

    journal = Journal(folder / "measured.jsonl")
    measure(journal, good, read, grid(zoo))
    measure(journal, good[:ablated], read, [cell.at(zoo) for cell in ABLATIONS])
    names = {"others", *(cell.name for cell in (*GRID, *ABLATIONS))}
    found = [
        model_row(
            rows[index],
            {name: row["found"] for (i, name), row in journal.rows.items() if i == index and name in names},
        )
        for index in good
    ]
    text = json.dumps(summary(zoo, found, len(rows)), ensure_ascii=False, separators=(",", ":"))
    (HERE / "data" / f"zoo_{zoo}.json").write_text(text.replace('{"index"', '\n{"index"') + "\n", encoding="utf-8")


def publish() -> None:
    """The pictures and the page, from the summaries that are there."""
    results = {}
    for zoo in ZOOS:
        kept = HERE / "data" / f"zoo_{zoo}.json"
        if kept.exists():
            results[zoo] = json.loads(kept.read_text(encoding="utf-8"))
            plot(results[zoo], HERE / f"zoo_{zoo}.svg")
    (HERE / "ZOO.md").write_text(page(results), encoding="utf-8")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", choices=[*ZOOS, "page"])
    parser.add_argument("--models", type=int, default=60, help="that reach the training accuracy")
    parser.add_argument("--ablated", type=int, default=ABLATED, help="models on which the settings are varied")
    parser.add_argument("--work", type=Path, default=Path("build/zoo"))
    parser.add_argument("--fashion", type=Path, default=sources.FASHION, help="folder of Fashion-MNIST's IDX files")
    parser.add_argument("--train-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.zoo != "page":
        try:
            run(
                arguments.zoo, arguments.models, arguments.work, arguments.fashion, arguments.train_only,
                arguments.ablated,
            )  # fmt: skip
        except sources.MissingDataError as error:
            parser.error(str(error))
    if not arguments.train_only:
        publish()


if __name__ == "__main__":
    main()
