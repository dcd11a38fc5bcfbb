"""The fixed batches that a score is taken on: seeded, whole, on the CPU; one ball a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_geosharp.arguments import whole
from hf_geosharp.errors import DataError, DataWarning, ModelError, UsageError, first_line, warn
from hf_geosharp.symmetry.fingerprint import of_callable
from hf_geosharp.tasks.collate import collate, model_dtype, tidy
from hf_geosharp.tasks.columns import Columns, choose
from hf_geosharp.tasks.encode import Encoder, Sample, text_length, with_images
from hf_geosharp.tasks.kinds import Task, find_task, task_names, task_of_model, without_labels
from hf_geosharp.tasks.labels import check_numbers, label_rule, predicts_numbers
from hf_geosharp.tasks.loaded import LoadedModel
from hf_geosharp.tasks.loss import check_next_token
from hf_geosharp.tasks.processors import PROCESSORS
from hf_geosharp.tasks.validate import check_batches
from hf_geosharp.untouched import untouched

if TYPE_CHECKING:
    import datasets
    import torch

    Batch = dict[str, Any]

_CHUNK = 256
"""Rows encoded at a time: only as many as are needed are read."""

_NO_FLAGS = ("input_ids", "attention_mask", "labels")
"""What is read of a batch, as tensors, before a model gets it."""

_MOST_UNKNOWN = 0.1
"""The share of unknown tokens from which the tokenizer is not the model's, or not set up as its own: with lower case,
say. A cased text has 11 % in the lower-case vocabulary of BERT, one of another domain 2 % in a vocabulary of 4000."""


def make_batches(
    dataset: datasets.Dataset,
    loaded: LoadedModel,
    *,
    samples: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    columns: Columns | None = None,
    label_map: Mapping[str, Any] | None = None,
    mlm_probability: float = 0.15,
    max_length: int | None = None,
    with_labels: bool = True,
    floating: torch.dtype | None = None,
) -> tuple[list[Batch], dict[str, Any]]:
    """Whole batches of randomly chosen rows, encoded for a model.

    Args:
        dataset: The rows.
        loaded: The model, its task and its processor.
        samples: How many rows to use; an incomplete last batch is dropped.
        batch_size: Rows a batch.
        seed: Chooses the rows and draws the masks of a masked LM.
        columns: The user's choice of columns.
        label_map: The user's map from labels of the data to labels of the model.
        mlm_probability: The share of tokens masked (masked LM).
        max_length: The number of tokens texts are cut to, if the model can take as many; None means 128 for language
            models.
        with_labels: Whether to read the labels of a classification.
        floating: The dtype of fractions; None means the model's, or float32 where that is shorter.

    Returns:
        The batches, on the CPU, and ``{samples, batch_size, batches, dropped, seed, columns, ...}``. Shapes: (batch,
        tokens) each padded to its own longest, (batch, channels, height, width), labels (batch,) or (batch, tokens).

    Raises:
        UsageError: ``samples`` or ``batch_size`` is not positive, or something is chosen that the task does not read.
        DataError: Too few rows for one batch, no such columns, or labels that do not fit.
        ModelError: The model comes without the processor that the data need, or its loss is not about the labels that
            are made from texts.
    """
    samples, batch_size, seed = _numbers(samples, batch_size, seed)
    encoder, dataset = _encoder(
        dataset, loaded, seed, Columns.of(columns), label_map, mlm_probability, max_length, with_labels
    )
    encoded, skipped = _take(dataset, encoder, samples, seed)
    groups, identity = _whole_batches(encoded, samples, batch_size, skipped)
    if loaded.task.modality == "text":
        _check_words(encoded, loaded.processor)
    wanted = floating or model_dtype(loaded.model)
    # Language models count positions from the left, so padding there would change their loss.
    side = "right" if loaded.task.token_level else None
    batches = [collate(group, _padder(loaded.processor), wanted, side) for group in groups]
    check_batches(batches, loaded.model)
    if loaded.task.shifted and with_labels:
        check_next_token(loaded.model, batches[0])
    how = _encoder_identity(encoder)
    if max_length is not None:
        how["max_length_chosen"] = True
    return batches, {**identity, "seed": seed, **how}


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
    samples, batch_size, seed = _numbers(samples, batch_size, seed)
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


def _numbers(samples: int, batch_size: int, seed: int) -> tuple[int, int, int]:
    """As numbers of Python, which generators and JSON take; NumPy's they do not."""
    samples, batch_size, seed = whole("samples", samples), whole("batch_size", batch_size), whole("seed", seed)
    if batch_size < 1 or samples < 1:
        raise UsageError(f"samples is {samples} and batch_size is {batch_size}; both must be at least 1.")
    return samples, batch_size, seed


