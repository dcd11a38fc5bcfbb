"""From rows of a data set to unpadded samples of a model, one encoder a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_geosharp.errors import DataError, ModelError, first_line, warn
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.kinds import IGNORED, Task
from hf_geosharp.tasks.labels import LabelRule, convert_labels

if TYPE_CHECKING:
    import datasets
    import torch

Sample = dict[str, Any]
"""One encoded row: lists of ids, a pixel array, ``labels``; what the model's forward takes, without the batch."""

_DEEP = ("I", "F")
"""How the modes of Pillow begin that have more than 8 bits a value."""

LM_LENGTH = 128
"""Tokens a text is cut to for language models, unless told otherwise."""

_LONGEST = 512
"""Tokens a text is cut to where neither tokenizer nor model sets a limit."""


@dataclass(frozen=True)
class Encoder:
    """What it takes to encode rows.

    Attributes:
        task: The task.
        processor: The tokenizer or image processor.
        config: The model's config.
        columns: The columns to read.
        labels: How to read the label column; None leaves labels out.
        length: The number of tokens a text is cut to.
        accepted: The argument names of the model's forward; None if it takes any.
        mlm_probability: The share of tokens masked (masked LM).
        generator: Draws the masks, in the order of the rows (masked LM).
    """

    task: Task
    processor: Any
    config: Any
    columns: Columns
    labels: LabelRule | None
    length: int
    accepted: frozenset[str] | None
    mlm_probability: float
    generator: torch.Generator

    def __call__(self, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Sample | None]:
        """Encodes rows; None stands for a row with nothing to score (an empty text).

        Args:
            rows: Column name -> values.
            numbers: The number of each row in the data set, for messages.
        """
        return _ENCODERS[self.task.name](self, rows, numbers)


def text_length(tokenizer: Any, model: Any, task: Task, asked: int | None) -> int:
    """The number of tokens that texts are cut to: the least of what is asked, the tokenizer's and the model's limit."""
    limits = [asked or (LM_LENGTH if task.token_level else _LONGEST), tokenizer.model_max_length]
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - _reserved_positions(model))
    length = int(min(limits))
    if asked is not None and length < asked:
        warn(
            f"max_length is {asked}, but {type(model).__name__} and its tokenizer take {length} tokens at most: texts "
            f"are cut to {length}"
        )
    return length


