"""Everything a score starts from: a loaded model, batches and a loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import UsageError
from hf_geosharp.sharpness.choices import LABELS
from hf_geosharp.tasks.batches import make_batches
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.data import load_data
from hf_geosharp.tasks.in_memory import batches_from
from hf_geosharp.tasks.kinds import Task
from hf_geosharp.tasks.loaded import LoadedModel
from hf_geosharp.tasks.loss import attach_model_targets, divergence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prepared:
    """What a score is taken of.

    Attributes:
        model: The model, in eval mode on its device.
        batches: The batches, on the CPU; keys with a leading underscore are for the loss.
        loss: From outputs and batch to losses, 1-D; None is the model's own loss.
        task: The task.
        model_identity: What was loaded (JSON-able).
        data_identity: What it is scored on (JSON-able).
        processor: The tokenizer or image processor.
    """

    model: torch.nn.Module
    batches: list[dict[str, torch.Tensor]]
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor] | None
    task: Task
    model_identity: dict[str, Any]
    data_identity: dict[str, Any]
    processor: Any


def prepare(
    loaded: LoadedModel,
    *,
    data: Any = None,
    data_config: str | None = None,
    split: str | None = None,
    samples: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    token: str | None = None,
    columns: Columns | None = None,
    label_map: Mapping[str, Any] | None = None,
    labels: str = "data",
    params: str = "all",
    max_length: int | None = None,
    mlm_probability: float = 0.15,
) -> Prepared:
    """The data of a loaded model, and what they are scored by.

    The arguments are those of `load_data` and `make_batches`; ``data`` may also be what `batches_from` takes: a
    ``datasets.Dataset``, a DataLoader, or batches. ``labels="model"`` scores without labels, against the model's own
    unperturbed output.

    Raises:
        GeosharpError: See there; UsageError for another ``labels``, and for a configuration or a split of data that are
            in memory.
    """
    if labels not in LABELS:
        raise UsageError(f"labels is {labels!r}; it is {' or '.join(LABELS)}.")
    if label_map is not None and not isinstance(label_map, Mapping):
        raise UsageError(f"label_map is {label_map!r:.60}; it is a mapping from labels of the data to the model's.")
    if labels == "model" and label_map is not None:
        raise UsageError("label_map (--label-map) maps labels of the data, which labels 'model' does not read.")
    options: dict[str, Any] = {
        "samples": samples,
        "batch_size": batch_size,
        "seed": seed,
        "columns": columns,
        "label_map": label_map,
        "max_length": max_length,
        "mlm_probability": mlm_probability,
        "with_labels": labels == "data",
    }
    if data is None or isinstance(data, (str, os.PathLike)):
        dataset, identity = load_data(
            data, config=data_config, split=split, task=loaded.task, token=token, card=loaded.card
        )
        batches, how = make_batches(dataset, loaded, **options)
    elif data_config is not None or split is not None:
        raise UsageError(
            "A configuration and a split can be chosen only for data that are given by name, not for data in memory."
        )
    else:
        identity = {}
        batches, how = batches_from(data, loaded.model, processor=loaded.processor, task=loaded.task, **options)
    if labels == "model":
        batches = attach_model_targets(loaded.model, batches, loaded.task, params=params)
    return Prepared(
        model=loaded.model,
        batches=batches,
        loss=divergence(loaded.model) if labels == "model" else None,
        task=loaded.task,
        model_identity=loaded.identity,
        data_identity={**identity, **how, **({"labels": "model"} if labels == "model" else {})},
        processor=loaded.processor,
    )
