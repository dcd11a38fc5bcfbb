"""A model's config.json: read, refused where no score is possible, and the task that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_geosharp.errors import ModelError, UnsupportedModelError, UsageError
from hf_geosharp.tasks.hub import Source, fetch, fetch_optional
from hf_geosharp.tasks.kinds import TASKS, Task, find_task, task_names, task_of
from hf_geosharp.tasks.load_errors import load_error


def read_config(source: Source) -> tuple[dict[str, Any], Source]:
    """The raw config.json, and the source pinned to the commit it came from.

    Raises:
        ModelError: There is none, or it is not valid.
        UnsupportedModelError: An adapter is there instead of a model.
        HubError: The Hub does not give it.
    """
    path = fetch(source, "config.json")
    refuse_adapter(source)
    if path is None:
        where = "the folder" if source.folder is not None else "the repository"
        raise ModelError(f"{source.id} is not a model: {where} has no config.json.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{source.id}: config.json cannot be read ({error}).") from error
    except ValueError as error:
        raise ModelError(f"{source.id}: config.json cannot be read: it is not valid JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{source.id}: config.json cannot be read: it holds no object but a {type(raw).__name__}.")
    # On the Hub's cache the file lies in snapshots/<commit>/.
    return raw, source.at(path.parent.name)


def refuse_adapter(source: Source) -> None:
    """Refuses an adapter where a model is wanted.

    Adapters may carry a config.json too, and from_pretrained would load base and adapter without a word.

    Raises:
        UnsupportedModelError: An adapter is there.
    """
    if fetch_optional(source, "adapter_config.json") is not None:
        raise UnsupportedModelError(
            f"{source.id} is an adapter (adapter_config.json), not a model. Merge the adapter first "
            "(PEFT's merge_and_unload, then save_pretrained) and pass the merged model, or score the adapter alone: "
            "params 'lora' (--params lora)."
        )


def load_config(source: Source, trust_remote_code: bool) -> Any:
    """The config as transformers reads it.

    Raises:
        ModelError: transformers does not know it, or it needs code of its own.
        HubError: The Hub does not give it.
    """
    from transformers import AutoConfig

    try:
        # Always said explicitly: None would ask the user on the terminal.
        return AutoConfig.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options())
    except Exception as error:
        raise load_error(source, error, trust_remote_code, weights=False) from error


def refuse_quantised(source: Source, config: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose weights cannot be perturbed.

    Raises:
        UnsupportedModelError: The config says that the checkpoint is quantised.
    """
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        raise UnsupportedModelError(
            f"{source.id} is quantised ({method or 'quantization_config in its config.json'}): its weights cannot be "
            "perturbed. Score the model it was made from."
        )


def choose_task(source: Source, raw: Mapping[str, Any], name: str) -> Task:
    """The task of that name; for ``"auto"`` the one of the config's architecture.

    Raises:
        UsageError: No task is called so, or the config names no architecture.
        UnsupportedModelError: Its architecture does none of the tasks.
    """
    if name != "auto":
        return find_task(name)
    architecture = _architecture(raw)
    if architecture is None:
        raise UsageError(
            f"{source.id}: its config.json names no architecture, so its task is not known. "
            f"Pass task (--task), one of: {task_names()}."
        )
    found = task_of_config(raw)
    if found is None:
        raise UnsupportedModelError(
            f"{source.id} is a {architecture}, which does none of the tasks that can be scored: {task_names()}. "
            "If its weights have such a head nevertheless, name it with task (--task). From Python, hf_geosharp.score "
            "takes any model that returns a loss, with batches of your own."
        )
    return found


def task_of_config(raw: Mapping[str, Any]) -> Task | None:
    """The task of the config's architecture; None if none of ours is."""
    architecture = _architecture(raw)
    return (None if architecture is None else task_of(architecture)) or _task_of_remote_code(raw)


def _architecture(raw: Mapping[str, Any]) -> str | None:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _task_of_remote_code(raw: Mapping[str, Any]) -> Task | None:
    auto_map = raw.get("auto_map") or {}
    return next((task for task in TASKS if task.auto_class in auto_map), None)
