"""Batches from what a Python caller has in memory: data sets, raw or encoded, loaders, and batches of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_geosharp.errors import DataError, UsageError, warn
from hf_geosharp.symmetry.fingerprint import of_callable
from hf_geosharp.tasks.batches import accepted_keys, make_batches, numbers_of, padder, whole_batches
from hf_geosharp.tasks.collate import collate, model_dtype, tidy
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.kinds import Task, find_task, task_names, task_of_model, without_labels
from hf_geosharp.tasks.labels import check_numbers, predicts_numbers
from hf_geosharp.tasks.loaded import LoadedModel
from hf_geosharp.tasks.processors import PROCESSORS
from hf_geosharp.tasks.validate import check_batches
from hf_geosharp.untouched import untouched

if TYPE_CHECKING:
    import datasets
    import torch

    Batch = dict[str, Any]

_NO_FLAGS = ("input_ids", "attention_mask", "labels")
"""What is read of a batch, as tensors, before a model gets it."""


def batches_from(
    data: Any,
    model: Any,
    *,
    samples: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    processor: Any = None,
    task: Task | str | None = None,
    columns: Columns | None = None,
    label_map: Mapping[str, Any] | None = None,
    mlm_probability: float = 0.15,
    max_length: int | None = None,
    with_labels: bool = True,
    floating: torch.dtype | None = None,
) -> tuple[list[Batch], dict[str, Any]]:
    """Batches from what a Python caller has.

    Args:
        data: A ``datasets.Dataset`` of raw columns (needs ``processor``) or of encoded ones (``input_ids``,
            ``pixel_values``, ...; with a tokenizer as ``processor`` they are padded); a torch ``DataLoader`` of dicts,
            or another iterable of dicts of tensors: one ball a dict.
        model: The model; its forward says which keys it takes.
        samples: How many rows to use. Of a DataLoader or an iterator whole batches are taken until there are as many; a
            list is used whole.
        batch_size: Rows a batch (data sets only).
        seed: Chooses the rows and draws masks; what a loader or a transform draws, too, where they have no
            generator of their own. Afterwards all generators are as before.
        processor: A tokenizer or image processor.
        task: The task or its name; None tells it from the model's class.
        columns: The columns to read (raw data sets only).
        label_map: From labels of the data to labels of the model (raw data sets only).
        mlm_probability: The share of tokens masked (raw data sets only).
        max_length: The number of tokens texts are cut to (raw data sets only).
        with_labels: Whether labels are wanted.
        floating: The dtype of fractions, where the model will compute in another than it has.

    Raises:
        UsageError: Data of another kind, raw columns without processor or task, or something chosen of raw columns for
            encoded data.
        DataError: Empty data, too few rows, keys that the model does not take, labels out of range.
    """
    samples, batch_size, seed = numbers_of(samples, batch_size, seed)
    # A loader draws at least the seed of its workers, and a transform may draw whenever a row is read.
    with untouched(data, seed=seed):
        if not (_is_dataset(data) and _encoded_key(_columns(data), model) is None):
            _check_encoded(Columns.of(columns), label_map, max_length)
        if not _is_dataset(data):
            batches, identity = _given_batches(data, model, samples, floating or model_dtype(model))
            batches = _checked(batches, model, task, with_labels)
            return batches, identity | _label_kind(model, batches, task)
        if len(data) == 0:
            raise DataError("The data set is empty.")
        if _encoded_key(_columns(data), model) is None:
            if _transform(data) is not None:
                raise UsageError(
                    f"The data set has a transform, whose rows have {_columns(data)}: none of them is an input of a "
                    f"{type(model).__name__}. Encode in the transform, or take it off (dataset.with_format(None))."
                )
            loaded = _described(model, processor, task)
            batches, identity = make_batches(
                data,
                loaded,
                samples=samples,
                batch_size=batch_size,
                seed=seed,
                columns=columns,
                label_map=label_map,
                mlm_probability=mlm_probability,
                max_length=max_length,
                with_labels=with_labels,
                floating=floating,
            )
        else:
            wanted = floating or model_dtype(model)
            batches, identity = _encoded_batches(data, model, processor, samples, batch_size, seed, wanted)
            batches = _checked(batches, model, task, with_labels)
            identity |= _label_kind(model, batches, task)
        return batches, {**identity, "fingerprint": data._fingerprint, "rows": len(data)}


def _check_encoded(columns: Columns, label_map: Mapping[str, Any] | None, max_length: int | None) -> None:
    """Refuses what is chosen of raw columns, where the inputs are encoded.

    Raises:
        UsageError: something is.
    """
    if max_length is not None:
        raise UsageError(
            "max_length applies to texts that are not encoded yet: truncate the inputs when you encode them"
        )
    for name, given in (("columns", columns.named()), ("label_map", label_map)):
        if given:
            raise UsageError(
                f"{name} applies to data sets of raw columns, and these inputs are encoded: leave it out, and name and "
                "number them as the model does"
            )


def learns_numbers(model: Any, batches: Sequence[Batch], task: Task | str | None = None) -> bool:
    """Whether a classifier takes the labels of batches for numbers to come near to: its loss is no log loss then."""
    found = _find(model, task)
    if found is None or found.token_level:
        return False
    return predicts_numbers(model.config) and any("labels" in batch for batch in batches)


def _label_kind(model: Any, batches: Sequence[Batch], task: Task | str | None) -> dict[str, Any]:
    return {"labels": "regression"} if learns_numbers(model, batches, task) else {}


def _checked(batches: list[Batch], model: Any, task: Task | str | None, with_labels: bool) -> list[Batch]:
    """The batches, checked, without labels if they are neither wanted nor the decoder's input."""
    found = _find(model, task)
    if not with_labels:
        batches = [without_labels(found, model, batch) for batch in batches]
    check_batches(batches, model)
    return batches


