"""Synthetic inputs for a model whose user gave none: enough to run it, varied enough to tell directions apart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 13
"""Tokens of a synthetic sequence (or more: see :func:`synthetic`)."""


def synthetic(model: nn.Module, *, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> dict[str, Tensor]:
    """A batch of random inputs made from the model's signature and configuration.

    Text models get ``input_ids`` (rows, tokens) over the whole vocabulary with a padded tail in the last row,
    image models ``pixel_values`` (rows, channels, height, width), encoder-decoders ``decoder_input_ids`` too.

    Raises:
        ValueError: the model wants an input that cannot be made up; pass an example batch instead.
    """
    config = getattr(model, "config", None)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    main = getattr(model, "main_input_name", "input_ids")
    names = inspect.signature(model.forward).parameters
    batch: dict[str, Tensor] = {}
    if main == "pixel_values":
        height, width = _image_size(config)
        batch["pixel_values"] = torch.randn(
            rows, getattr(config, "num_channels", 3), height, width, generator=generator
        )
    elif main == "input_ids" and _vocabulary(config):
        limit = getattr(config, "max_position_embeddings", None) or tokens + 2
        tokens = max(2, min(tokens, limit - 2))
        vocabulary = _vocabulary(config)
        batch["input_ids"] = torch.randint(min(3, vocabulary - 1), vocabulary, (rows, tokens), generator=generator)
        mask = torch.ones(rows, tokens, dtype=torch.long)
        mask[-1, tokens - 2 :] = 0
        batch["attention_mask"] = mask
        if "decoder_input_ids" in names:
            batch["decoder_input_ids"] = torch.randint(
                min(3, vocabulary - 1), vocabulary, (rows, max(2, tokens - 3)), generator=generator
            )
    else:
        raise ValueError(f"cannot make up the input {main!r} of {type(model).__name__}; pass an example batch")
    return {k: v.to(device) for k, v in batch.items()}


def _vocabulary(config: Any) -> int:
    return int(getattr(config, "vocab_size", 0) or 0)


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 32
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (int(size), int(size))


def call(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Runs a model on a batch as the score does: private keys left out, no cache kept."""
    inputs = {k: v for k, v in batch.items() if not k.startswith("_")}
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and "use_cache" in inspect.signature(model.forward).parameters:
        inputs.setdefault("use_cache", False)
    return model(**inputs)


_INSIDE = ("hidden_states", "encoder_last_hidden_state", "encoder_hidden_states", "decoder_hidden_states")
"""Outputs of a model with a head that only report what went on inside it: a symmetry may move them."""


def output_tensors(outputs: Any) -> list[Tensor]:
    """All floating-point tensors of a model's output, in order; next to logits no hidden states."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        left_out = _INSIDE if "logits" in outputs else ()
        return [t for k, v in outputs.items() if k not in left_out for t in output_tensors(v)]
    if isinstance(outputs, (list, tuple)):
        return [t for v in outputs for t in output_tensors(v)]
    return []
