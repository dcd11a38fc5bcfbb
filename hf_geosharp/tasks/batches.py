"""The fixed batches that a score is taken on, from rows of a data set: seeded, whole, on the CPU; one ball a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_geosharp.arguments import whole
from hf_geosharp.errors import DataError, DataWarning, ModelError, UsageError, first_line, warn
from hf_geosharp.tasks.collate import collate, model_dtype
from hf_geosharp.tasks.columns import Columns, choose
from hf_geosharp.tasks.encode import Encoder, Sample, text_length, with_images
from hf_geosharp.tasks.labels import check_range, label_rule
from hf_geosharp.tasks.loaded import LoadedModel
from hf_geosharp.tasks.loss import check_next_token
from hf_geosharp.tasks.validate import check_batches

if TYPE_CHECKING:
    import datasets
    import torch

    Batch = dict[str, Any]

_CHUNK = 256
"""Rows encoded at a time: only as many as are needed are read."""

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
    samples, batch_size, seed = numbers_of(samples, batch_size, seed)
    encoder, dataset = _encoder(
        dataset, loaded, seed, Columns.of(columns), label_map, mlm_probability, max_length, with_labels
    )
    encoded, skipped = _take(dataset, encoder, samples, seed)
    label = encoder.columns.label
    if label is not None and encoder.labels is not None and encoder.labels.how == "ids":
        # Not ``unique`` of the data set, which may leave a file beside it.
        column = dataset.select_columns([label]).with_format("arrow")[:].column(label)
        check_range(encoder.labels, column.unique().to_pylist(), label)
    groups, identity = whole_batches(encoded, samples, batch_size, skipped)
    if loaded.task.modality == "text":
        _check_words(encoded, loaded.processor)
    wanted = floating or model_dtype(loaded.model)
    # Language models count positions from the left, so padding there would change their loss.
    side = "right" if loaded.task.token_level else None
    batches = [collate(group, padder(loaded.processor), wanted, side) for group in groups]
    check_batches(batches, loaded.model)
    if loaded.task.shifted and with_labels:
        check_next_token(loaded.model, batches[0])
    how = _encoder_identity(encoder)
    if max_length is not None:
        how["max_length_chosen"] = True
    return batches, {**identity, "seed": seed, **how}


def numbers_of(samples: int, batch_size: int, seed: int) -> tuple[int, int, int]:
    """As numbers of Python, which generators and JSON take; NumPy's they do not.

    Raises:
        UsageError: One is no whole number, or samples or batch size are not positive.
    """
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


def whole_batches(
    samples: list[Any], asked: int, batch_size: int, skipped: int = 0
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Samples by batches, without those that fill none.

    Args:
        samples: As many as there are, and no more than were asked for.
        asked: How many were asked for.
        batch_size: Samples a batch.
        skipped: How many rows had nothing to score.

    Returns:
        The batches, and ``{samples, batch_size, batches, dropped}``, with ``skipped`` where there are such.

    Raises:
        DataError: There are fewer than one batch.
    """
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


def padder(processor: Any) -> Any:
    """A tokenizer, which pads; None where the processor is none."""
    return processor if hasattr(processor, "pad_token_id") else None