def _find(model: Any, task: Task | str | None) -> Task | None:
    return find_task(task) if isinstance(task, str) else task or task_of_model(model)


def _is_dataset(data: Any) -> bool:
    import datasets

    if isinstance(data, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise UsageError(f"The data have several splits ({', '.join(data)}). Pass one: data['train'].")
    if isinstance(data, datasets.IterableDataset):
        raise UsageError(
            "A streaming data set cannot be drawn from at random. Pass a datasets.Dataset, or a DataLoader "
            "over this one."
        )
    return isinstance(data, datasets.Dataset)


def _encoded_key(columns: Iterable[str], model: Any) -> str | None:
    """The column of model inputs, if the rows are encoded already."""
    names = {getattr(model, "main_input_name", None), "input_ids", "pixel_values", "inputs_embeds", "input_features"}
    return next((name for name in columns if name in names), None)


def _transform(dataset: datasets.Dataset) -> Any:
    """What ``with_transform`` or ``set_transform`` makes of rows when they are read; None without."""
    found = dataset.format
    return found["format_kwargs"].get("transform") if found["type"] == "custom" else None


def _columns(dataset: datasets.Dataset) -> list[str]:
    """What its rows have when they are read."""
    return list(dataset.column_names if _transform(dataset) is None else dataset[:1])


def _described(model: Any, processor: Any, task: Task | str | None) -> LoadedModel:
    found = _find(model, task)
    if found is None:
        raise UsageError(
            f"A {type(model).__name__} does not tell its task. Pass task= (one of {task_names()}), or data that are "
            "encoded already."
        )
    if processor is None:
        raise UsageError("The data set holds raw columns. Pass the model's tokenizer or image processor as processor=.")
    if not callable(processor) or hasattr(processor, "pad_token") != (found.modality == "text"):
        raise UsageError(
            f"processor is {processor!r:.60}, which {found.name} cannot use: pass what "
            f"transformers.{PROCESSORS[found.modality]}.from_pretrained loads."
        )
    if found.modality == "text" and processor.pad_token is None:
        raise UsageError("The tokenizer has no padding token. Set processor.pad_token first (often to its eos_token).")
    return LoadedModel(model=model, processor=processor, task=found, identity={})


def _encoded_batches(
    dataset: datasets.Dataset,
    model: Any,
    processor: Any,
    samples: int,
    batch_size: int,
    seed: int,
    floating: torch.dtype,
) -> tuple[list[Batch], dict[str, Any]]:
    accepted = accepted_keys(model)
    there = _columns(dataset)
    called = {name: _renamed(name, accepted, there) for name in there}
    names = [name for name in called if accepted is None or called[name] in accepted]
    for name in names:
        if called[name] == "labels" and name in dataset.features:
            check_numbers(dataset.features[name], getattr(model, "config", None), name)
    order = np.random.default_rng(seed).permutation(len(dataset))[:samples].tolist()
    transform = _transform(dataset)
    # Without a format rows are plain lists and numbers, whatever the caller set for training.
    plain = dataset.select_columns(names).with_format(None) if transform is None else dataset
    rows = plain[order]
    encoded = [{called[name]: rows[name][i] for name in names} for i in range(len(order))]
    if _lacks_mask(encoded, processor, accepted):
        encoded = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in encoded]
    groups, identity = whole_batches(encoded, samples, batch_size)
    batches = [collate(group, padder(processor), floating) for group in groups]
    how = {} if transform is None else {"transform": of_callable(transform)[:12]}
    return batches, {**identity, "seed": seed, "columns": {"encoded": names}, **how}


