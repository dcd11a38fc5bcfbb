"""The metric ``geodesic_sharpness`` of evaluate: the functions of `hf_geosharp.scoring` behind evaluate's interface.

A sharpness belongs to a model and its data, not to predictions. So there are two ways to call it: with ``predictions``
that are the model's inputs, as in evaluate's perplexity, and with ``data``. Only the first uses evaluate's own means of
gathering inputs, its Arrow files and processes.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import evaluate
import numpy as np

from hf_geosharp.arguments import check
from hf_geosharp.errors import DataError, GeosharpError, ModelError, UsageError
from hf_geosharp.paths import name_of, path_of

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult
    from hf_geosharp.tasks.kinds import Task
    from hf_geosharp.tasks.loaded import LoadedModel

_DESCRIPTION = """\
Geodesic sharpness (arXiv 2505.05409): how much the loss of a transformer can rise when its weights move by a given
length, where length is measured so that moves along the symmetries found on the model cost nothing.
"""

_CITATION = """\
@inproceedings{dasilva2025hide,
  title     = {Hide \\& Seek: Transformer Symmetries Obscure Sharpness \\& {Riemannian} Geometry Finds It},
  author    = {da Silva, Marvin F. and Dangel, Felix and Oore, Sageev},
  booktitle = {International Conference on Machine Learning (ICML)},
  year      = {2025},
  note      = {arXiv:2505.05409}
}
"""

_USAGE = """
Args:
    model_id: a model on the Hub, a folder, or a shipped demo:NAME; it is loaded once.
    model: instead, a loaded model; it is restored bit for bit.
    predictions (or inputs): the inputs of the model, texts or images.
    references: their labels (target texts for seq2seq models; none for causal and masked language models).
    data: instead of predictions, a data set: a datasets.Dataset, a DataLoader or batches; with model_id also the id,
        file or folder of a data set.
    details: True adds the full result.
    **options: those of hf_geosharp.score_pretrained (with model_id) or of hf_geosharp.score (with model): metric, rho,
        steps, samples, batch_size, seed, processor, ...

Options given to evaluate.load apply to every call. If both the model and data are given there, predictions and
references are ignored, so that the metric can be used with others in evaluate.combine and in an evaluator.

Returns:
    geodesic_sharpness: the score, in units of the loss (nats for cross-entropy); stderr: its standard error, None for a
    single batch. With num_process, None on all processes but the first.

Examples:
    >>> metric = evaluate.load("geodesic_sharpness")
    >>> metric.compute(model_id="demo:digits-vit", samples=256)
