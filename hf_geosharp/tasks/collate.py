"""From samples to batches: each padded to its own longest text, fractions in the model's precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_geosharp.errors import DataError
from hf_geosharp.tasks.kinds import IGNORED

if TYPE_CHECKING:
    import torch

# What fills the end of a sequence where it is not 0, as of masks; that of tokens is the tokenizer's.
_FILL = {"labels": IGNORED, "special_tokens_mask": 1}
_TOKENS = "input_ids"


def collate(
    samples: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
    floating: torch.dtype | None = None,
    side: str | None = None,
) -> dict[str, torch.Tensor]:
    """One batch of the samples; every tensor has them as its first dimension.

    Args:
        samples: Encoded rows with the same keys.
        tokenizer: Says with what and on which side to pad; None where nothing needs padding.
        floating: The dtype of fractions; None means float32.
        side: On which side to pad, "left" or "right"; None means the tokenizer's.

    Raises:
        DataError: A key's values differ in length and there is no tokenizer to pad them.
    """
    left = (side or getattr(tokenizer, "padding_side", "right")) == "left"
    return {
        key: tidy(_stack(key, [sample[key] for sample in samples], tokenizer, left), floating, key == "labels")
        for key in samples[0]
    }


def _stack(key: str, values: list[Any], tokenizer: Any, left: bool) -> torch.Tensor:
    import torch

    tensors = [torch.as_tensor(value) for value in values]
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors)
    if tokenizer is None or any(tensor.ndim != 1 for tensor in tensors):
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        raise DataError(
            f"The values of {key!r} differ in shape within a batch ({shapes[0]}, {shapes[-1]}). Pass the tokenizer "
            "as processor= to pad them, or pad them yourself."
        )
    longest = max(len(tensor) for tensor in tensors)
    filler = tokenizer.pad_token_id if key.endswith(_TOKENS) else _FILL.get(key)
    stacked = torch.full((len(tensors), longest), filler or 0, dtype=tensors[0].dtype)
    for row, tensor in zip(stacked, tensors, strict=True):
        start = longest - len(tensor) if left else 0
        row[start : start + len(tensor)] = tensor
    return stacked


def model_dtype(model: Any) -> torch.dtype:
    """The dtype that fractions are passed to a model in: that of its weights, float32 where these are shorter."""
    import torch

    weights = next((p for p in model.parameters() if p.is_floating_point()), None)
    return torch.float64 if weights is not None and weights.dtype == torch.float64 else torch.float32


def tidy(tensor: torch.Tensor, floating: torch.dtype | None = None, number: bool = False) -> torch.Tensor:
    """The tensor on the CPU, whole numbers as int64, fractions as float32 or what is asked for.

    Booleans stay what they are, for torch's own attention takes no other masks, unless it has to be a ``number``.
    """
    import torch

    if tensor.is_inference():
        # Autograd cannot keep what was made in inference mode.
        tensor = tensor.clone()
    if tensor.is_complex() or (tensor.dtype == torch.bool and not number):
        return tensor.detach().cpu()
    wanted = (floating or torch.float32) if tensor.is_floating_point() else torch.int64
    return tensor.detach().to(device="cpu", dtype=wanted)
