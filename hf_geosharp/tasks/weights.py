"""Weights of a checkpoint: all of them present and of the right shape, or an error that names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_geosharp.errors import ModelError, warn
from hf_geosharp.tasks.hub import Source
from hf_geosharp.tasks.load_errors import load_error

_SHOWN = 6


def load_weights(
    source: Source, config: Any, loader: Any, dtype: str, trust_remote_code: bool, allow_missing: bool,
    *, silent: bool = False,
) -> tuple[Any, list[str], list[str]]:  # fmt: skip
    """The model, the weights that the checkpoint lacks, and those that the model has no place for.

    With ``silent`` the caller deals with those that are missing. The dtype "auto" is that of the checkpoint.

    Raises:
        ModelError: Weights are missing or do not fit, there are none, or the model needs code of its own.
        HubError: The Hub does not give them.
    """
    import torch

    try:
        model, report = loader.from_pretrained(
            source.place,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Reported below, by name; transformers' own error is a wall of text.
            ignore_mismatched_sizes=True,
            **source.options(),
        )
    except Exception as error:
        raise load_error(source, error, trust_remote_code) from error
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"])
    if mismatched:
        raise ModelError(
            f"{source.id}: the shapes of {len(mismatched)} weights do not fit its config.json: {_some(mismatched)}. "
            "Correct the config (number of labels, sizes) or pass the checkpoint that belongs to it."
        )
    if report.get("error_msgs"):
        raise ModelError(f"{source.id}: weights do not load: {'; '.join(map(str, report['error_msgs']))}.")
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing and not silent:
        report_missing(source, missing, unexpected, type(model).__name__, allow_missing)
    return model, missing, unexpected


def report_missing(source: Source, missing: list[str], unexpected: list[str], name: str, allowed: bool) -> None:
    """Names the weights that the checkpoint lacks: in a warning where that is allowed.

    Args:
        source: Where the checkpoint is from.
        missing: Weights of the model that are not in it.
        unexpected: Weights in it that the model has no place for.
        name: The model's class.
        allowed: Whether they may be random numbers.

    Raises:
        ModelError: They may not.
    """
    text = f"{source.id}: the checkpoint lacks {len(missing)} of the weights of {name}: {_some(missing)}."
    if unexpected:
        text += f" It has {len(unexpected)} that {name} has no place for: {_some(unexpected)}."
    if not allowed:
        raise ModelError(
            f"{text} They would be random numbers. Pass the fine-tuned model, or the task (--task) that the "
            "checkpoint was trained for, or allow it with allow_missing (--allow-missing)."
        )
    warn(f"{text} They are random numbers.")


def left_out(unexpected: Sequence[str], name: str) -> str:
    """In words, what of a checkpoint is not in the model: a head of another task, or layers beyond its config."""
    return f"the checkpoint has {len(unexpected)} weights that {name} has no place for: {_some(unexpected)}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