def _encoder(
    dataset: datasets.Dataset,
    loaded: LoadedModel,
    seed: int,
    overrides: Columns,
    label_map: Mapping[str, Any] | None,
    mlm_probability: float,
    max_length: int | None,
    with_labels: bool,
) -> tuple[Encoder, datasets.Dataset]:
    """The encoder, and the data set with its images made readable."""
    import torch

    task, config = loaded.task, loaded.model.config
    if not 0 < mlm_probability < 1:
        raise UsageError(f"The share of masked tokens is {mlm_probability}; it must lie between 0 and 1.")
    chosen = choose(dataset, task, overrides, need_label=with_labels)
    if loaded.processor is None:
        kind, article = ("tokenizer", "a") if task.modality == "text" else ("image processor", "an")
        raise ModelError(
            f"The model comes without {article} {kind} that loads ({loaded.processor_error or 'none was passed'}). "
            f"Save the {kind} into the model's folder."
        )
    rule = None
    if task.is_classification and chosen.label is not None:
        rule = label_rule(dataset.features[chosen.label], config, chosen.label, label_map)
    elif label_map is not None:
        raise UsageError(f"label_map (--label-map) maps labels, which {task.name} does not read here: leave it out.")
    if max_length is not None:
        _check_length(max_length, loaded, pairs=chosen.text_pair is not None)
    encoder = Encoder(
        task=task,
        processor=loaded.processor,
        config=config,
        columns=chosen,
        labels=rule,
        length=text_length(loaded.processor, loaded.model, task, max_length) if task.modality == "text" else 0,
        accepted=accepted_keys(loaded.model),
        mlm_probability=mlm_probability,
        generator=torch.Generator().manual_seed(seed),
    )
    return encoder, with_images(dataset, chosen.image) if chosen.image else dataset


def _check_length(max_length: int, loaded: LoadedModel, *, pairs: bool) -> None:
    """Whether texts, or ``pairs`` of them, can be cut to this length.

    Raises:
        UsageError: there are none, or nothing of them would be left.
    """
    if loaded.task.modality != "text":
        raise UsageError(f"max_length applies to texts, but the task {loaded.task.name} has none")
    if whole("max_length", max_length) < 1:
        raise UsageError(f"max_length is {max_length}; at least 1 token is needed")
    if max_length == 1 and loaded.task.shifted:
        raise UsageError("max_length is 1, and a causal language model predicts from the second token on")
    added = getattr(loaded.processor, "num_special_tokens_to_add", None)
    special = added(pair=pairs) if added is not None else 0
    if max_length <= special:
        raise UsageError(
            f"max_length is {max_length}, and the tokenizer adds {special} special tokens to each text: nothing of the "
            "text would be left"
        )


def _encoder_identity(encoder: Encoder) -> dict[str, Any]:
    task, columns = encoder.task, encoder.columns
    identity: dict[str, Any] = {"columns": columns.named()}
    if task.modality == "text":
        identity["max_length"] = encoder.length
    if encoder.labels is not None:
        identity["labels"] = encoder.labels.how
    if task.name == "masked-lm":
        identity["mlm_probability"] = encoder.mlm_probability
    if task.second == "label":
        identity["target"] = "column" if columns.label else "second half of the words"
    return identity


