"""The two calls that all faces share: score a model on data, and score a named model on named data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_geosharp import demos
from hf_geosharp.errors import UsageError
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.estimate import Progress, Settings, estimate
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.tasks.batches import batches_from
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.kinds import Task, task_of, weight
from hf_geosharp.tasks.loss import attach_model_targets, kl_to_model
from hf_geosharp.tasks.prepare import prepare

if TYPE_CHECKING:
    from torch import Tensor, nn

TWIN_SEED = 20250509
TWIN_CONDITION = 100.0

Rho = float | Sequence[float] | None


def score(
    model: nn.Module,
    data: Any,
    *,
    metric: str = "inv",
    geodesic: Order | None = None,
    symmetries: str = "full",
    rho: Rho = None,
    steps: int = 20,
    samples: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    average: bool = False,
    baselines: Sequence[str] = (),
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    labels: str = "data",
    processor: Any = None,
    dtype: str | None = None,
    micro_batch: int | None = None,
    damping: float = 0.0,
    reproducibility: bool = True,
    verify: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult:
    """Geodesic sharpness of a model on data (arXiv 2505.05409), in nats of its loss.

    Args:
        model: a transformers model (or any module that takes a batch as keyword arguments); comes back bit-identical.
        data: a Dataset, a DataLoader, or an iterable of batches (dicts of tensors, one ball each).
        metric: "inv" (relative change of each factor), "mix" (absolute change of the products), or without
            symmetries "adaptive" or "euclidean".
        geodesic: "first", "second" (the default for inv and mix) or "exact".
        symmetries: "full", "attention" or "paper"; see :func:`hf_geosharp.symmetry.find.find_symmetries`.
        rho: radius of the ball, or several (the first is the one reported); by default the metric's.
        steps: ascent steps, each one forward and one backward pass; for ``average`` the number of draws.
        samples, batch_size, seed: which samples; every batch has a ball of its own and the score is their mean.
        average: mean over Gaussian horizontal perturbations instead of the worst case.
        baselines: other metrics at the same radius, of "adaptive" and "euclidean".
        loss: (outputs, batch) -> losses of the samples or their mean; the model's own loss if None.
        labels: "data", or "model": divergence from the model's own unperturbed output.
        processor: tokenizer or image processor for a Dataset that is not encoded yet.
        dtype: "float32" or "float64"; by default what the model has, at least float32.
        micro_batch: samples that go through the model at once; does not change the score.
        damping: relative relaxation of near-singular directions, in the canonical gauge.
        reproducibility, verify: False leaves out the re-run, or the proof of the symmetries.
        progress: told after every step.

    Raises:
        UsageError, DataError, ModelError, UnsupportedModelError: what is wrong, where, and what to do.
    """
    import torch

    settings = Settings(
        metric=metric, geodesic=geodesic, symmetries=symmetries, rho=_radii(rho), steps=steps, seed=seed,
        average=average, baselines=_names(baselines), damping=damping, micro_batch=micro_batch,
        reproducibility=reproducibility, verify=verify, stationary=labels == "model",
    )  # fmt: skip
    if dtype not in (None, "float32", "float64"):
        raise UsageError(f"dtype is {dtype!r}; it is float32 or float64")
    if labels not in ("data", "model"):
        raise UsageError(f"labels is {labels!r}; it is data or model")
    if labels == "model" and loss is not None:
        raise UsageError("give a loss or labels='model', not both: the latter is a loss of its own")
    task = task_of(type(model).__name__)
    batches, data_identity = batches_from(
        data, model, samples=samples, batch_size=batch_size, seed=seed, processor=processor, task=task,
        with_labels=labels == "data",
    )  # fmt: skip
    # What a loss of the caller's returns is per sample, whatever the model's own loss is.
    weigher = _weigher(task) if loss is None else None
    wide = getattr(torch, dtype) if dtype else None
    if labels == "model":
        with borrow(model, wide):
            batches = attach_model_targets(model, batches, task)
        loss = kl_to_model
        data_identity = {**data_identity, "labels": "model"}
    return estimate(
        model,
        batches,
        settings,
        loss=loss,
        weight=weigher,
        dtype=wide,
        model_identity=_identity(model, task),
        data_identity=data_identity,
        versions=versions(),
        progress=progress,
    )


def score_pretrained(
    model_id: str,
    *,
    data: str | None = None,
    data_config: str | None = None,
    split: str | None = None,
    task: str = "auto",
    metric: str = "inv",
    geodesic: Order | None = None,
    symmetries: str = "full",
    rho: Rho = None,
    steps: int = 20,
    samples: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    average: bool = False,
    baselines: Sequence[str] = (),
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    columns: Columns | None = None,
    label_map: Mapping[str, Any] | None = None,
    labels: str = "data",
    allow_missing: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult:
    """Geodesic sharpness of a stored model: a Hub id, a folder, or a shipped ``demo:NAME`` (or ``demo:NAME-twin``).

    ``data`` is a data set's id, file or folder; without it what the model's card names, the demo's own data, or for
    language models a shipped text. Everything else is as for :func:`score` and
    :func:`hf_geosharp.tasks.prepare.prepare`.

    Raises:
        GeosharpError: what is wrong, where, and what to do; its exit code is that of the command line.
    """
    settings = Settings(
        metric=metric, geodesic=geodesic, symmetries=symmetries, rho=_radii(rho), steps=steps, seed=seed,
        average=average, baselines=_names(baselines), stationary=labels == "model",
    )  # fmt: skip
    demo, twin, place = None, False, model_id
    if model_id.startswith(demos.PREFIX):
        demo, twin = demos.base_name(model_id)
        folder = demos.path(demo)
        place = str(folder)
        data = data or str(folder / "data")
    prepared = prepare(
        place, data=data, data_config=data_config, split=split, task=task, samples=samples, batch_size=batch_size,
        seed=seed, device=device, dtype=dtype, revision=revision, token=token, trust_remote_code=trust_remote_code,
        columns=columns or Columns(), label_map=label_map, labels=labels, allow_missing=allow_missing,
    )  # fmt: skip
    model_identity, data_identity = dict(prepared.model_identity), dict(prepared.data_identity)
    if demo is not None:
        model_identity["id"] = model_id
        if data == str(demos.path(demo) / "data"):
            # What ships is the same everywhere, wherever it is installed.
            data_identity["id"] = f"{demos.PREFIX}{demo}"
            data_identity.pop("fingerprint", None)
    if twin:
        make_twin(prepared.model)
    return estimate(
        prepared.model,
        prepared.batches,
        settings,
        loss=prepared.loss,
        weight=_weigher(prepared.task),
        model_identity=model_identity,
        data_identity=data_identity,
        versions=versions(),
        progress=progress,
    )


def make_twin(model: nn.Module, *, seed: int = TWIN_SEED, condition: float = TWIN_CONDITION) -> None:
    """Moves a model along its orbits by a random element, in place: the same function at other weights."""
    from hf_geosharp.symmetry.find import find_symmetries

    found = find_symmetries(model)
    found.apply(model, found.random_element(model, seed, condition))


def versions() -> dict[str, str]:
    """Versions of this package and of what decides its numbers."""
    from importlib.metadata import version

    return {name: version(name) for name in ("hf-geosharp", "torch", "transformers", "datasets")}


def _radii(rho: Rho) -> tuple[float, ...]:
    if rho is None:
        return ()
    numbers: Any = rho
    try:
        # Arrays and tensors without a dimension look like sequences, and are numbers.
        several = isinstance(rho, Iterable) and getattr(rho, "ndim", None) != 0
        return tuple(float(r) for r in numbers) if several else (float(numbers),)
    except (TypeError, ValueError):
        raise UsageError(f"rho is {rho!r}; it is a number or a sequence of numbers") from None


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _weigher(task: Task | None) -> Callable[[Mapping[str, Any]], float]:
    return lambda batch: weight(task, batch)


def _identity(model: nn.Module, task: Task | None) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {
        "id": getattr(config, "_name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
        "task": task.name if task else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
