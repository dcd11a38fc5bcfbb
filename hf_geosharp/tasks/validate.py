"""Checks of finished batches: what would be NaN, an index error, or a crash on a GPU is a clear message here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import DataError
from hf_geosharp.tasks.kinds import IGNORED

if TYPE_CHECKING:
    import torch


def check_batches(batches: Sequence[Mapping[str, torch.Tensor]], model: Any) -> None:
    """Checks token ids and labels of all batches against a model.

    Labels of one dimension are classes, those of more are tokens. A model without a transformers config is checked for
    what needs none.

    Raises:
        DataError: Ids or labels are out of range, or a batch has no label that counts; the message gives the value,
            where it stands (batch and row, from 0), and the allowed range.
    """
    words = _vocabulary(model)
    for number, batch in enumerate(batches):
        if words is not None and "input_ids" in batch:
            _check_range(batch["input_ids"], words, f"batch {number}", "input_ids", "the model's vocabulary")
        if "labels" in batch:
            _check_rows(batch, number)
            _check_labels(batch["labels"], model, number)


def _check_rows(batch: Mapping[str, torch.Tensor], number: int) -> None:
    """Tokens and labels are of the same samples. Other inputs may be counted otherwise, as patches of images are."""
    rows = {key: len(batch[key]) for key in ("input_ids", "labels") if key in batch and batch[key].ndim}
    if len(set(rows.values())) > 1:
        counts = " and ".join(f"{key!r} {count}" for key, count in rows.items())
        raise DataError(f"batch {number} has rows of different numbers of samples: {counts}")


def _check_labels(labels: torch.Tensor, model: Any, number: int) -> None:
    import torch

    where = f"batch {number}"
    if labels.is_floating_point():
        if not torch.isfinite(labels).all():
            raise DataError(f"labels ({where}) hold NaN or inf.")
        return
    counted = labels != IGNORED
    if not counted.any():
        raise DataError(f"All labels are {IGNORED} ({where}), so the batch has no loss. Pass data with labels.")
    limit, name = _limit(labels, model)
    if limit is not None:
        _check_range(torch.where(counted, labels, 0), limit, where, "labels", name)
    elif (labels[counted] < 0).any():
        _check_range(torch.where(counted, labels, 0), int(labels.max()) + 1, where, "labels", "the data")


def _limit(labels: torch.Tensor, model: Any) -> tuple[int | None, str]:
    """The number of classes that labels of this shape may have, and what sets it; None if it cannot be told."""
    if labels.ndim > 1:
        return _output_size(model), "the model's vocabulary"
    classes = getattr(getattr(model, "config", None), "num_labels", None)
    # One output is a regression, which takes any number.
    return (classes, "num_labels") if isinstance(classes, int) and classes > 1 else (None, "")


def _check_range(values: torch.Tensor, limit: int, where: str, key: str, sets: str) -> None:
    wrong = (values < 0) | (values >= limit)
    if not wrong.any():
        return
    position = wrong.nonzero()[0].tolist()
    value = int(values[tuple(position)])
    hint = " -1 marks a split without labels: choose another split." if value == -1 and key == "labels" else ""
    raise DataError(
        f"{key} hold {value} ({where}, row {position[0]}), out of range: allowed is 0 to {limit - 1} ({sets} = {limit})"
        + (f" or {IGNORED}" if key == "labels" else "")
        + f".{hint}"
    )


def _vocabulary(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError, TypeError):
        # No embeddings, or a table of another kind.
        return None


def _output_size(model: Any) -> int | None:
    try:
        weight = model.get_output_embeddings().weight
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return int(weight.shape[0])
