"""Loading an adapter of PEFT on its base, which keeps the precision that it is stored in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import ModelError, UsageError
from hf_geosharp.tasks.config import choose_task, load_config, read_config
from hf_geosharp.tasks.hub import Source, fetch, find_source, hub_error, is_hub_failure
from hf_geosharp.tasks.loaded import LoadedModel, identity_of, with_processor
from hf_geosharp.tasks.quiet import quiet_transformers
from hf_geosharp.tasks.weights import load_weights, report_missing

if TYPE_CHECKING:
    import torch

_TASKS_OF_PEFT = {"SEQ_CLS": "text-classification", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq-lm"}
"""What adapter_config.json says of the task, where it says something."""


def load_adapter(
    source: Source, target: torch.device, task: str, trust_remote_code: bool, allow_missing: bool
) -> LoadedModel:
    """An adapter on its base, which keeps the precision that it is stored in.

    Raises:
        UsageError: It is no adapter, or PEFT is not there to load it.
        ModelError: The adapter or its base does not load, or one does not fit the other.
        HubError: The Hub does not give one of the two.
    """
    import transformers

    raw, source = read_adapter(source)
    base = find_source(raw["base_model_name_or_path"], raw.get("revision"), source.token)
    config_of_base, base = read_config(base)
    named = task_of_adapter(raw)
    chosen = choose_task(base, config_of_base, named if task == "auto" and named is not None else task)
    with quiet_transformers():
        config = load_config(base, trust_remote_code)
        loader = getattr(transformers, chosen.auto_class)
        # What the adapter brings along (a classifier, say) is no loss.
        brought = bool(raw.get("modules_to_save"))
        model, missing, _ = load_weights(base, config, loader, "auto", trust_remote_code, allow_missing, silent=brought)
        adapted = _with_adapter(source, model)
    missing = [name for name in missing if not any(f".{part}." in f".{name}." for part in raw["modules_to_save"] or ())]
    if missing and brought:
        report_missing(base, missing, [], type(model).__name__, allow_missing)
    adapted.eval()
    if getattr(model, "hf_quantizer", None) is None:
        # Where quantised weights lie is decided when they are loaded.
        adapted.to(target)
    dtype = str(config_of_base.get("dtype") or config_of_base.get("torch_dtype") or "float32")
    identity = identity_of(source, config_of_base, model, chosen, dtype, missing)
    identity |= {"base": base.id, "base_revision": base.revision}
    own = with_processor(source, adapted, chosen, identity, trust_remote_code)
    if own.processor is not None:
        # The one that was trained with: a Trainer saves it along with the adapter.
        return own
    return replace(with_processor(base, adapted, chosen, identity, trust_remote_code), card=own.card)


def task_of_adapter(raw: Mapping[str, Any]) -> str | None:
    """The task that an adapter_config.json names; None where only the base tells."""
    return _TASKS_OF_PEFT.get(str(raw.get("task_type")))


def read_adapter(source: Source) -> tuple[dict[str, Any], Source]:
    """The raw adapter_config.json, and the source pinned to the commit it came from.

    Raises:
        UsageError: There is none.
        ModelError: It is not valid.
        HubError: The Hub does not give it.
    """
    path = fetch(source, "adapter_config.json")
    if path is None:
        where = "the folder" if source.folder is not None else "the repository"
        raise UsageError(
            f"{source.id} is not an adapter: {where} has no adapter_config.json. params 'lora' (--params lora) scores "
            "an adapter on its base; leave it out to score all weights of a model."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{source.id}: adapter_config.json is not valid JSON ({error}).") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("base_model_name_or_path"), str):
        raise ModelError(
            f"{source.id}: adapter_config.json does not name the model that the adapter belongs to "
            "(base_model_name_or_path)."
        )
    raw.setdefault("modules_to_save", None)
    return raw, source.at(path.parent.name)


def _with_adapter(source: Source, model: Any) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UsageError(f"{source.id} is an adapter, which needs the package peft: pip install peft.") from error
    try:
        return PeftModel.from_pretrained(model, source.place, **source.options())
    except Exception as error:
        if source.folder is None and is_hub_failure(error):
            raise hub_error(error, f"adapter {source.id!r}") from error
        raise ModelError(
            f"{source.id}: the adapter does not fit its base: {type(error).__name__}: {str(error).strip()}"
        ) from error