def _reserved_positions(model: Any) -> int:
    """Rows of a position table that no token uses: RoBERTa and its kin count positions from padding_idx + 1."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def with_images(dataset: datasets.Dataset, column: str) -> datasets.Dataset:
    """The data set with paths or bytes of a column read as images; arrays stay as they are."""
    import datasets

    feature = dataset.features[column]
    if isinstance(feature, datasets.Image):
        return dataset.cast_column(column, datasets.Image(decode=True))
    is_path = getattr(feature, "dtype", None) in ("string", "large_string")
    is_file = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    return dataset.cast_column(column, datasets.Image()) if is_path or is_file else dataset


def _texts(rows: Mapping[str, Sequence[Any]], column: str, numbers: Sequence[int]) -> list[str]:
    texts = list(rows[column])
    for text, row in zip(texts, numbers, strict=True):
        if text is None:
            raise DataError(
                f"Column {column!r}, row {row} holds no text (null). Fill in the missing texts, or remove such rows."
            )
        if not isinstance(text, str):
            raise DataError(
                f"Column {column!r}, row {row} holds a value of type {type(text).__name__}, not a text. Name the text "
                "column with --text-column (in Python, columns=Columns(text=...))."
            )
    return texts


def _tokens(encoder: Encoder, *texts: list[str], **options: Any) -> list[Sample]:
    encoded = encoder.processor(*texts, truncation=True, max_length=encoder.length, **options)
    keys = [key for key in encoded if encoder.accepted is None or key in encoder.accepted]
    samples = [{key: encoded[key][i] for key in keys} for i in range(len(encoded["input_ids"]))]
    limit = getattr(encoder.config, "type_vocab_size", None)
    return [_without_foreign_types(sample, limit) for sample in samples]


def _without_foreign_types(sample: Sample, limit: int | None) -> Sample:
    """Leaves out token types that the model was not trained with.

    A generic tokenizer makes zeros for all of them; GPT-2 would look these up among its words, and a model with one
    type has no second row.
    """
    types = sample.get("token_type_ids")
    if types is not None and (not any(types) if limit is None else max(types, default=0) >= limit):
        del sample["token_type_ids"]
    return sample


def _labels(encoder: Encoder, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Any]:
    column = encoder.columns.label
    if encoder.labels is None or column is None:
        return []
    return convert_labels(encoder.labels, rows[column], numbers, column)


def _encode_text(encoder: Encoder, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Sample | None]:
    columns = [column for column in (encoder.columns.text, encoder.columns.text_pair) if column is not None]
    samples = _tokens(encoder, *(_texts(rows, column, numbers) for column in columns))
    return _labelled(samples, _labels(encoder, rows, numbers))


def _labelled(samples: list[Sample], labels: list[Any]) -> list[Sample | None]:
    if not labels:
        return list(samples)
    return [{**sample, "labels": label} for sample, label in zip(samples, labels, strict=True)]


def _encode_image(encoder: Encoder, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Sample | None]:
    column = str(encoder.columns.image)
    channels = _channels(encoder.config)
    images = [_pixels(image, channels, column, row) for image, row in zip(rows[column], numbers, strict=True)]
    try:
        # Said explicitly: a grey image of 3 rows looks like colour channels.
        encoded = encoder.processor(images=images, return_tensors="pt", input_data_format="channels_last")
    except (ValueError, TypeError, RuntimeError) as error:
        raise _not_processed(images, column, error) from error
    samples = [{"pixel_values": pixels} for pixels in encoded["pixel_values"]]
    return _labelled(samples, _labels(encoder, rows, numbers))


def _not_processed(images: Sequence[np.ndarray[Any, Any]], column: str, error: Exception) -> DataError:
    sizes = sorted({image.shape[:2] for image in images})
    if len(sizes) == 1:
        return DataError(f"The image processor fails on the images of column {column!r}: {first_line(error)}")
    (height, width), (last_height, last_width) = sizes[0], sizes[-1]
    return DataError(
        f"The images of column {column!r} have {len(sizes)} sizes ({height} x {width} and {last_height} x {last_width} "
        "pixels among them), and the image processor does not bring them to one: resize them to what the model takes, "
        f"or set do_resize and size in its preprocessor_config.json. ({first_line(error)})"
    )


def _channels(config: Any) -> int:
    for part in (config, getattr(config, "vision_config", None)):
        channels = getattr(part, "num_channels", None)
        if isinstance(channels, int):
            return channels
    return 3


def _pixels(image: Any, channels: int, column: str, row: int) -> np.ndarray[Any, Any]:
    """An image of 8 bits as (height, width, channels), grey or colour as the model wants it."""
    from PIL import Image

    is_image = isinstance(image, Image.Image)
    if not is_image or image.mode.startswith(_DEEP):
        array = np.asarray(image)
        # Fractions, or more than 8 bits, would be cut off without a word.
        if array.dtype.kind not in "iu" or array.ndim not in (2, 3) or array.min() < 0 or array.max() > 255:
            if is_image:
                raise DataError(
                    f"Column {column!r}, row {row} holds an image of more than 8 bits (mode {image.mode}, values "
                    f"{array.min():g} to {array.max():g}), which would be cut off at 255. Convert them to 8 bits."
                )
            raise DataError(
                f"Column {column!r}, row {row} holds a {type(image).__name__}, not an image. Name the image column "
                "with --image-column (in Python, columns=Columns(image=...)); arrays must be (height, width) or "
                "(height, width, channels) of whole numbers 0 to 255."
            )
        array = array.astype(np.uint8)
        image = Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
    if mode is None:
        raise ModelError(f"The model takes images of {channels} channels; 1, 3 and 4 are supported.")
    pixels = np.asarray(image.convert(mode))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _encode_causal(encoder: Encoder, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Sample | None]:
    texts = _texts(rows, str(encoder.columns.text), numbers)
    samples: list[Sample | None] = []
    for text, sample in zip(texts, _tokens(encoder, texts), strict=True):
        # One token has no next one to predict.
        enough = text.strip() and len(sample["input_ids"]) > 1
        samples.append({**sample, "labels": list(sample["input_ids"])} if enough else None)
    return samples


def _encode_masked(encoder: Encoder, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Sample | None]:
    if encoder.processor.mask_token_id is None:
        raise ModelError("The tokenizer has no mask token, so it cannot make data for a masked language model.")
    texts = _texts(rows, str(encoder.columns.text), numbers)
    special = "special_tokens_mask"
    encoded = encoder.processor(texts, truncation=True, max_length=encoder.length, return_special_tokens_mask=True)
    samples = _tokens(encoder, texts)
    return [_mask(encoder, sample, is_special) for sample, is_special in zip(samples, encoded[special], strict=True)]


def _mask(encoder: Encoder, sample: Sample, is_special: list[int]) -> Sample | None:
    """Masks one text as BERT was trained: of the tokens drawn, 80 % a mask, 10 % a random word, 10 % unchanged."""
    import torch

    ids = torch.tensor(sample["input_ids"])
    words = torch.tensor([not special for special in is_special], dtype=torch.bool)
    if not words.any():
        return None
    draws = torch.rand(3, len(ids), generator=encoder.generator)
    words_known = min(len(encoder.processor), encoder.config.get_text_config().vocab_size)
    random_ids = torch.randint(words_known, (len(ids),), generator=encoder.generator)
    chosen = words & (draws[0] < encoder.mlm_probability)
    if not chosen.any():
        # The word that came nearest, so that every text counts.
        chosen[torch.where(words, draws[0], torch.inf).argmin()] = True
    masked = torch.where(chosen & (draws[1] < 0.8), encoder.processor.mask_token_id, ids)
    masked = torch.where(chosen & (draws[1] >= 0.8) & (draws[2] < 0.5), random_ids, masked)
    labels = torch.where(chosen, ids, IGNORED)
    return {**sample, "input_ids": masked.tolist(), "labels": labels.tolist()}


def _encode_seq2seq(encoder: Encoder, rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[Sample | None]:
    texts = _texts(rows, str(encoder.columns.text), numbers)
    if encoder.columns.label is None:
        texts, targets = _halves(texts)
    else:
        targets = _texts(rows, encoder.columns.label, numbers)
    labels = encoder.processor(text_target=targets, truncation=True, max_length=encoder.length)["input_ids"]
    return [
        {**sample, "labels": list(ids)} if text.strip() and target.strip() else None
        for text, target, sample, ids in zip(texts, targets, _tokens(encoder, texts), labels, strict=True)
    ]


def _halves(texts: list[str]) -> tuple[list[str], list[str]]:
    """The first and the second half of the words of each text."""
    words = [text.split() for text in texts]
    first = [" ".join(each[: len(each) // 2]) for each in words]
    return first, [" ".join(each[len(each) // 2 :]) for each in words]


_ENCODERS: Mapping[str, Callable[[Encoder, Mapping[str, Sequence[Any]], Sequence[int]], list[Sample | None]]] = {
    "text-classification": _encode_text,
    "image-classification": _encode_image,
    "causal-lm": _encode_causal,
    "masked-lm": _encode_masked,
    "seq2seq-lm": _encode_seq2seq,
}
