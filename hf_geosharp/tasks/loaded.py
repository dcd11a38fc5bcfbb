"""A model ready to be scored, with what comes along: processor, card, and what to call it in a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import warn
from hf_geosharp.tasks.hub import Source, fetch_optional
from hf_geosharp.tasks.kinds import Task
from hf_geosharp.tasks.processors import load_processor, set_pad_token
from hf_geosharp.tasks.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be scored.

    Attributes:
        model: The model, in eval mode, in the asked dtype, on the asked device.
        processor: Its tokenizer or image processor; None if it comes with none (``processor_error`` says why).
        task: What it does.
        identity: What was loaded, for the result (JSON-able).
        card: The metadata of its model card; empty if it has none.
    """

    model: torch.nn.Module
    processor: Any
    task: Task
    identity: dict[str, Any]
    card: dict[str, Any] = field(default_factory=dict)
    processor_error: str | None = None


def with_processor(
    source: Source, model: Any, task: Task, identity: dict[str, Any], trust_remote_code: bool
) -> LoadedModel:
    """A model that was loaded from ``source``, with the processor and the card that are there.

    Raises:
        ModelError: Its tokenizer cannot pad.
    """
    with quiet_transformers():
        processor, reason = load_processor(source, task, trust_remote_code)
    if task.modality == "text" and processor is not None:
        set_pad_token(source, model, processor)
    return LoadedModel(
        model=model,
        processor=processor,
        task=task,
        identity=identity,
        card=read_card(source),
        processor_error=reason,
    )


def identity_of(
    source: Source, raw: Mapping[str, Any], model: Any, task: Task | None, dtype: str, missing: list[str]
) -> dict[str, Any]:
    """What was loaded, for the result: of a raw config.json, and the weights that the checkpoint lacks."""
    identity = {
        "id": source.id,
        "revision": source.revision,
        "class": type(model).__name__,
        "task": task.name if task else None,
        "checkpoint_dtype": raw.get("dtype") or raw.get("torch_dtype"),
        "dtype": dtype,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return {**identity, "missing": missing} if missing else identity


def read_card(source: Source) -> dict[str, Any]:
    """The metadata of the model card; empty where there is none, and, with a warning, where it cannot be read."""
    path = fetch_optional(source, "README.md")
    if path is None:
        return {}
    from huggingface_hub import metadata_load

    try:
        data = metadata_load(path)
    except Exception as error:
        warn(f"{source.id}: the metadata of its model card cannot be read ({error}).")
        return {}
    return data if isinstance(data, dict) else {}