def _lacks_mask(rows: Sequence[Mapping[str, Any]], processor: Any, accepted: frozenset[str] | None) -> bool:
    """Whether tokens have to be padded and nothing would tell a model so: a tokenizer that pads makes a mask, too."""
    mask = "attention_mask"
    if mask not in getattr(processor, "model_input_names", ()) or (accepted is not None and mask not in accepted):
        return False
    return mask not in rows[0] and "input_ids" in rows[0] and len({len(row["input_ids"]) for row in rows}) > 1


def _renamed(name: str, accepted: frozenset[str] | None, there: Iterable[str]) -> str:
    """``label`` as Trainer's collator does: models call it ``labels``. Not where there are such already."""
    wanted = "labels" if name in ("label", "label_ids") and accepted is not None and name not in accepted else name
    return name if wanted != name and wanted in there else wanted


def _given_batches(data: Any, model: Any, samples: int, floating: torch.dtype) -> tuple[list[Batch], dict[str, Any]]:
    if isinstance(data, (str, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(
            f"Data of type {type(data).__name__} cannot be scored. Pass a datasets.Dataset, a DataLoader, or a list of "
            "batches (dicts of tensors, one ball each)."
        )
    accepted = accepted_keys(model)
    found = [_given_batch(batch, number, accepted, floating) for number, batch in enumerate(_limited(data, samples))]
    if not found:
        raise DataError("The data are empty: there is no batch.")
    size = getattr(data, "batch_size", None) or getattr(getattr(data, "batch_sampler", None), "batch_size", None)
    if getattr(data, "batch_size", None) is None and size not in {_rows(batch) for batch in found}:
        # A sampler of others may count something else than rows, or the rows of all processes.
        size = None
    whole = [batch for batch in found if size is None or _rows(batch) == size]
    if not whole:
        raise DataError(f"The only batch has {_rows(found[0])} samples, fewer than the loader's batch_size of {size}.")
    dropped = sum(map(_rows, found)) - sum(map(_rows, whole))
    rows = [_rows(batch) for batch in whole]
    identity: dict[str, Any] = {
        "samples": sum(rows), "batch_size": rows[0], "batches": len(whole), "dropped": dropped,
    }  # fmt: skip
    if len(set(rows)) > 1:
        identity["batch_size"] = [min(rows), max(rows)]
        warn(
            f"The batches have between {min(rows)} and {max(rows)} samples. Each is a ball of its own, in which few "
            "samples are easier to hurt, and all count the same: leave out an incomplete one (drop_last=True)."
        )
    return whole, identity


def _limited(data: Iterable[Any], samples: int) -> Iterator[Any]:
    """All batches of a list; of a loader or an iterator, which may not end, as many as hold the samples asked for."""
    if isinstance(data, Sequence):
        yield from data
        return
    count = 0
    for batch in data:
        yield batch
        count += _rows(batch) if isinstance(batch, Mapping) else 0
        if count >= samples:
            return


def _rows(batch: Mapping[str, Any]) -> int:
    from hf_geosharp.sharpness.parts import samples

    try:
        return samples(batch)
    except StopIteration:
        return 0


def _given_batch(batch: Any, number: int, accepted: frozenset[str] | None, floating: torch.dtype) -> Batch:
    import torch

    if not isinstance(batch, Mapping):
        raise DataError(
            f"Batch {number} is a {type(batch).__name__}, not a dict of tensors. Pass dicts whose keys are the "
            "arguments of the model's forward; pass rows and tables as a data set (datasets.Dataset.from_list, "
            "from_pandas)."
        )
    tidied: Batch = {}
    for key, value in batch.items():
        name = _renamed(key, accepted, batch)
        is_flag = isinstance(value, bool) and name not in _NO_FLAGS
        if not (is_flag or isinstance(value, torch.Tensor)):
            raise DataError(
                f"Batch {number}: {key!r} is a {type(value).__name__}, not a tensor. Leave it out, or wrap the model "
                "in one that passes it on; if these are rows, not batches, pass them as a data set "
                "(datasets.Dataset.from_list)."
            )
        if accepted is not None and name not in accepted and not name.startswith("_"):
            raise DataError(
                f"Batch {number}: the model's forward takes no {key!r}. Leave it out, or call it '_{key}' if only "
                "your loss reads it."
            )
        # A truth value is an option of forward: CLIP returns a loss where it is asked for one.
        tidied[name] = value if is_flag else tidy(value, floating, name == "labels")
    if _rows(tidied) == 0:
        raise DataError(f"Batch {number} is empty.")
    return tidied
