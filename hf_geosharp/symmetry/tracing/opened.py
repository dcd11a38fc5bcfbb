"""Attention that torch computes at one go, written out, so that its softmax is seen."""

from __future__ import annotations

import math
import types

import torch
from torch import Tensor
from torch.nn import functional


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    logits = query @ key.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~causal, torch.finfo(logits.dtype).min)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, torch.finfo(logits.dtype).min)
        else:
            logits = logits + attn_mask
    return functional.softmax(logits, dim=-1) @ value


# The same function, except that it does not hand itself over to the mode as a whole.
open_attention = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**functional.__dict__, "has_torch_function": lambda *_: False},
    "multi_head_attention_forward",
    functional.multi_head_attention_forward.__defaults__,
    functional.multi_head_attention_forward.__closure__,
)
"""Multi-head attention."""