"""

_TEXT, _IMAGE = datasets.Value("string"), datasets.Image()
# Numbers as fractions, because evaluate cuts them off for whole numbers. The first that fits is taken.
_FEATURES = [
    datasets.Features({"predictions": inputs, "references": labels})
    for inputs in (_TEXT, _IMAGE)
    for labels in (_TEXT, datasets.Value("float64"))
]
_OF_EVALUATE = frozenset(inspect.signature(evaluate.Metric.__init__).parameters) - {"self", "kwargs"}
_OWN = frozenset({"model", "model_id", "data", "details"})


class GeodesicSharpness(evaluate.Metric):  # type: ignore[misc]
    """Geodesic sharpness as a metric of evaluate; see ``inputs_description`` for what it takes.

    Args:
        config_name: the task of models that are loaded by name, if their config does not determine it.
        options: what evaluate accepts for every metric (``num_process``, ``cache_dir``, ...), and the options of
            `compute`, to apply to every call. The revision of a model is ``model_revision`` here, because
            ``evaluate.load`` uses ``revision`` for that of the metric.

    Raises:
        UsageError: an option is unknown, or does not fit the others.
    """

    def __init__(self, config_name: str | None = None, **options: Any):
        if sys.flags.optimize > 1:
            raise UsageError("evaluate and transformers read their docstrings, which python -OO drops. Use python -O.")
        check(config_name=config_name)
        of_evaluate = {name: options.pop(name) for name in _OF_EVALUATE & set(options)}
        if of_evaluate.get("seed") is not None:
            options["seed"] = of_evaluate["seed"]
        if config_name not in (None, "default"):
            options.setdefault("task", config_name)
        self._bound = _spelled(options)
        if {"model", "model_id"} & set(self._bound):
            _check(self._bound)
        self._loaded: tuple[Any, LoadedModel] | None = None
        super().__init__(config_name=config_name, **of_evaluate)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_USAGE,
            features=_FEATURES,
            reference_urls=["https://arxiv.org/abs/2505.05409"],
        )

    def compute(
        self, *, predictions: Any = None, references: Any = None, inputs: Any = None, **options: Any
    ) -> dict[str, Any] | None:
        """The sharpness of a model on its inputs or on data.

        Raises:
            GeosharpError: what is wrong, where, and what to do.
        """
        given = _spelled(options)
        call = _merged(self._bound, given)
        _check(call)
        if self.num_process > 1:
            # Only the first process scores, so it must not wait for others that a launcher started.
            call.setdefault("world", _alone())
        if inputs is not None and (predictions is not None or "data" in call):
            raise UsageError("inputs is another name for predictions, and data replaces both: give one of the three.")
        predictions = predictions if inputs is None else inputs
        has_inputs = predictions is not None or references is not None or self.writer is not None
        if "data" in given and has_inputs:
            raise UsageError("Give predictions and references, or data; not both.")
        if has_inputs and "data" not in call:
            samples = super().compute(predictions=predictions, references=references)
            return None if samples is None else self._score_samples(call, **samples)
        # The others only gather, and there is nothing to gather.
        return None if self.process_id > 0 else self._score(call)

    def add_batch(self, *, predictions: Any = None, references: Any = None, inputs: Any = None) -> None:
        """Adds inputs of the model and their labels, for a later `compute`.

        Raises:
            DataError: they are not texts or images, or differ in number.
        """
        if "data" in self._bound:
            return
        samples = _Samples.of(predictions if inputs is None else inputs, references)
        if self.writer is not None:
            samples.check_like(self.selected_feature_format)
        super().add_batch(predictions=samples.inputs, references=samples.labels)

    def add(self, *, prediction: Any = None, reference: Any = None, **plural: Any) -> None:
        """Adds one input of the model and its label, for a later `compute`.

        Raises:
            DataError: it is neither a text nor an image.
        """
        # evaluate.combine calls them by the names of the features.
        value = plural.get("predictions", plural.get("inputs", prediction))
        self.add_batch(predictions=[value], references=[plural.get("references", reference)])

    def _compute(self, *, predictions: list[Any], references: list[Any]) -> dict[str, Any]:
        """What evaluate has gathered. It is scored after evaluate has let go of its files, whatever comes of it."""
        return {"inputs": predictions, "labels": references}

    def _score_samples(self, call: Mapping[str, Any], inputs: list[Any], labels: list[Any]) -> dict[str, Any]:
        from hf_geosharp.tasks.kinds import task_of_model

        if "model" in call:
            task = task_of_model(call["model"])
        else:
            loaded = self._load(call)
            task = loaded.task
            if loaded.processor is None:
                raise ModelError(f"{call['model_id']} has no tokenizer or image processor ({loaded.processor_error}).")
        data = _Samples.of(inputs, labels).as_data(task, needs_labels=call.get("labels", "data") == "data")
        # All that was passed, unless the caller wants fewer.
        return self._score({"samples": len(inputs), **call, "data": data})

    def _score(self, call: Mapping[str, Any]) -> dict[str, Any]:
        from hf_geosharp.scoring import score, score_pretrained

        options = {name: value for name, value in call.items() if name not in _OWN}
        if "model_id" in call:
            loaded = self._load(call)
            # Which weights may move matters to both.
            left = {name: value for name, value in options.items() if name not in _loading() - {"params"}}
            return _plain(score_pretrained(loaded, data=call.get("data"), token=call.get("token"), **left), call)
        if "data" not in call:
            raise UsageError("There is nothing to score the model on: pass predictions and references, or data.")
        return _plain(score(call["model"], call["data"], **options), call)

    def _load(self, call: Mapping[str, Any]) -> LoadedModel:
        """The model of that name; the one of the last call if nothing has changed since."""
        from hf_geosharp.parallel import World
        from hf_geosharp.scoring import load_pretrained

        how = {name: value for name, value in call.items() if name in _loading()}
        key = (call["model_id"], sorted(how.items()), _state(call["model_id"]))
        if self._loaded is None or self._loaded[0] != key:
            # One at a time: the old one goes before the new one comes.
            self._loaded = None
            world = call.get("world") or World.find(how.get("device", "auto"))
            with world.together():
                self._loaded = (key, load_pretrained(call["model_id"], **how))
        return self._loaded[1]

    def __getstate__(self) -> dict[str, Any]:
        # A copy loads its own. The locks are evaluate's, of files that it has read and removed.
        return {**self.__dict__, "_loaded": None, "filelocks": None}


@dataclass(frozen=True)
class _Samples:
    """Inputs of a model, all texts or all images, and their labels (None where there are none)."""

    inputs: list[Any]
    labels: list[Any]

    @classmethod
    def of(cls, inputs: Any, labels: Any) -> _Samples:
        """What a caller has, checked before evaluate stores it: it would turn a number into a text without a word."""
        if inputs is None or isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Iterable):
            raise DataError(f"predictions are {_kind(inputs)}: pass the model's inputs, a list of texts or of images.")
        found = list(inputs)
        if not found:
            raise DataError("predictions are empty: there is nothing to score the model on.")
        read = _text if isinstance(found[0], str) else _image
        return cls([read(value, row) for row, value in enumerate(found)], _labels(labels, len(found)))

    def check_like(self, features: Mapping[str, Any]) -> None:
        """Makes sure that they are of the kind that was added before.

        Raises:
            DataError: they are not.
        """
        for name, values, kinds in (
            ("predictions", self.inputs, "texts, or all images"),
            ("references", self.labels, "numbers, or all names"),
        ):
            first = next((value for value in values if value is not None), None)
            if first is not None and isinstance(first, str) != (features[name] == _TEXT):
                raise DataError(f"{name} are of another kind than those added before: they must be all {kinds}.")

    def as_data(self, task: Task | None, *, needs_labels: bool) -> datasets.Dataset:
        """A data set with the columns that the task reads."""
        labelled = any(label is not None for label in self.labels)
        if task is not None and task.is_classification and needs_labels and not labelled:
            raise UsageError(
                "references are missing: pass the labels of the inputs, or labels='model' for a score without labels."
            )
        if task is not None and labelled and not (task.is_classification or task.second == "label"):
            raise UsageError(f"The labels of a {task.name} model are its own inputs: leave out references.")
        column = "image" if not isinstance(self.inputs[0], str) or (task and task.modality == "image") else "text"
        target = "target" if task is not None and task.second == "label" else "label"
        return datasets.Dataset.from_dict({column: self.inputs} | ({target: self.labels} if labelled else {}))


def _text(value: Any, row: int) -> str:
    if not isinstance(value, str):
        raise DataError(f"predictions[{row}] is {_kind(value)} among texts.")
    return str(value)


def _image(value: Any, row: int) -> Any:
    """An image that keeps its pixels in evaluate's files: one with a file name would be read from that file again."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.copy()
    if isinstance(value, (list, tuple)) or not hasattr(value, "__array__") or np.asarray(value).ndim == 0:
        raise DataError(
            f"predictions[{row}] is {_kind(value)}. Here they are the inputs of the model, all texts or all images, "
            'not its predictions. With evaluate.combine or an evaluator pass model and data to evaluate.load("geodesic_'
            'sharpness", model=..., data=...); pairs of texts are two columns of a data set, data=.'
        )
    array = np.asarray(value)
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 2, 3, 4))
    if array.dtype.kind not in "iu" or not shaped or not array.size or array.min() < 0 or array.max() > 255:
        raise DataError(
            f"predictions[{row}], {array.dtype} of shape {array.shape}, is not an image: arrays must be (height, "
            "width) or (height, width, channels), with at most 4 channels, of whole numbers 0 to 255."
        )
    array = array.astype(np.uint8)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)


