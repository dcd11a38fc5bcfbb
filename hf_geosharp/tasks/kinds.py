"""What can be scored: one frozen description a task, and the look-ups between tasks, names and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

IGNORED = -100
"""The label that transformers leaves out of every token-level loss."""

TARGET_LOGITS = "_target_logits"
"""Batch key of the model's own logits, the target of a score without labels."""

TARGET_MASK = "_target_mask"
"""Batch key of the tokens that count in a score without labels (token-level tasks only)."""


@dataclass(frozen=True)
class Task:
    """One kind of model head, with what its data look like.

    Attributes:
        name: The name on the command line.
        auto_class: The class of transformers that loads it.
        mapping: The table of transformers that lists its architectures.
        modality: ``"text"`` or ``"image"``: what the first input column holds.
        inputs: Input columns to look for, best first; an entry of two names is a pair.
        second: The role of a pair's second column: ``"text_pair"`` or ``"label"`` (the target text).
        labels: Label columns to look for, best first; empty where labels are made from the inputs.
        aliases: Other names for it: of pipelines, of model cards.
        token_level: Whether the loss is a mean over tokens rather than over samples.
        shifted: Whether the model compares position i with label i + 1.
        shipped_text: Whether the text that comes with this package is data for it.
    """

    name: str
    auto_class: str
    mapping: str
    modality: str
    inputs: tuple[tuple[str, ...], ...]
    second: str = "text_pair"
    labels: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    token_level: bool = False
    shifted: bool = False
    shipped_text: bool = False

    @property
    def is_classification(self) -> bool:
        """Whether one label a sample comes from a column of the data."""
        return bool(self.labels)


_TEXTS: tuple[tuple[str, ...], ...] = (("text",), ("sentence",), ("content",))
_PAIRS: tuple[tuple[str, ...], ...] = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
)
_TARGETS: tuple[tuple[str, ...], ...] = (
    ("source", "target"),
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("question", "answer"),
    ("input", "target"),
    ("inputs", "targets"),
    ("input", "output"),
    ("text", "summary"),
    ("text", "target"),
)
_LABELS = ("label", "labels", "target")

# Where transformers lists one class under two tasks (Bart under seq2seq and masked LM, XLM under masked and causal LM),
# the task that stands first here is the one that is meant.
TASKS: tuple[Task, ...] = (
    Task(
        name="text-classification",
        auto_class="AutoModelForSequenceClassification",
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        modality="text",
        inputs=_PAIRS + _TEXTS,
        labels=_LABELS,
        aliases=("sequence-classification", "sentiment-analysis", "natural-language-inference"),
    ),
    Task(
        name="image-classification",
        auto_class="AutoModelForImageClassification",
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        modality="image",
        inputs=(("image",), ("img",)),
        labels=_LABELS,
    ),
    Task(
        name="seq2seq-lm",
        auto_class="AutoModelForSeq2SeqLM",
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        modality="text",
        inputs=_TARGETS + _TEXTS,
        second="label",
        aliases=("text2text-generation", "summarization", "translation", "seq2seq"),
        token_level=True,
        shipped_text=True,
    ),
    Task(
        name="masked-lm",
        auto_class="AutoModelForMaskedLM",
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        modality="text",
        inputs=_TEXTS,
        aliases=("fill-mask", "masked-language-modeling", "mlm"),
        token_level=True,
        shipped_text=True,
    ),
    Task(
        name="causal-lm",
        auto_class="AutoModelForCausalLM",
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        modality="text",
        inputs=_TEXTS,
        aliases=("text-generation", "language-modeling", "causal-language-modeling", "clm"),
        token_level=True,
        shifted=True,
        shipped_text=True,
    ),
)


def task_names() -> str:
    """The names of all tasks, for messages."""
    return ", ".join(task.name for task in TASKS)


def find_task(name: str) -> Task:
    """The task of that name or alias, whatever its case.

    Raises:
        UsageError: No task is called so.
    """
    wanted = name.strip().lower().replace("_", "-") if isinstance(name, str) else None
    for task in TASKS:
        if wanted == task.name or wanted in task.aliases:
            return task
    raise UsageError(f"There is no task {name!r}. The tasks are: {task_names()}.")


def task_of(architecture: str) -> Task | None:
    """The task that a model class of transformers is made for, by its name; None if none of ours is."""
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        for listed in getattr(modeling_auto, task.mapping).values():
            # Some model types list several classes.
            if architecture in ((listed,) if isinstance(listed, str) else listed):
                return task
    return None


def task_of_model(model: nn.Module) -> Task | None:
    """The task of a live model: of its class, or of one whose forward pass it has; of what an adapter sits on."""
    from hf_geosharp.symmetry.inputs.calls import without_adapter

    own = type(without_adapter(model))
    kinds = (c for c in own.__mro__ if getattr(c, "forward", None) is own.forward)
    return next((task for kind in kinds if (task := task_of(kind.__name__)) is not None), None)


def without_labels(task: Task | None, model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without its labels, except where the model makes its decoder's input from them.

    The task tells; without one (speech or images to text) an encoder-decoder does where the labels are tokens and there
    is nothing else for the decoder.
    """
    return {key: value for key, value in batch.items() if key != "labels" or _decodes_labels(task, model, batch)}


def _decodes_labels(task: Task | None, model: Any, batch: Mapping[str, Any]) -> bool:
    if task is not None:
        return task.second == "label"
    labels = batch["labels"]
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    are_tokens = labels.ndim > 1 and not labels.is_floating_point()
    return bool(is_encoder_decoder) and are_tokens and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(batch)


def weight(task: Task | None, batch: Mapping[str, Any]) -> float:
    """How many terms the mean loss of a batch runs over: the factor that makes it a sum.

    Samples where one sample is one term, tokens with a label where one token is. Without a task, labels of two and more
    dimensions are taken as tokens, not shifted. It does not depend on padding.

    Args:
        task: The task of the model, or None.
        batch: Tensors whose first dimension is the sample.

    Raises:
        UsageError: The batch holds no tensor.
    """
    return readings(task, batch)[0]


def readings(task: Task | None, batch: Mapping[str, Any]) -> tuple[float, ...]:
    """The same by everything that a loss may be, the likeliest first; the last is a sum instead of a mean.

    The class of a model does not tell for sure: the decoders of encoder-decoders do not shift the labels, models that
    read images and text do, and other losses are a mean over samples whatever their labels look like.

    Raises:
        UsageError: The batch holds no tensor.
    """
    if TARGET_LOGITS in batch:
        mask = batch.get(TARGET_MASK)
        return (float(len(batch[TARGET_LOGITS]) if mask is None else mask.sum()),)
    count, labels = _samples(batch), batch.get("labels")
    if labels is None or labels.ndim == 0 or labels.is_floating_point():
        return count, 1.0
    if labels.ndim == 1:
        return float((labels != IGNORED).sum()), count, 1.0
    tokens = [float((counted != IGNORED).sum()) for counted in (labels, labels[:, 1:])]
    if task is not None and task.shifted:
        tokens.reverse()
    by_sample = task is not None and not task.token_level
    return (count, *tokens, 1.0) if by_sample else (*tokens, count, 1.0)


def _samples(batch: Mapping[str, Any]) -> float:
    from hf_geosharp.sharpness.parts import samples

    try:
        return float(samples(batch))
    except StopIteration:
        raise UsageError(f"A batch with the keys {sorted(batch)} holds no tensor, so it has no samples.") from None
