"""Inputs of which no more has to be known than a shape: a table."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from hf_geosharp.symmetry.inputs.draft import Batch, Draft

TABLE: dict[str, tuple[str, str]] = {
    "visual_feats": ("normal", "rows items visual"),
    "visual_pos": ("uniform", "rows items visual_pos"),
    "visual_embeds": ("normal", "rows items visual"),
    "states": ("normal", "rows tokens state"),
    "actions": ("normal", "rows tokens act"),
    "rewards": ("normal", "rows tokens 1"),
    "returns_to_go": ("normal", "rows tokens 1"),
    "timesteps": ("count", "rows tokens"),
    "inputs": ("normal", "rows tokens latent"),
    "past_time_features": ("normal", "rows history time_features"),
    "past_observed_mask": ("ones", "rows history"),
    "past_values_padding": ("zeros", "rows history"),
    "freq": ("count", "rows 1"),
    "future_values": ("normal", "rows horizon"),
    "future_time_features": ("normal", "rows horizon time_features"),
    "query_embeds": ("normal", "rows items hidden"),
    "encoder_hidden_states": ("normal", "rows items encoder_hidden"),
    "hidden_states": ("normal", "rows tokens hidden"),
    "inputs_embeds": ("normal", "rows tokens hidden"),
    "image_features": ("normal", "rows items hidden"),
    "latents": ("normal", "rows latent tokens"),
    "spectrogram": ("normal", "rows tokens mel"),
    "audio_mel": ("normal", "rows frames mel"),
    "audio_mel_mask": ("false", "rows frames"),
    "input_features_mask": ("ones", "rows frames"),
    "feature_attention_mask": ("ones", "rows frames"),
    "padding_mask": ("ones", "rows frames"),
    "pixel_mask": ("ones", "rows height width"),
    "prompt_masks": ("normal", "rows 3 height width"),
    "image_attention_mask": ("ones", "rows tokens images"),
    "qformer_input_ids": ("count", "rows items"),
    "task_inputs": ("count", "rows task"),
    "attention_mask": ("ones", "rows tokens"),
    "global_attention_mask": ("first", "rows tokens"),
}
"""What such inputs are filled with, and the names or numbers of their sides."""

OPTIONAL = ("visual_feats", "visual_pos", "visual_embeds", "states", "actions", "returns_to_go", "timesteps",
            "inputs", "global_attention_mask")  # fmt: skip
"""Inputs that are given although the signature has a default for them: the model does little without."""

INSTEAD = ("inputs_embeds", "hidden_states")
"""Inputs that take the place of others: given only where the signature demands them."""

LIKE_HIDDEN = re.compile(r"(embeds|states|features|embeddings|queries|encoding)$")
"""Names of inputs that the table does not know and that are vectors as wide as the model."""


def usual(draft: Draft) -> Batch:
    """What is required, and what the model does little without."""
    future = ["future_values", "future_time_features"] if "past_time_features" in draft.required else []
    return _fill_in(draft, [*draft.required, *(n for n in draft.names if n in OPTIONAL or n in future)])


def only_required(draft: Draft) -> Batch:
    """What is required, and masks."""
    return _fill_in(draft, [*draft.required, *(n for n in draft.names if n.endswith("_mask"))])


def everything_known(draft: Draft) -> Batch:
    """What is required, and all that the table knows."""
    return _fill_in(draft, [*draft.required, *(n for n in draft.names if n in TABLE and n not in INSTEAD)])


def _fill_in(draft: Draft, names: list[str]) -> Batch:
    """These inputs, less those that are made already; those that nobody knows are remembered."""
    new: Batch = {}
    draft.sides.setdefault("history", _steps(draft))
    for name in names:
        if name in draft.made or name in new:
            continue
        if name == "past_values":
            new[name] = _history(draft)
        elif name in TABLE:
            new[name] = _fill(draft, *TABLE[name])
        elif LIKE_HIDDEN.search(name) and name in draft.required:
            new[name] = draft.normal(draft.rows, draft.size("tokens"), draft.size("hidden"))
        elif name in draft.required and name not in draft.unknown:
            draft.unknown.append(name)
    return new


def _fill(draft: Draft, how: str, shape: str) -> Tensor:
    sides = [draft.size(s) for s in shape.split()]
    if how == "normal":
        return draft.normal(*sides)
    if how == "uniform":
        return torch.rand(sides, generator=draft.generator).to(draft.dtype)
    if how == "count":
        return torch.arange(sides[-1]).expand(sides).clone()
    kinds = {"zeros": draft.dtype, "false": torch.bool}
    filled = torch.full(sides, int(how == "ones"), dtype=kinds.get(how, torch.long))
    if how == "first":
        filled[..., 0] = 1
    return filled


def _steps(draft: Draft) -> int:
    """Steps of a series that a forecast starts from, with those that only its lags look at."""
    lags = draft.facts.get("lags_sequence") or [0]
    return (draft.facts.number(("context_length", "max_sequence_length")) or draft.size("steps")) + max(lags)


def _history(draft: Draft) -> Tensor:
    """Positive series, of several channels where the configuration knows channels."""
    several = draft.facts.number("num_input_channels") or draft.facts.number("input_size") or 0
    channels = [several] if several > 1 or draft.facts.number("num_input_channels") else []
    return draft.normal(draft.rows, draft.size("history"), *channels).abs()