def _labels(labels: Any, count: int) -> list[Any]:
    if labels is None:
        return [None] * count
    found = list(labels.tolist() if hasattr(labels, "tolist") else labels)
    if len(found) != count:
        raise DataError(f"There are {count} predictions and {len(found)} references: there must be one for each.")
    texts = any(isinstance(label, str) for label in found)
    for row, label in enumerate(found):
        fits = isinstance(label, str) if texts else isinstance(label, (int, float, np.number))
        if label is not None and not fits:
            raise DataError(f"references[{row}] is {_kind(label)}: labels are all numbers, or all names.")
    # Whole numbers come back from evaluate's files as fractions.
    return [int(label) if isinstance(label, float) and label.is_integer() else label for label in found]


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _spelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names that scoring has for them; None is the same as not given."""
    spelled = {name: value for name, value in options.items() if value is not None}
    if "model_revision" in spelled:
        if "revision" in spelled:
            raise UsageError("model_revision and revision are the same: give one of them.")
        spelled["revision"] = spelled.pop("model_revision")
    if isinstance(spelled.get("model"), (str, os.PathLike)):
        if "model_id" in spelled:
            raise UsageError("Give model_id, or model; not both.")
        spelled["model_id"] = spelled.pop("model")
    if "model_id" in spelled:
        spelled["model_id"] = name_of(spelled["model_id"], "model_id", "pass a model in memory as model=")
    return spelled


def _merged(bound: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a call says on top of what was said at load; another model takes the place of the one said there."""
    replaced = {"model", "model_id"} if {"model", "model_id"} & set(given) else set()
    return {name: value for name, value in bound.items() if name not in replaced} | dict(given)