def _take(dataset: datasets.Dataset, encoder: Encoder, samples: int, seed: int) -> tuple[list[Sample], int]:
    """The first rows of a seeded permutation that have something to score, and how many had not."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    wanted = dataset.select_columns(list(encoder.columns.named().values()))
    taken: list[Sample] = []
    start = 0
    while start < len(order) and len(taken) < samples:
        numbers = order[start : start + min(_CHUNK, samples - len(taken))].tolist()
        taken.extend(sample for sample in encoder(_read(wanted, numbers), numbers) if sample is not None)
        start += len(numbers)
    return taken, start - len(taken)


def _check_words(samples: Sequence[Sample], tokenizer: Any) -> None:
    """Warns of texts that the model cannot read: they have a loss like all others."""
    special = set(getattr(tokenizer, "all_special_ids", ())) - {getattr(tokenizer, "mask_token_id", None)}
    # Byte-level tokenizers know every word, and give the name to one of their other tokens.
    roles = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    others = {getattr(tokenizer, role, None) for role in roles}
    unknown = {getattr(tokenizer, "unk_token_id", None)} - others
    counts = [
        (sum(token not in special for token in ids), sum(token in unknown for token in ids))
        for ids in (sample["input_ids"] for sample in samples)
    ]
    known, strange = (sum(column) for column in zip(*counts, strict=True))
    if strange > _MOST_UNKNOWN * (known + strange):
        warn(
            f"The tokenizer does not know {strange / (known + strange):.0%} of the words of the texts "
            f"({tokenizer.unk_token}), so the model cannot read them. Check that the tokenizer is the model's own, "
            "with all its settings (lower case, say), and that the texts are of the kind the model was trained on.",
        )
    blank = sum(not count for count, _ in counts)
    if blank:
        warn(
            f"{blank} of the {len(samples)} texts hold no word that the tokenizer knows, or are empty: their loss says "
            "nothing about texts. Remove such rows.",
        )


def _read(dataset: datasets.Dataset, numbers: list[int]) -> Any:
    """These rows, by column; what a row holds, such as an image, is opened here.

    Raises:
        DataError: one cannot be opened.
    """
    try:
        return dataset[numbers]
    except (OSError, ValueError, SyntaxError):
        for number in numbers:
            try:
                dataset[number]
            except (OSError, ValueError, SyntaxError) as error:
                raise DataError(
                    f"Row {number} (counted from 0) cannot be opened ({type(error).__name__}: {first_line(error)}): "
                    "remove or replace it."
                ) from error
        raise


def _whole_batches(
    samples: list[Any], asked: int, batch_size: int, skipped: int = 0
) -> tuple[list[list[Any]], dict[str, Any]]:
    count = len(samples) // batch_size
    empty = f" ({skipped} empty ones are not counted)" if skipped else ""
    if count == 0:
        raise DataError(
            f"There are {len(samples)} samples{empty}, fewer than one batch of {batch_size}. Lower the batch size"
            + (", or raise the number of samples." if len(samples) >= asked else ", or pass more data.")
        )
    dropped = len(samples) - count * batch_size
    if len(samples) < asked:
        warn(
            f"The data have {len(samples)} rows{empty}, not the {asked} asked for; {count * batch_size} are used, in "
            f"{count} whole {'batch' if count == 1 else 'batches'} of {batch_size}.",
            DataWarning,
        )
    identity = {"samples": count * batch_size, "batch_size": batch_size, "batches": count, "dropped": dropped}
    if skipped:
        identity["skipped"] = skipped
    return [samples[i * batch_size : (i + 1) * batch_size] for i in range(count)], identity


def accepted_keys(model: Any) -> frozenset[str] | None:
    """The argument names of a model's forward; None if they cannot be told (it passes all on that it is given).

    Models of transformers may take any others too, but leave most of them unread.
    """
    from transformers import PreTrainedModel

    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {p.kind for p in parameters}
    passes_on = inspect.Parameter.VAR_POSITIONAL in kinds or not isinstance(model, PreTrainedModel)
    if passes_on and inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in named) or None


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


def _padder(processor: Any) -> Any:
    return processor if hasattr(processor, "pad_token_id") else None


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
    groups, identity = _whole_batches(encoded, samples, batch_size)
    batches = [collate(group, _padder(processor), floating) for group in groups]
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


__all__ = ["accepted_keys", "batches_from", "make_batches"]
