"""Loading a model of whatever class its config names, with its weights or with random ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import ModelError, UsageError, warn
from hf_geosharp.sharpness.choices import DTYPES
from hf_geosharp.tasks.config import load_config, read_config, refuse_quantised, task_of_config
from hf_geosharp.tasks.devices import find_device
from hf_geosharp.tasks.hub import Source, find_source
from hf_geosharp.tasks.kinds import Task, find_task, task_names
from hf_geosharp.tasks.loaded import LoadedModel, identity_of, with_processor
from hf_geosharp.tasks.quiet import quiet_transformers
from hf_geosharp.tasks.random_init import build
from hf_geosharp.tasks.weights import load_weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Network:
    """A model of whatever class its config names, which need not do a task that can be scored.

    Attributes:
        model: The model, in eval mode, in the asked dtype, on the asked device.
        task: What it does, if that is one of ours.
        identity: What was loaded or built, for the result (JSON-able).
        unexpected: Weights of the checkpoint that the model has no place for.
        source, trust_remote_code: Where its processor comes from, and whether code from there may run.
    """

    model: torch.nn.Module
    task: Task | None
    identity: dict[str, Any]
    unexpected: tuple[str, ...]
    source: Source
    trust_remote_code: bool

    def for_data(self) -> LoadedModel:
        """The same with the processor that data need.

        Raises:
            UsageError: It does none of the tasks whose data can be read.
        """
        if self.task is None:
            raise UsageError(
                f"{self.source.id} is a {type(self.model).__name__}, which does none of the tasks whose data can be "
                f"read: {task_names()}."
            )
        return with_processor(self.source, self.model, self.task, self.identity, self.trust_remote_code)


def load_network(
    model_id: str | os.PathLike[str],
    *,
    task: str = "auto",
    random_init: bool = False,
    seed: int = 0,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    device: str = "auto",
    allow_missing: bool = False,
) -> Network:
    """Loads a model of any class, or builds it from its config alone.

    The class is that of ``task``; without one what the config names (``architectures``); else the one of AutoModel.

    Args:
        model_id: A folder (with nothing but config.json for ``random_init``), or the id of a model on the Hub.
        task: A task's name, or ``"auto"``.
        random_init: Whether to build it with random weights, which takes no checkpoint. They are not those that a
            training starts from: biases and norms are random too, and attention depends on its input.
        seed: Of the random weights.
        revision, token, trust_remote_code, dtype, device, allow_missing: As for
            :func:`hf_geosharp.tasks.models.load_model`.

    Raises:
        GeosharpError: As for that; ModelError where the config belongs to no class of models.
    """
    if dtype not in DTYPES:
        raise UsageError(f"The dtype {dtype!r} cannot be used: it is {' or '.join(DTYPES)}.")
    target = find_device(device)
    source = find_source(model_id, revision, token)
    raw, source = read_config(source)
    chosen = find_task(task) if task != "auto" else task_of_config(raw)
    with quiet_transformers():
        config = load_config(source, trust_remote_code)
        loader = _loader(source, raw, config, chosen if task != "auto" else None)
        missing: list[str] = []
        unexpected: list[str] = []
        if random_init:
            model = build(source, config, loader, seed, dtype, trust_remote_code)
        else:
            refuse_quantised(source, raw)
            refuse_quantised(source, getattr(config, "__dict__", {}))
            model, missing, unexpected = load_weights(source, config, loader, dtype, trust_remote_code, allow_missing)
    model.eval()
    model.to(target)
    identity = identity_of(source, raw, model, chosen, dtype, missing)
    if random_init:
        identity |= {"checkpoint_dtype": None, "random_init": True, "seed": seed}
    return Network(model, chosen, identity, tuple(unexpected), source, trust_remote_code)


def _loader(source: Source, raw: Mapping[str, Any], config: Any, task: Task | None) -> Any:
    """The class of transformers that makes the model."""
    import transformers

    architecture = next(iter(raw.get("architectures") or ()), "")
    named = getattr(transformers, architecture, None) if architecture and task is None else None
    if named is not None and hasattr(named, "from_pretrained"):
        return named
    # Code of the repository's own is reached through the auto class that its config names for it.
    own = {auto: str(reference).rpartition(".")[2] for auto, reference in (raw.get("auto_map") or {}).items()}
    for auto, name in own.items():
        if task is None and name == architecture and hasattr(transformers, auto):
            return getattr(transformers, auto)
    if architecture and task is None:
        warn(
            f"{source.id}: its config.json names {architecture}, a class that transformers does not have and the "
            "repository has no code for; the model without a head is used. Pass task (--task) for another class."
        )
    auto, mapping = (task.auto_class, task.mapping) if task is not None else ("AutoModel", "MODEL_MAPPING_NAMES")
    # Asked here, for transformers' own answer takes ten seconds and lists every model there is.
    if auto not in own and type(config) not in getattr(transformers, mapping.removesuffix("_NAMES")):
        kind = f" for {task.name}" if task is not None else ""
        raise ModelError(
            f"{source.id}: transformers has no model{kind} that takes a {type(config).__name__}. Pass another "
            "task (--task), or name the model's class in architectures of its config.json."
        )
    return getattr(transformers, auto)
