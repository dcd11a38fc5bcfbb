"""A tiny classifier, its data, and Trainers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

CLASSES, VOCABULARY = 3, 20

QUICK: dict[str, Any] = {"samples": 8, "batch_size": 4, "steps": 2, "reproducibility": False}
"""Settings under which a measurement takes a fraction of a second."""


def rows(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Encoded texts of one length whose label is a function of their words."""
    ids = torch.randint(3, VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row.tolist(), "attention_mask": [1] * 6, "label": int(row.sum()) % CLASSES} for row in ids]


def dataset(count: int = 24, seed: int = 0, **columns: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [{**row, **{k: v(i) for k, v in columns.items()}} for i, row in enumerate(rows(count, seed))]
    )


def bert(seed: int = 0, **changes: Any) -> BertForSequenceClassification:
    set_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 8, "num_labels": CLASSES,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**{**sizes, **changes}))


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8,
        "num_train_epochs": 2, "learning_rate": 1e-2, "eval_strategy": "epoch", "save_strategy": "no",
        "logging_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 1,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**usual, **changes})


def trainer(
    folder: Path, *, model: Any = None, kind: type[Trainer] = Trainer, callbacks: Any = None, **changes: Any
) -> Trainer:
    """A Trainer; of the changes, what is not one of its own arguments is one of its TrainingArguments."""
    own = {name: changes.pop(name) for name in _OWN if name in changes}
    if "model_init" not in own:
        own["model"] = bert() if model is None else model
    return kind(
        args=arguments(folder, **changes),
        callbacks=callbacks,
        **{"train_dataset": dataset(), "eval_dataset": dataset(8, 1), **own},
    )


_OWN = (
    "model_init",
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "compute_loss_func",
    "compute_metrics",
    "processing_class",
)


def evaluations(trained: Trainer, prefix: str = "eval") -> list[dict[str, float]]:
    """The records of evaluations in the history."""
    return [record for record in trained.state.log_history if f"{prefix}_runtime" in record]
