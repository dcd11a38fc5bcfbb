"""How a model is run, and which of its outputs count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from hf_geosharp.symmetry.grouped import in_double_precision


def without_adapter(model: nn.Module) -> nn.Module:
    """The model that an adapter's wrapper (PEFT's) hands everything on to; a model without one is itself."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return base


def call(model: nn.Module, batch: Mapping[str, Any], run: Callable[..., Any] | None = None) -> Any:
    """Runs a model on a batch as the score does: private keys left out, no cache kept, experts in any precision.

    ``run`` is what stands for the model, compiled for one.
    """
    inputs = {k: v for k, v in batch.items() if not k.startswith("_")}
    if "use_cache" in inspect.signature(without_adapter(model).forward).parameters:
        inputs.setdefault("use_cache", False)
    with in_double_precision(model):
        return (run or model)(**inputs)


_INSIDE = ("hidden_states", "encoder_last_hidden_state", "encoder_hidden_states", "decoder_hidden_states")
"""Outputs of a model with a head that only report what went on inside it: a symmetry may move them."""


def output_tensors(outputs: Any) -> list[Tensor]:
    """All floating-point tensors of a model's output, in order; next to logits no hidden states."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, SimpleNamespace):
        outputs = vars(outputs)
    elif is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        outputs = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    if isinstance(outputs, Mapping):
        left_out = _INSIDE if "logits" in outputs else ()
        return [t for k, v in outputs.items() if k not in left_out for t in output_tensors(v)]
    if isinstance(outputs, (list, tuple)):
        return [t for v in outputs for t in output_tensors(v)]
    return []
