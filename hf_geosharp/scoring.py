"""The functions that all interfaces share: score a model on data, and load and score a named model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hf_geosharp import demos
from hf_geosharp.arguments import check, check_choice, check_kind
from hf_geosharp.errors import UsageError
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.parallel import TIMEOUT, World
from hf_geosharp.paths import name_of, path_of
from hf_geosharp.sharpness.choices import PARAMS
from hf_geosharp.sharpness.estimate import estimate
from hf_geosharp.sharpness.identity import loss_name
from hf_geosharp.sharpness.journal import digest_batches
from hf_geosharp.sharpness.progress import Progress
from hf_geosharp.sharpness.result import SharpnessResult
from hf_geosharp.sharpness.settings import Settings, radii_of, several
from hf_geosharp.sharpness.shards import written_class
from hf_geosharp.symmetry.layouts import layouts_of
from hf_geosharp.tasks.columns import Columns
from hf_geosharp.tasks.in_memory import batches_from
from hf_geosharp.tasks.kinds import TARGET_LOGITS, TARGET_MASK, Task, readings, task_of_model
from hf_geosharp.tasks.loaded import LoadedModel
from hf_geosharp.tasks.loss import attach_model_targets, divergence
from hf_geosharp.tasks.models import load_model
from hf_geosharp.tasks.prepare import prepare
from hf_geosharp.wrappers import as_written, check_module, unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_geosharp.symmetry.layouts import Layout

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
    layouts: Sequence[Layout] = (),
    rho: Rho = None,
    ascent: str = "auto",
    steps: int = 20,
    starts: int = 1,
    samples: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    average: bool = False,
    baselines: Sequence[str] = (),
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    labels: str = "data",
    processor: Any = None,
    max_length: int | None = None,
    dtype: str | None = None,
    micro_batch: int | Literal["auto"] | None = None,
    gradient_checkpointing: bool = False,
    compile: bool = False,
    damping: float = 0.0,
    reproducibility: bool = True,
    verify: bool = True,
    params: str = "all",
    per: str | None = None,
    profile: bool = False,
    shard: str = "batches",
    on_nan: str = "stop",
    output: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
    world: World | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult:
    """Computes the geodesic sharpness of a model on data (arXiv 2505.05409), in units of its loss (usually nats).

    Args:
        model: a transformers model (or any module that takes a batch as keyword arguments); restored bit for bit.
            What is around it to run it (DistributedDataParallel, DataParallel, torch.compile, the autocast of
            ``accelerator.prepare``) and hooks on gradients are left out. A model sharded by fully_shard (FSDP2) is
            scored by all its processes together.
        data: a Dataset, a DataLoader, or an iterable of batches (dicts of tensors, one ball each).
        metric: "inv" (relative change of each factor), "mix" (absolute change of the products), or, without
            symmetries, "adaptive" or "euclidean".
        geodesic: "first", "second" (the default for inv) or "exact" (the default for mix).
        symmetries: "full", "attention" or "paper"; see :func:`hf_geosharp.symmetry.find.find_symmetries`.
        layouts: descriptions of attention modules that cannot be traced, from :func:`hf_geosharp.read_layouts`; one
            that fits no module of the model, or does not hold, is an error.
        rho: radius of the ball, or several radii (the first gives the score); the default depends on the metric.
        ascent: search for the maximum: "secant", which stops when it has settled; "apgd", the reference (Auto-PGD),
            which takes all steps; or "auto": secant and, in a ball where that has not settled after 12 steps,
            Auto-PGD with three times ``steps`` as well, if more than 13 of them were asked for.
        steps: number of ascent steps, of secant at most, each one forward and at most one backward pass; or, with
            ``average``, number of draws.
        starts: searches in each ball, from points far apart; the highest result counts. The cost grows with their
            number; they find more where the loss has several peaks in the ball.
        samples, batch_size, seed: choose the samples; each batch has its own ball, and the score is the mean over them.
            What a loader that shuffles, or a transform, draws is the same each time, and moves no generator on.
        average: mean over Gaussian horizontal perturbations instead of the worst case.
        baselines: other metrics at the same radius: "adaptive" and "euclidean".
        loss: (outputs, batch) -> losses of the samples, or their mean; the model's own loss if None.
        labels: "data", or "model" for the divergence from the model's own unperturbed output.
        processor: tokenizer or image processor for a Dataset that is not encoded yet.
        max_length: number of tokens that its texts are truncated to, if the model accepts as many; by default 128 for
            language models, otherwise 512.
        dtype: "float32" or "float64"; by default the model's own, but at least float32.
        micro_batch: samples that go through the model at once, without changing the score. "auto": as many as memory
            allows, found by halving.
        gradient_checkpointing: saves memory by computing activations twice, without changing the score.
        compile: runs the model through :func:`torch.compile`; compilation takes time at the start, and the score
            differs by rounding.
        damping: relative relaxation of near-singular directions, in the canonical gauge.
        reproducibility, verify: False skips the re-run, or the proof of the symmetries.
        params: parameters to perturb: "all", or "lora" for those of the active PEFT adapters; the base weights then
            stay as they are stored, which may be in half precision or quantised.
        per: "layer", "head" or "kind": also scores each of these parts, with only that part perturbed, at the first
            radius. The parts do not add up to the score.
        profile: also records how the loss of the first batch rises on the way to its worst perturbation.
        shard: how the processes started by a launcher share the work: "batches" (each takes whole batches) or "samples"
            (each takes a part of every batch).
        on_nan: "stop" at a batch whose loss is not finite, or "skip" it, which the result records.
        output: a folder for a journal, from which an interrupted run resumes, and the result.
        timeout: seconds without a sign of life from another process after which the run stops.
        world: the processes that share the work; by default those that a launcher (accelerate launch, torchrun, srun)
            started, all of which have to make this call. ``World()`` is this process alone.
        progress: called after every step.

    Raises:
        UsageError, DataError, ModelError, UnsupportedModelError, WorldError: says what is wrong, where, and what to do.
    """
    import torch

    check_module(model, "to score a model by its name or folder call score_pretrained")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss is {loss!r:.60}; it is a function of outputs and batch")
    # Wrappers that run a model would get between the ranks, round, or hide what it is.
    model = unwrap(model)
    output = None if output is None else path_of(name_of(output, "output", "name a folder"))
    device = next((p.device.type for p in model.parameters()), "cpu")
    world = _world(world, device, timeout)
    with world.together(), as_written(model):
        check(output=output, progress=progress, processor=processor)
        settings = Settings(
            metric=metric, geodesic=geodesic, symmetries=symmetries, layouts=layouts_of(layouts), rho=radii_of(rho),
            ascent=ascent, steps=steps, starts=starts, seed=seed,
            average=average, baselines=several(baselines), damping=damping, micro_batch=micro_batch,
            gradient_checkpointing=gradient_checkpointing, compile=compile, shard=shard, on_nan=on_nan,
            reproducibility=reproducibility, verify=verify, params=params, per=per, profile=profile,
            stationary=labels == "model",
        )  # fmt: skip
        if dtype not in (None, "float32", "float64"):
            raise UsageError(f"dtype is {dtype!r}; it is float32 or float64")
        if labels not in ("data", "model"):
            raise UsageError(f"labels is {labels!r}; it is data or model")
        if labels == "model" and loss is not None:
            raise UsageError("give a loss or labels='model', not both: labels='model' uses its own loss")
        task = task_of_model(model)
        wide = getattr(torch, dtype) if dtype else None
        batches, data_identity = batches_from(
            data, model, samples=samples, batch_size=batch_size, seed=seed, processor=processor, task=task,
            with_labels=labels == "data", max_length=max_length,
            # What an adapter sits on stays as it is.
            floating=wide if params == "all" else None,
        )  # fmt: skip
        content = _content(batches) if world.size > 1 or output is not None else None
        if labels == "model":
            batches = attach_model_targets(model, batches, task, dtype=wide, params=params)
            loss = divergence(model)
            data_identity = {**data_identity, "labels": "model"}
        elif loss is not None:
            data_identity = {**data_identity, "loss": loss_name(loss)}
        return estimate(
            model,
            batches,
            settings,
            loss=loss,
            weight=partial(readings, task),
            dtype=wide,
            model_identity=_identity(model, task),
            data_identity=data_identity,
            versions=versions(),
            data_digest=content,
            output=output,
            world=world,
            progress=progress,
        )


def score_pretrained(
    model_id: str | os.PathLike[str] | LoadedModel,
    *,
    data: Any = None,
    data_config: str | None = None,
    split: str | None = None,
    task: str = "auto",
    metric: str = "inv",
    geodesic: Order | None = None,
    symmetries: str = "full",
    layouts: Sequence[Layout] = (),
    rho: Rho = None,
    ascent: str = "auto",
    steps: int = 20,
    starts: int = 1,
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
    columns: Columns | Mapping[str, str] | None = None,
    label_map: Mapping[str, Any] | None = None,
    labels: str = "data",
    max_length: int | None = None,
    allow_missing: bool = False,
    micro_batch: int | Literal["auto"] | None = None,
    gradient_checkpointing: bool = False,
    compile: bool = False,
    params: str = "all",
    per: str | None = None,
    profile: bool = False,
    shard: str = "batches",
    on_nan: str = "stop",
    output: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
    world: World | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult:
    """Geodesic sharpness of a stored model: a Hub id, a folder, or a shipped ``demo:NAME`` (or ``demo:NAME-twin``).

    Args:
        model_id: the model; or what :func:`load_pretrained` returns, to score it several times (it takes the options of
            loading then: task, device, dtype, revision, trust_remote_code, allow_missing).
        data: a data set's id, file or folder, or what :func:`score` takes. By default what the model's card names, the
            demo's own data, or for language models a shipped text.
        data_config, split: which configuration of a named data set, and which of its splits ("train" by default).
        task: as in ``hf_geosharp.tasks.kinds``, e.g. "causal-lm"; "auto" takes it from the model.
        device: "auto" (a GPU if there is one), or a torch device.
        dtype: "float32" or "float64", in which the model is loaded and the score is taken.
        revision, token, trust_remote_code: as in transformers.
        columns: names of the columns, :class:`hf_geosharp.Columns` or a mapping; the usual names are found.
        label_map: from labels of the data to classes of the model.
        allow_missing: score even if the checkpoint lacks weights, which are then random.

    Every other argument is that of :func:`score`.

    Raises:
        GeosharpError: what is wrong, where, and what to do; its exit code is that of the command line.
    """
    output = None if output is None else path_of(name_of(output, "output", "name a folder"))
    world = _world(world, device, timeout)
    with world.together():
        check(
            output=output, progress=progress, data_config=data_config, split=split, revision=revision, token=token,
            trust_remote_code=trust_remote_code, allow_missing=allow_missing, label_map=label_map,
        )  # fmt: skip
        settings = Settings(
            metric=metric, geodesic=geodesic, symmetries=symmetries, layouts=layouts_of(layouts), rho=radii_of(rho),
            ascent=ascent, steps=steps, starts=starts, seed=seed,
            average=average, baselines=several(baselines), stationary=labels == "model", micro_batch=micro_batch,
            gradient_checkpointing=gradient_checkpointing, compile=compile, params=params, per=per, profile=profile,
            shard=shard, on_nan=on_nan,
        )  # fmt: skip
        how: dict[str, Any] = {
            "task": task, "device": device, "dtype": dtype, "revision": revision,
            "trust_remote_code": trust_remote_code, "allow_missing": allow_missing,
        }  # fmt: skip
        if isinstance(model_id, LoadedModel):
            loaded = _as_it_is(model_id, how)
        else:
            loaded = load_pretrained(model_id, token=token, params=params, **how)
        demo = _demo_data(loaded)
        own_data = demo is not None and (data is None or (isinstance(data, str) and data == demo))
        prepared = prepare(
            loaded, data=demo if own_data else data, data_config=data_config, split=split, samples=samples,
            batch_size=batch_size, seed=seed, token=token, columns=Columns.of(columns), label_map=label_map,
            labels=labels, params=params, max_length=max_length,
        )  # fmt: skip
        data_identity = dict(prepared.data_identity)
        if own_data:
            # What ships is the same everywhere, wherever it is installed.
            data_identity["id"] = f"{demos.PREFIX}{demos.base_name(loaded.identity['id'])[0]}"
            data_identity["chosen"] = "shipped with the demo"
            data_identity.pop("fingerprint", None)
        return estimate(
            prepared.model,
            prepared.batches,
            settings,
            loss=prepared.loss,
            weight=partial(readings, prepared.task),
            model_identity=dict(prepared.model_identity),
            data_identity=data_identity,
            versions=versions(),
            data_digest=_content(prepared.batches) if world.size > 1 or output is not None else None,
            output=output,
            world=world,
            progress=progress,
        )


def _world(world: World | None, device: str, timeout: float) -> World:
    """The processes that share the work; those that a launcher started if none are given."""
    check(timeout=timeout)
    check_kind("world", world, (World, type(None)), "a World, or None")
    return world or World.find(device, timeout)


def load_pretrained(
    model_id: str | os.PathLike[str],
    *,
    task: str = "auto",
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    allow_missing: bool = False,
    params: str = "all",
) -> LoadedModel:
    """Loads a stored model with its processor, to score it more than once with :func:`score_pretrained`.

    ``params`` "lora" loads an adapter on its base; pass the same to :func:`score_pretrained`.

    Raises:
        GeosharpError: as in :func:`hf_geosharp.tasks.models.load_model`.
    """
    place = model_id = name_of(model_id, "model_id", "for a model in memory call score")
    check(revision=revision, token=token, trust_remote_code=trust_remote_code, allow_missing=allow_missing)
    check_choice("params", params, PARAMS)
    twin = False
    if model_id.startswith(demos.PREFIX):
        demo, twin = demos.base_name(model_id)
        place = str(demos.path(demo))
    loaded = load_model(
        place, task=task, device=device, dtype=dtype, revision=revision, token=token,
        trust_remote_code=trust_remote_code, allow_missing=allow_missing, params=params,
    )  # fmt: skip
    if twin:
        make_twin(loaded.model)
    return replace(loaded, identity={**loaded.identity, "id": model_id})


def _as_it_is(loaded: LoadedModel, how: Mapping[str, Any]) -> LoadedModel:
    defaults = load_pretrained.__kwdefaults__ or {}
    late = [name for name, value in how.items() if value != defaults[name]]
    if late:
        raise UsageError(f"The model is loaded already: give {', '.join(late)} to load_pretrained instead.")
    return loaded


def _demo_data(loaded: LoadedModel) -> str | None:
    """The data that ship with a demo; None for any other model."""
    name = str(loaded.identity["id"])
    return str(demos.path(name) / "data") if name.startswith(demos.PREFIX) else None


def make_twin(model: nn.Module, *, seed: int = TWIN_SEED, condition: float = TWIN_CONDITION) -> None:
    """Moves a model along its orbits by a random element, in place: the same function with other weights."""
    from hf_geosharp.symmetry.find import find_symmetries

    found = find_symmetries(model)
    found.apply(model, found.random_element(model, seed, condition))


def versions() -> dict[str, str]:
    """Versions of this package and of what decides its numbers."""
    from importlib.metadata import version

    return {name: version(name) for name in ("hf-geosharp", "torch", "transformers", "datasets")}


def _content(batches: Sequence[Mapping[str, Any]]) -> str:
    """What tells data apart. A model's own outputs as targets do not: they follow from it, and vary by rounding."""
    return digest_batches(batches, left_out=(TARGET_LOGITS, TARGET_MASK))


def _identity(model: nn.Module, task: Task | None) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {
        "id": getattr(config, "_name_or_path", "") or written_class(model).__name__,
        "class": written_class(model).__name__,
        "task": task.name if task else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