def _check(call: Mapping[str, Any]) -> None:
    from hf_geosharp.scoring import score, score_pretrained

    if "model" in call and "model_id" in call:
        raise UsageError("Give model_id, or model; not both.")
    if "model" not in call and "model_id" not in call:
        raise UsageError("There is no model: pass model_id (a Hub id, a folder, demo:NAME), or model (an instance).")
    form, function = ("model", score) if "model" in call else ("model_id", score_pretrained)
    known = set(function.__kwdefaults__ or {}) - {"data"}
    unknown = sorted(set(call) - known - _OWN)
    if unknown:
        raise UsageError(
            f"With {form}= there is no option {', '.join(unknown)}. The options are: {', '.join(sorted(known))}."
        )


def _alone() -> Any:
    from hf_geosharp.parallel import World

    return World()


def _loading() -> set[str]:
    from hf_geosharp.scoring import load_pretrained

    return set(load_pretrained.__kwdefaults__ or {})


def _state(model_id: str) -> list[list[tuple[str, int, int]]]:
    """What tells that the files of a folder have changed, or those of an adapter's base; nothing for an id."""
    from hf_geosharp.tasks.adapters import read_adapter
    from hf_geosharp.tasks.hub import Source

    folders = [path_of(model_id)]
    if (folders[0] / "adapter_config.json").is_file():
        with suppress(GeosharpError):
            folders.append(path_of(read_adapter(Source(model_id, folder=folders[0]))[0]["base_model_name_or_path"]))
    return [_files(folder) for folder in folders if folder.is_dir()]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    found = [(entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    return sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


def _plain(result: SharpnessResult, call: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that evaluate.save and evaluate.combine take."""
    numbers: dict[str, Any] = {"geodesic_sharpness": result.geodesic_sharpness, "stderr": result.stderr}
    return numbers | ({"details": result.to_dict()} if call.get("details") else {})


__all__: Sequence[str] = ["GeodesicSharpness"]
