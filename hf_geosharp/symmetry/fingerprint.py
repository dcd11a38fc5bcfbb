"""What a model computes, as a digest: its code, its settings and every bit of its weights.

Two models of one fingerprint give the same outputs, so that what was proved on the one is proved for the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = ("torch", "transformers", "peft")
"""Whose code is known by its version."""


def fingerprint(model: nn.Module) -> str | None:
    """The digest; None where code takes part that is not one of the libraries', or weights that lie elsewhere."""
    config: Any = getattr(model, "config", None)
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    if not hasattr(config, "to_dict") or any(map(_is_foreign, model.modules())):
        return None
    if any(type(t) not in (Tensor, nn.Parameter) or t.is_meta for t in tensors.values()):
        return None
    return _of(
        {
            "config": {k: v for k, v in config.to_dict().items() if k != "_name_or_path"},
            "implementations": [getattr(config, f"_{n}_implementation", None) for n in ("attn", "experts")],
            "modules": [[n, type(m).__module__, type(m).__qualname__] for n, m in model.named_modules()],
            "tensors": _contents(tensors),
        }
    )


def of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """The digest of inputs."""
    return _of([[_contents({k: v}) if isinstance(v, Tensor) else [k, v] for k, v in b.items()] for b in batches])


def _of(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def _is_foreign(module: nn.Module) -> bool:
    """Whether something else than a library's class decides what a module does."""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return bool(changed) or type(module).__module__.partition(".")[0] not in LIBRARIES


def _contents(tensors: Mapping[str, Tensor]) -> list[list[object]]:
    """Name, dtype, device, shape and digest of each; what shares memory is read once."""
    places = {n: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for n, t in tensors.items()}
    each = {places[n]: t for n, t in tensors.items()}
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        digests = dict(zip(each, pool.map(_digest, each.values()), strict=True))
    return [[n, str(t.dtype), t.device.type, list(t.shape), digests[places[n]]] for n, t in tensors.items()]


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()
